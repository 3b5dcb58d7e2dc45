"""What XLA makes of a decode step between its matrix products: kernels, those that wait in a row, bytes.

Needs the compiler's wheels (docs/kernels.md) and no GPU; nothing runs. It owns the names of a layer's passes.

    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m bench.passes --models llama-3.2-1b,qwen3-8b --batches 1,32,256

A layer is the second of two, which has a neighbour on each side. XLA does not autotune without a device:
how products are split, and with it the partial sums that the next pass adds, may differ on one.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bench.candidates.sample_threshold import sample_threshold
from jserve.errors import ConfigError
from jserve.model.arch import resized
from jserve.model.attention import backend
from jserve.model.mesh import make_mesh
from jserve.model.sample import threshold
from jserve.model.shard import ShardRules
from jserve.model.step import StepModel
from jserve.model.view import Bucket, StepDims
from jserve.sim.roofline import CHIPS
from jserve.sizing import models
from jserve.sizing.compiled import compile_step
from pallas_kernels import aot
from pallas_kernels.hlo import Pass

MATRICES = ("qkv", "o", "gate_up", "down")
NODE_US = 1.5
"""What a kernel that waits for the one before costs in a CUDA graph beside its own bytes: 1.3 us
and more are reported (Hazy Research, no measurement of ours)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The passes of one layer of a step."""

    model: str
    batch: int
    n_layers: int
    passes: tuple[Pass, ...]

    @property
    def chain(self) -> int:
        """Kernels of which each waits for the one before."""
        depths = [p.depth for p in self.passes if p.op == "dot"]
        inside = [p.depth for p in self.passes if p.depth >= min(depths) - 1]
        return max(inside) - min(inside) + 1

    @property
    def between(self) -> list[Pass]:
        """All but products and kernels of ours."""
        return [p for p in self.passes if p.op not in ("dot", "custom-call")]

    def groups(self) -> dict[str, list[Pass]]:
        """Passes by what they do, in order."""
        found: dict[str, list[Pass]] = {}
        for p in self.passes:
            found.setdefault(title(p), []).append(p)
        return found


def title(p: Pass) -> str:
    """What a pass does, in a reader's words; the compiler's own name where it has none here."""
    weights = [name.split("'")[-2] for name in p.reads if "params" in name]
    product = next((w for w in weights if w in MATRICES), None)
    if product:
        return f"product {product}"
    if any(w in ("q_norm", "k_norm") for w in weights):
        return "norm of queries or keys"
    if any(w.endswith("_norm") for w in weights):
        return "norm"
    known = {
        "custom-call": "a kernel of ours",
        "scatter": "keys or values turned and to their pages",
        "pad": "queries turned and padded",
        "slice": "heads cut out",
        "add": "partial sums and residual",
        "convert": "SwiGLU",
    }
    return known.get(p.op, f"{p.op}: {p.name}")


def layer(name: str, batch: int, attn: str = "hopper") -> Layer:
    """The second of two layers of a decode step of the model with attention backend ``attn``, compiled for
    an H200.

    Raises:
        ConfigError: no such model, or no compiler here; ``field`` says which.
    """
    if aot.available() is not None:
        raise ConfigError(f"passes: {aot.available()} (docs/kernels.md)", field="compile")
    found = models.find(name)
    arch = resized(found.arch, L=2)
    attention = backend(attn, "cuda")
    model = StepModel(
        family=found.family,
        arch=arch,
        backend=attention,
        dims=StepDims(C=256, M=128, Z=64, V=arch.V, n_vocab_rows=64),
        mesh=make_mesh(1, aot.h200(1)),
        rules=ShardRules(),
        n_pages=2048,
        kv_dtype=attention.kv_dtype(found.dtype),
        dtype=found.dtype,
    )
    passes = compile_step(model, Bucket(D=max(batch, 2), P=0, F=0)).module.passes("state.kv")
    return Layer(model=name, batch=batch, n_layers=found.arch.L, passes=within(passes, 1))


def within(passes: Sequence[Pass], n: int) -> tuple[Pass, ...]:
    """Those of layer ``n``. Calls of kernels may have lost their scope: what lies between others
    of the layer without one is the layer's."""
    mine = [i for i, p in enumerate(passes) if f"/layer{n}/" in p.scope]
    run = passes[mine[0] : mine[-1] + 1]
    return tuple(p for p in run if f"/layer{n}/" in p.scope or not p.scope)


def table(x: Layer) -> Iterator[str]:
    """A line a kind of pass, then the sums."""
    yield f"**{x.model}, batch {x.batch}**: a layer of {len(x.passes)} kernels, {x.chain} in a row"
    yield ""
    yield "| pass | kernels | reads KB | writes KB |"
    yield "|---|---|---|---|"
    for name, passes in x.groups().items():
        read, written = (sum(getattr(p, key) for p in passes) for key in ("read", "written"))
        yield f"| {name} | {len(passes)} | {read / 1024:,.0f} | {written / 1024:,.0f} |"
    yield ""


def summary(layers: Sequence[Layer]) -> Iterator[str]:
    """What all that lies between products and attention costs at most, a line a layer."""
    rate = CHIPS["h200"].bytes_per_s
    between = "between products: kernels | MB | all layers: us of bytes | us of waiting"
    yield f"| model, batch | kernels a layer | in a row | {between} | us of weights |"
    yield "|---|---|---|---|---|---|---|---|"
    for x in layers:
        moved = sum(p.read + p.written for p in x.between)
        weights = sum(p.read for p in x.passes if p.op == "dot") * x.n_layers
        waiting = x.chain - sum(p.op in ("dot", "custom-call") for p in x.passes)
        cells = (
            f"{x.model}, {x.batch}",
            f"{len(x.passes)}",
            f"{x.chain}",
            f"{len(x.between)}, {waiting} in a row",
            f"{moved / 1e6:.2f}",
            f"{moved * x.n_layers / rate * 1e6:.0f}",
            f"{waiting * x.n_layers * NODE_US:.0f}",
            f"{weights / rate * 1e6:.0f}",
        )
        yield f"| {' | '.join(cells)} |"
    yield ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Limits:
    """What ``jserve.model.sample.threshold`` reads of a step's draws."""

    temperature_E: Any
    top_k_E: Any
    top_p_E: Any
    min_p_E: Any


def sampler(rows: int, V: int) -> Iterator[str]:
    """The bound of top_k and top_p by XLA and by the kernel."""

    def by_xla(x: Any, t: Any, k: Any, p: Any, m: Any) -> Any:
        return threshold(x, _Limits(t, k, p, m))  # type: ignore[arg-type]

    floats, ints = (jax.ShapeDtypeStruct((rows,), d) for d in (jnp.float32, jnp.int32))
    args = (jax.ShapeDtypeStruct((rows, V), jnp.float32), floats, ints, floats, floats)
    for name, call in (("XLA", by_xla), ("sample_threshold", sample_threshold)):
        report = aot.compile_for(call, *args)
        sorts = "sorts it" if V in report.sorts() else "does not sort it"
        text = f"top_k and top_p of [{rows}, {V}]: {name} {sorts}, {report.nodes()} kernels"
        yield f"{text}, those of loops that are rarely needed included"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="bench.passes", description=(__doc__ or "").split("\n")[0])
    p.add_argument("--models", default="llama-3.2-1b,llama-3.1-8b,qwen3-8b")
    p.add_argument("--batches", default="1,32,256")
    p.add_argument("--attn", default="hopper", choices=("hopper", "hopper_fused"))
    args = p.parse_args(argv)
    layers = []
    try:
        for name in args.models.split(","):
            for batch in map(int, args.batches.split(",")):
                layers.append(layer(name, batch, args.attn))
                print("\n".join(table(layers[-1])), flush=True)
    except ConfigError as e:
        p.error(str(e))
    print("\n".join(summary(layers)))
    for batch in map(int, args.batches.split(",")):
        print("\n".join(sampler(batch, 128256)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
