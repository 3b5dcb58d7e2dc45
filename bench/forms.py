"""What becomes of layers with quantised weights on an H200: bytes moved over bytes stored, temporaries, kernels.

Needs the compiler's wheels (docs/kernels.md) and no GPU; nothing runs. It owns the goals that the figures are held to.

    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m bench.forms --model llama-3.1-8b --rows 1,16,64,256 --json FILE
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m bench.forms --kernels xla    products without quant_matmul

A program is two layers of the model, whose attention reads no KV: queries are its outputs. ``moved`` is all that its
kernels read and write, less what the same layers in bfloat16 move besides their weights, over the bytes stored: 1 for
a form whose numbers are read once and nothing else. A temporary counts as of weights where it does not depend on
the activations. Without a device XLA does not autotune: it splits products by a rule of its own, there it tries ways.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench import report
from bench.probe import record
from jserve.model.arch import Arch, resized
from jserve.model.attention import AttentionBackend
from jserve.model.ctx import Ctx
from jserve.model.decoder import decoder_layer
from jserve.model.dot import paths
from jserve.model.family import Family
from jserve.model.layer_pass import WHOLE
from jserve.model.native import HOPPER, kernels
from jserve.model.param_spec import is_spec
from jserve.model.quant import Form
from jserve.model.quant_specs import quantised_specs
from jserve.model.shard import Axes
from jserve.model.view import StepView
from jserve.runner.programs import compile_options
from jserve.sizing import models
from pallas_kernels import aot
from pallas_kernels.hlo import FREE, Module

FORMS = {
    "int8": Form(kind="int8", rounded=True),
    "int8-weight-only": Form(kind="int8"),
    "int8 g128": Form(kind="int8", group=128),
    "fp8": Form(kind="e4m3", rounded=True),
    "fp8-weight-only": Form(kind="e4m3"),
    "fp8 blocks": Form(kind="e4m3", group=128, rounded=True),
    "int4 g128": Form(kind="int4", group=128),
    "int4 g64": Form(kind="int4", group=64),
    "int4 zeros g128": Form(kind="int4", group=128, zeros=True),
    "int4 ordered g128": Form(kind="int4", group=128, ordered=True),
    "uint4 shifts g32": Form(kind="uint4", group=32, shifts=True),
    "e2m1 g32": Form(kind="e2m1", group=32),
    "e2m1 g16": Form(kind="e2m1", group=16),
}
"""As on load, of GPTQ, AWQ and compressed-tensors, GGUF's Q4_K, mxfp4, nvfp4."""
ROW_GOAL, GROUP_GOAL, GROUP_ROWS = 1.05, 1.15, 64
"""Bytes moved over stored, of one scale a row, and of groups up to so many rows."""
LAYERS = 2
SHOWN = (
    "{form:18} {rows:4d} {path:12} {stored_mb:8.1f} {moved:6.2f} {goal:5} {weights_mb:9.1f}"
    " {others_mb:9.1f} {kernels:7.1f} {more:5.1f} {launches:6d}"
)
HEAD = "form               rows path         MB a layer  moved goal  MB wide   MB else  kernels more  graphs"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One program of ``LAYERS`` layers."""

    stored: int
    """Bytes of its matrices."""
    moved: int
    """Bytes that its kernels read and write."""
    of_weights: int
    """Bytes of the largest temporary that is made of weights alone."""
    others: int
    """Of the largest other one."""
    kernels: int
    launches: tuple[str, ...]


def compiled(family: Family, arch: Arch, rows: int, level: str = "") -> Compiled:
    """Two layers of a decode step of ``rows`` rows, compiled for an H200; ``level`` of ``native.kernels``."""
    arch = resized(arch, L=LAYERS)
    specs = family.specs(arch, 1)["layers"]

    def shaped(spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype or jnp.bfloat16)

    params = jax.tree.map(shaped, specs, is_leaf=is_spec)
    x_TD = jax.ShapeDtypeStruct((rows, arch.D), jnp.float32)
    pos_T = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def layers(params: Any, x_TD: jax.Array, pos_T: jax.Array) -> jax.Array:
        ctx = Ctx.of(arch, _view(pos_T), NONE, Axes()).with_tables()
        with kernels(level):
            for i, p in enumerate(params):
                x_TD = decoder_layer(p, x_TD, ctx.at(i), (x_TD, x_TD))[0]
        return x_TD

    options = compile_options("cuda")
    found = aot.compile_for(layers, params, x_TD, pos_T, options=options)
    passes = found.module.passes("-")
    wide, others = temporaries(found.module)
    stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params) if x.ndim > 1)
    return Compiled(
        stored=stored,
        moved=sum(p.read + p.written for p in passes),
        of_weights=wide,
        others=others,
        kernels=len(passes),
        launches=tuple(found.launches()),
    )


def temporaries(module: Module) -> tuple[int, int]:
    """Bytes of the largest result in memory that parameters alone make, and of the largest one of activations."""
    fixed = {i.name for i in module.entry if i.label.startswith("params")}
    sizes = {True: 0, False: 0}
    for i in module.entry:
        if i.op == "constant":
            fixed.add(i.name)
        elif i.op != "parameter":
            own = bool(i.operands) and all(x in fixed for x in i.operands)
            fixed |= {i.name} if own else set()
            if i.op not in FREE and not i.is_root:
                sizes[own] = max(sizes[own], i.n_bytes)
    return sizes[True], sizes[False]


def _view(pos_T: jax.Array) -> StepView:
    given: dict[str, Any] = {f.name: None for f in dataclasses.fields(StepView)}
    return StepView(**{**given, "pos_T": pos_T})


NONE: AttentionBackend = dataclasses.replace(
    WHOLE, name="none", attend=lambda args, kv, view: args.q_TNH
)


def in_form(family: Family, form: Form) -> Family:
    """``family`` with all matrices of its layers in ``form``."""
    return quantised_specs(family, lambda name, D: form)


def lines(
    model: str, forms: Iterable[str], rows: Iterable[int], level: str = HOPPER
) -> Iterable[dict[str, Any]]:
    """The lines of the record, a form and a number of rows each; ``level`` of ``native.kernels``."""
    found = models.find(model)
    for n in rows:
        plain = compiled(found.family, found.arch, n)
        beside = plain.moved - plain.stored
        for name in forms:
            form = FORMS[name]
            family = in_form(found.family, form)
            got = compiled(family, found.arch, n, level)
            [taken] = paths(family.specs(found.arch, 1)["layers"], level, [n]).values()
            moved = (got.moved - beside) / got.stored
            yield {
                "form": name,
                "rows": n,
                "path": "+".join(taken),
                "stored_mb": round(got.stored / LAYERS / 1e6, 1),
                "moved": round(moved, 3),
                "goal": goal(form, n),
                "met": goal(form, n) == 0 or moved <= goal(form, n),
                "weights_mb": round(got.of_weights / 1e6, 2),
                "others_mb": round(got.others / 1e6, 2),
                "kernels": got.kernels / LAYERS,
                "more": (got.kernels - plain.kernels) / LAYERS,
                "launches": len(got.launches),
            }


def goal(form: Form, rows: int) -> float:
    """Bytes moved over stored; 0: there is none."""
    if not form.group:
        return ROW_GOAL
    return GROUP_GOAL if rows <= GROUP_ROWS else 0


def shown(line: dict[str, Any]) -> str:
    """A line of the table; ``!`` behind a goal that is missed."""
    wanted = f"{line['goal']:.2f}" if line["goal"] else ""
    return SHOWN.format(**{**line, "goal": wanted + "!" * (not line["met"])})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.forms", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape (llama-3.1-8b)")
    parser.add_argument("--forms", default=",".join(FORMS), help="of these, all by default")
    parser.add_argument("--rows", default="1,16,64,256", help="numbers of rows (1,16,64,256)")
    parser.add_argument(
        "--kernels", default=HOPPER, choices=(HOPPER, "xla"), help="of products (hopper)"
    )
    parser.add_argument("--json", type=Path, default=None, help="result file to write")
    args = parser.parse_args(argv)
    if aot.available() is not None:
        parser.error(f"{aot.available()} (docs/kernels.md)")
    forms = [name.strip() for name in args.forms.split(",")]
    if unknown := set(forms) - set(FORMS):
        parser.error(f"no form {', '.join(sorted(unknown))}; there are {', '.join(FORMS)}")
    print(HEAD, flush=True)
    made = []
    level = "" if args.kernels == "xla" else args.kernels
    for line in lines(args.model, forms, [int(n) for n in args.rows.split(",")], level):
        made.append(line)
        print(shown(line), flush=True)
    if args.json is not None:
        options = {"model": args.model, "device": "h200, described", "layers": LAYERS}
        options["kernels"] = args.kernels
        report.write(record("forms", options, made), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
