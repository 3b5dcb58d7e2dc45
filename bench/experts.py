"""Layers of experts on the CPU: bytes and time over the number of tokens, beside a dense MLP of the active size.

    python -m bench.experts [--form int4] [--tokens 1,4,16,64,512] [--turns 9] [--level LEVEL] [--json FILE]

Weights and tokens are random, in bfloat16 or a quantised form of it; a turn runs one call of each side. Inputs, and
copies of the dense MLP, change from turn to turn, so that weights come from memory and not from a cache. GB/s counts
each expert that a token chose once, with its scales; ``dense`` is a dense MLP as wide as the experts of one token, for
as many rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import report
from bench.native import read_gb_s
from bench.probe import record
from jserve.model import native
from jserve.model.arch import Moe, Router
from jserve.model.dot import dot, gate_up
from jserve.model.moe import route, routed
from jserve.model.quant import HALF_BYTES, Form, QTensor

SHAPES = {
    "64/2": (2048, Moe(E=64, X=2, F=1024, router=Router(normalise=True))),
    "128/8": (2048, Moe(E=128, X=8, F=768, router=Router(normalise=True))),
    "8/2": (2048, Moe(E=8, X=2, F=7168, router=Router(normalise=True))),
    "256/8": (2048, Moe(E=256, X=8, F=512, router=Router(normalise=True))),
}
"""Width of the model, and its experts."""
FORMS = {
    "bfloat16": None,
    "int8": Form(kind="int8"),
    "int4": Form(kind="int4", group=32),
    "uint4 shifts": Form(kind="uint4", group=32, shifts=True),
    "e2m1": Form(kind="e2m1", group=32),
}
"""Of experts and dense MLPs."""
N_INPUTS = 8
COPIES_BYTES = 400 << 20
"""Of dense MLPs together: more than a cache holds."""
SHOWN = (
    "{experts:6} {tokens:5d} {met:5d} {mb:9.1f} {native_ms:10.2f} {gb_s:7.1f} {xla_ms:10.2f}"
    " {dense_ms:10.2f} {of_dense:6.2f} {read_gb_s:7.1f}"
)
HEAD = "E/X      T   met        MB  native ms    GB/s     XLA ms   dense ms  ratio    read"


def drawn(shape: Sequence[int], seed: int, form: Form | None) -> jax.Array | QTensor:
    """bfloat16 of deviation fan-in^-0.5, or as large in ``form``."""
    rng, (*rows, D) = np.random.default_rng(seed), shape
    if form is None:
        pool = rng.standard_normal(1 << 20, np.float32)
        return jnp.asarray(np.resize(pool, shape) * D**-0.5, jnp.bfloat16)
    dtype: Any = np.uint8 if form.kind in HALF_BYTES else np.int8
    pool = rng.integers(0, 256, 1 << 22, np.uint8).view(dtype)
    size = {"int8": 74.0, "int4": 4.6, "uint4": 4.6, "e2m1": 5.9}[form.kind] * D**0.5
    scale = jnp.full((*rows, form.groups(D)), 1 / size, jnp.float32)
    return QTensor(
        q=jnp.asarray(np.resize(pool, (*rows, form.stored(D)))),
        scale=scale,
        zero=None,
        form=form,
        shift=7.5 * scale if form.shifts else None,
    )


def params(moe: Moe, D: int, form: Form | None) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "router": jnp.asarray(rng.standard_normal((moe.E, D)), jnp.float32),
        "expert_gate_up": drawn((2 * moe.E, moe.F, D), 2, form),
        "expert_down": drawn((moe.E, D, moe.F), 3, form),
    }


def layer(moe: Moe, p: Any, x_TD: jax.Array) -> jax.Array:
    """float32[T, D]: router and experts."""
    real_T = jnp.ones(x_TD.shape[0], bool)
    return routed(moe, p, x_TD, *route(moe.router, p, x_TD, moe.X, real_T))


def mlp(p: Any, x_TD: jax.Array) -> jax.Array:
    return dot(gate_up(x_TD, p["gate_up"]), p["down"])


def compiled(function: Callable[..., Any], level: str, *args: Any) -> Callable[..., Any]:
    with native.kernels(level):
        return jax.jit(function).lower(*args).compile()


def seconds(call: Callable[..., Any], *args: Any) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call(*args))
    return time.perf_counter() - begin


def measure(
    name: str, form: str, tokens: Sequence[int], level: str, turns: int
) -> list[dict[str, Any]]:
    """Lines of the record of one shape."""
    D, moe = SHAPES[name]
    p, width = params(moe, D, FORMS[form]), moe.X * moe.F
    each = sum(x.nbytes for x in jax.tree.leaves((p["expert_gate_up"], p["expert_down"]))) // moe.E
    copies = max(2, COPIES_BYTES // (each * moe.X))
    dense = [
        {
            "gate_up": drawn((2, width, D), 4 + i, FORMS[form]),
            "down": drawn((D, width), 5 + i, FORMS[form]),
        }
        for i in range(copies)
    ]
    lines = []
    for T in tokens:
        rng = np.random.default_rng(T)
        xs = [jnp.asarray(rng.standard_normal((T, D)), jnp.float32) for _ in range(N_INPUTS)]
        ours, xla = (compiled(partial(layer, moe), at, p, xs[0]) for at in (level, ""))
        flat = compiled(mlp, level, dense[0], xs[0])
        times = []
        for i in range(turns + 1):
            x, of = xs[i % N_INPUTS], dense[i % copies]
            times.append((seconds(ours, p, x), seconds(xla, p, x), seconds(flat, of, x)))
        native_s, xla_s, dense_s = (statistics.median(t) for t in zip(*times[1:], strict=True))
        met = round(statistics.mean(_met(moe, p, x) for x in xs))
        read = met * each
        line = {
            "experts": name,
            "form": form,
            "width": D,
            "expert_width": moe.F,
            "tokens": T,
            "met": met,
            "mb": round(read / 1e6, 1),
            "native_ms": round(native_s * 1e3, 3),
            "gb_s": round(read / native_s / 1e9, 1),
            "xla_ms": round(xla_s * 1e3, 3),
            "dense_ms": round(dense_s * 1e3, 3),
            "of_dense": round(native_s / dense_s, 2),
            "read_gb_s": round(read_gb_s(), 1),
        }
        lines.append(line)
        print(SHOWN.format(**line), flush=True)
    return lines


def _met(moe: Moe, p: Any, x_TD: jax.Array) -> int:
    """Different experts that these tokens choose."""
    real_T = jnp.ones(x_TD.shape[0], bool)
    return len(np.unique(route(moe.router, p, x_TD, moe.X, real_T)[0]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.experts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shapes", default=",".join(SHAPES), help=", ".join(SHAPES))
    parser.add_argument(
        "--form", choices=FORMS, default="bfloat16", help="of the weights (bfloat16)"
    )
    parser.add_argument("--tokens", default="1,4,16,64,512", help="numbers of tokens")
    parser.add_argument("--turns", type=int, default=9, help="calls of each side (9)")
    parser.add_argument("--level", default="", help="a lower level of the kernels")
    parser.add_argument("--json", type=Path, default=None, help="result file to write")
    args = parser.parse_args(argv)
    level, reason = native.available("cpu", jnp.bfloat16, level=args.level)
    if not level:
        parser.error(f"there are no kernels: {reason}")
    tokens = [int(n) for n in args.tokens.split(",")]
    print(HEAD, flush=True)
    lines = [
        line
        for name in args.shapes.split(",")
        for line in measure(name, args.form, tokens, level, args.turns)
    ]
    if args.json is not None:
        report.write(record("experts", {"level": level, "turns": args.turns}, lines), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
