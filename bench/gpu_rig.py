"""A whole model on the GPU for ``bench.gpu``: random weights, KV full of random values, steps compiled
as the engine does, and the least time a step can take (``sim.roofline``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu_record import NotHere, Record
from jserve.errors import ConfigError
from jserve.model.arch import Arch
from jserve.model.attention import AttentionBackend, LatentArgs, LayerKV, backend, check_layers
from jserve.model.families import family_for
from jserve.model.family import Family
from jserve.model.hand import Row, pack
from jserve.model.kv_bytes import widened
from jserve.model.kv_quant import stored
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.model.step import DeviceState, StepModel, make_step
from jserve.model.view import Bucket, StepDims, buffer_size
from jserve.runner.programs import compile_options
from jserve.runner.state import new_state
from jserve.shapes import SHAPES
from jserve.sim.roofline import CHIPS, Roofline
from jserve.sizing.models import Model
from jserve.weights.dummy import draw_all
from jserve.weights.quant.scheme import quantised, scheme_of

_TINY = {
    **SHAPES["llama-3.2-1b"],
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 384,
}
_TINY_EXPERTS = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 384,
}
CONFIGS = {
    "1b": SHAPES["llama-3.2-1b"],
    "8b": SHAPES["llama-3.1-8b"],
    "30b-a3b": SHAPES["qwen3-30b-a3b"],
    "v2-lite": SHAPES["deepseek-v2-lite"],
    "tiny": _TINY,
    "tiny 30b-a3b": SHAPES["qwen3-30b-a3b"] | _TINY_EXPERTS | {"num_experts": 8},
    "tiny v2-lite": SHAPES["deepseek-v2-lite"]
    | _TINY_EXPERTS
    | {"n_routed_experts": 8, "kv_lora_rank": 128},
}
FAMILIES: dict[str, Family] = {name: family_for(config) for name, config in CONFIGS.items()}
ARCHS: dict[str, Arch] = {name: FAMILIES[name].arch(config) for name, config in CONFIGS.items()}
SCRATCH = 5 << 30
"""Bytes for what a step makes: logits of 256 rows in float32, activations of a chunk."""
Span = tuple[int, int]
"""(start, count) of a row."""


class Rig:
    """A model on this machine's first device, its KV full of random values.

    Args:
        n_pages: of the pool, or as many as there is room for.
        quantization: of the engine's option, the name of a form on load; empty: the matrices are bfloat16.
        kernels: level of the kernels for quantised weights, see ``level_of``.
    """

    def __init__(
        self,
        arch: Arch,
        attn: str,
        *,
        n_pages: int,
        M: int,
        Z: int = 64,
        kv_dtype: Any = jnp.bfloat16,
        cuda_graphs: str = "step",
        family: Family = FAMILIES["tiny"],
        quantization: str = "",
        kernels: str = "",
    ) -> None:
        device = jax.devices()[0]
        attention = _none() if attn == "none" else _attention(arch, attn, kv_dtype)
        self.arch, mesh, rules = arch, make_mesh(1, [device]), ShardRules()
        kept = attention.kv_dtype(kv_dtype)
        if quantization:
            family = quantised(family, scheme_of({}, jnp.bfloat16, quantization))
        self.itemsize = Model(
            name="", family=family, arch=arch, dtype=np.dtype(jnp.bfloat16)
        ).itemsize
        model = StepModel(
            family=family,
            arch=arch,
            backend=attention,
            dims=StepDims(C=256, M=M, Z=Z, V=arch.V, n_vocab_rows=64),
            mesh=mesh,
            rules=rules,
            n_pages=n_pages,
            kv_dtype=kept,
            dtype=jnp.bfloat16,
            kernels=kernels,
        )
        n_pages = min(n_pages, most_pages(model, memory()))
        self.model = dataclasses.replace(model, n_pages=n_pages)
        self.params = draw_all(family.specs(arch, 1), 0, mesh, rules, jnp.bfloat16)
        self.pages = np.random.default_rng(0).permutation(n_pages - 1) + 1
        self.state = new_state(self.model)
        self._options = compile_options(device.platform, cuda_graphs)
        self._programs: dict[Bucket, Any] = {}

    def fill(self, poison: np.ndarray | None = None) -> None:
        """Random keys and values; NaN where ``poison`` bool[P, Z] says."""
        kept, heads_second = self.model.kv_dtype, self.model.backend.kv_axis == 1

        @functools.partial(jax.jit, donate_argnums=0)
        def one(parts: LayerKV, key: jax.Array, bad_PZ: jax.Array) -> LayerKV:
            old, width = parts[0], sum(part.shape[-1] for part in parts)
            P, Z = bad_PZ.shape
            swaps = heads_second and old.ndim == 4  # latents have no heads
            rest = old.shape[1::2] if swaps else old.shape[2:]
            rest = (*rest[:-1], self.arch.H if self.arch.kv_forms else width)
            x = jax.random.normal(key, (P, Z, *rest), jnp.bfloat16)
            x = jnp.where(bad_PZ.reshape(P, Z, *[1] * len(rest)), jnp.nan, x)
            x = stored(x.swapaxes(1, 2) if swaps else x, kept, width)
            return attention.parts(x)

        def layer(kv: LayerKV, two: jax.Array) -> LayerKV:
            n = len(kv) // 2 or 1
            vectors = [kv[i : i + n] for i in range(0, len(kv), n)]
            drawn = (
                one(parts, k, bad) for parts, k in zip(vectors, two[: len(vectors)], strict=True)
            )
            return tuple(part for parts in drawn for part in parts)

        dims, n_pages, attention = self.model.dims, self.model.n_pages, self.model.backend
        bad = jnp.zeros((n_pages, dims.Z), bool) if poison is None else jnp.asarray(poison)
        keys = jax.random.split(jax.random.key(5), 2 * self.arch.L).reshape(-1, 2)
        kv = [layer(kv, two) for kv, two in zip(self.state.kv, keys, strict=True)]
        self.state = DeviceState(kv=kv, slots=self.state.slots)

    def last_keys(self) -> np.ndarray:
        """float32[P, Z, K, H]: those that the last layer has stored."""
        kv, attn = self.state.kv[-1], self.model.backend
        keys = jnp.concatenate(kv[:2], -1) if len(kv) == 4 else kv[0]
        found = np.asarray(widened(keys, self.arch.H), np.float32)
        return found.swapaxes(1, 2) if attn.kv_axis == 1 else found

    def compile(self, bucket: Bucket) -> float:
        """Compile a step as the engine does, if it is new. Returns the seconds."""
        begin = time.perf_counter()
        if bucket not in self._programs:
            step = jax.jit(make_step(self.model, bucket), donate_argnums=(1,))
            buf = jax.ShapeDtypeStruct((buffer_size(self.model.fields(bucket)),), jnp.int32)
            args = (self.model.abstract_params(), self.model.abstract_state(), buf)
            self._programs[bucket] = step.lower(*args).compile(self._options)
        return time.perf_counter() - begin

    def buffer(self, bucket: Bucket, decode: list[tuple[int, int]], prefill: Any = ()) -> Any:
        """(start, count) of the rows, each on pages of its own."""
        rng, at, Z = np.random.default_rng(3), 0, self.model.dims.Z
        rows = []
        for start, count in (*decode, *prefill):
            n = -(-(start + count) // Z)
            tokens = rng.integers(0, self.arch.V, count).tolist()
            rows.append(Row(self.pages[at : at + n].tolist(), start, tokens))
            at += n
        dims, attn = self.model.dims, self.model.backend
        return pack(bucket, dims, attn, rows[: len(decode)], rows[len(decode) :])

    def run(self, bucket: Bucket, buf: Any) -> Any:
        """One step; compiles the bucket if it is new."""
        self.compile(bucket)
        self.state, out = self._programs[bucket](self.params, self.state, buf)
        return out

    def fits(self, batch: int, context: int) -> bool:
        """Whether the pool and a row's page table hold ``batch`` rows of that many tokens."""
        pages, dims = -(-context // self.model.dims.Z), self.model.dims
        return pages <= dims.M and batch * pages < self.model.n_pages


def level_of(record: Record) -> str:
    """Level of the kernels for quantised weights that a call of ``bench.gpu`` runs: Hopper's, or empty for XLA's
    products. On a CPU these, for which the native kernels are no part of what is timed."""
    return record.kernels if jax.devices()[0].platform != "cpu" else ""


def memory() -> int | None:
    """Bytes that XLA may take of the first device; None: it has no memory of its own."""
    found = jax.devices()[0].memory_stats()
    return None if found is None else found["bytes_limit"]


def most_pages(model: StepModel, n_bytes: int | None) -> int:
    """Pages that fit beside the weights and ``SCRATCH`` bytes; more than any stage asks for where nobody knows."""
    if n_bytes is None:
        return sys.maxsize
    leaves = jax.tree.leaves(model.abstract_params())
    weights = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
    found = (n_bytes - weights - SCRATCH) // model.kv.page_bytes
    if found < 2:
        raise NotHere(f"{n_bytes / 1e9:.0f} GB do not hold weights of {weights / 1e9:.0f} GB")
    return found


def _attention(arch: Arch, name: str, kv_dtype: Any) -> AttentionBackend:
    """The backend of that name, or what serves the model in its place, beside the kernels for experts."""
    platform = jax.devices()[0].platform
    found = backend(name, platform)
    try:
        check_layers(found, arch, found.kv_dtype(kv_dtype), (), 64)
    except ConfigError:
        return backend("xla" if platform == "cpu" else "dense_experts", platform)
    return found


def _none() -> AttentionBackend:
    """Writes KV and reads none: what a step costs apart from attention."""

    def latent(args: LatentArgs, *_: Any) -> jax.Array:
        return jnp.zeros((*args.q_TNH.shape[:2], args.v_up_NVA.shape[1]))

    return dataclasses.replace(
        backend("xla"), name="none", attend=lambda args, *_: args.q_TNH, attend_latent=latent
    )


def least_seconds(record: Record, rig: Rig, rows: Sequence[Span], drawn: int) -> float:
    """The roofline of a step of these rows at the bandwidth that the ``facts`` stage measured.

    Attention among a prefill chunk's own tokens is left out: under 2 % of a 2k chunk's flops.
    """
    kind = jax.devices()[0].device_kind
    chip = CHIPS["h100" if "H100" in kind else "h200"]
    measured = record.figure("facts", "read bandwidth", "bytes_per_s", chip.bytes_per_s)
    chip = dataclasses.replace(chip, bytes_per_s=measured)
    kv_itemsize = rig.model.kv_dtype.itemsize
    line = Roofline(arch=rig.arch, itemsize=rig.itemsize, chip=chip, kv_itemsize=kv_itemsize)
    work = line.work(
        rows=len(rows),
        tokens=sum(count for _, count in rows),
        drawn=drawn,
        n_context=sum(start for start, _ in rows) / len(rows),
    )
    return line.limit(work)
