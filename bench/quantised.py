"""Decode steps with quantised weights on the CPU's native kernels, beside the same steps in bfloat16 and on XLA.

    python -m bench.quantised [MODEL ...] [--forms int8,int8-weight-only,int4,fp8] [--rows 1,16] [--json FILE]

MODEL is a shape of ``bench.models`` or a directory with a config.json (default: llama-60m); weights are random. Forms
are names of ``--quantization``. A turn runs one call of each side, A B A B, with the kernels; ratios are medians over
turns of the time in bfloat16 over that of the form. ``xla_ms`` is the form without the kernels, a few calls behind the
turns; 0 with ``--no-xla``. GB/s counts each stored byte once, beside what reading memory alone reaches.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import report
from bench.native import PAGE, Call, config_of, drawn, in_turns, read_gb_s, steps
from bench.probe import record
from jserve.model import native
from jserve.model.hand import step_model
from jserve.model.quant import QTensor
from jserve.model.quant_specs import quantised_specs
from jserve.model.step import StepModel
from jserve.weights.quant.on_load import on_load

SHOWN = (
    "{model:12} {form:17} {rows:4d} {bf16_ms:9.2f} {form_ms:9.2f} {ratio:6.2f} {xla_ms:9.2f}"
    " {gb_s:7.1f} {read_gb_s:7.1f} {of_bytes:6.2f}"
)
HEAD = "model        form              rows   bf16 ms   form ms  ratio    XLA ms    GB/s    read  bytes"
XLA_CALLS = 3


def with_form(model: StepModel, name: str) -> StepModel:
    """``model`` with weights as ``--quantization`` makes them."""
    form_of = on_load(name, "bfloat16", {}).form_of
    return dataclasses.replace(model, family=quantised_specs(model.family, form_of))


def drawn_numbers(tree: Any) -> Any:
    """``drawn`` of a tree that has quantised matrices: small weights of all bits."""
    bits = np.random.default_rng(1).integers(0, 120, 1 << 20).astype(np.uint8)

    def numbers(w: QTensor) -> QTensor:
        q = jnp.asarray(np.resize(bits, w.q.shape).view(w.q.dtype))
        scale = jnp.full(w.scale.shape, w.shape[-1] ** -0.5 / 60, jnp.float32)
        return QTensor(q=q, scale=scale, zero=None, form=w.form)

    def one(leaf: Any) -> Any:
        return numbers(leaf) if isinstance(leaf, QTensor) else drawn(leaf)

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, QTensor))


def seconds_of(call: Call) -> float:
    """Median of a few calls, behind one that warms."""
    found = []
    for _ in range(XLA_CALLS + 1):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def measure(
    name: str,
    forms: Sequence[str],
    rows: Sequence[int],
    context: int,
    level: str,
    turns: int,
    with_xla: bool,
) -> list[dict[str, Any]]:
    """Lines of the record of one model."""
    pages = -(-context // PAGE)
    wide = step_model(
        config_of(name), slots=max(2, *rows), row_pages=pages, page_size=PAGE, dtype=jnp.bfloat16
    )
    params = drawn(wide.abstract_params())
    lines = []
    for form in forms:
        model = with_form(wide, form)
        numbers = drawn_numbers(model.abstract_params())
        stored, of_bf16 = size(numbers), size(params)
        for n in rows:
            before = steps(wide, params, n, context, level)
            ours = steps(model, numbers, n, context, level)
            times = in_turns(before, ours, turns)
            line = {"model": Path(name).name, "form": form, "rows": n}
            line |= {"bf16_ms": times["xla_ms"], "form_ms": times["native_ms"]}
            xla = steps(model, numbers, n, context, "") if with_xla else None
            seconds = seconds_of(xla) if xla else 0.0
            line |= {"ratio": times["ratio"], "xla_ms": round(seconds * 1e3, 3)}
            line["gb_s"] = round(stored / line["form_ms"] / 1e6, 1)
            line["read_gb_s"] = round(read_gb_s(), 1)
            line["of_bytes"] = round(stored / of_bf16, 3)
            lines.append(line)
            print(SHOWN.format(**line), flush=True)
    return lines


def size(tree: Any) -> int:
    """Bytes of parameters."""
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.quantised", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("models", nargs="*", default=["llama-60m"], metavar="MODEL")
    every = "int8,int8-weight-only,int4,fp8"
    parser.add_argument("--forms", default=every, help=f"names of --quantization ({every})")
    parser.add_argument("--rows", default="1,16", help="numbers of rows (1,16)")
    parser.add_argument("--context", type=int, default=320, help="tokens of each sequence (320)")
    parser.add_argument("--level", default="", help="a lower level of the kernels")
    parser.add_argument("--turns", type=int, default=15, help="calls of either side (15)")
    parser.add_argument("--no-xla", action="store_true", help="leave out XLA's products")
    parser.add_argument("--json", type=Path, default=None, help="result file to write")
    args = parser.parse_args(argv)
    rows = [int(n) for n in args.rows.split(",")]
    level, reason = native.available("cpu", jnp.bfloat16, level=args.level)
    if not level:
        parser.error(f"there are no kernels: {reason}")
    print(HEAD, flush=True)
    forms, how = args.forms.split(","), (args.context, level, args.turns, not args.no_xla)
    lines = [line for name in args.models for line in measure(name, forms, rows, *how)]
    if args.json is not None:
        options = {"level": level, "context": args.context, "turns": args.turns}
        report.write(record("quantised", options, lines), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
