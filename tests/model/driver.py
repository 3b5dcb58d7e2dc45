"""Runs a family by hand, step by step, without the runner: packs a step, calls forward and logits.

What the tests build on: rows are lists of token ids written to pages of their own, and a step is
a list of (row, start, tokens), decode rows first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jserve.kv_layout import KVLayer, KVLayout
from jserve.model.arch import Arch
from jserve.model.attention import AttentionBackend, backend
from jserve.model.ctx import Ctx
from jserve.model.family import Family
from jserve.model.hand import Row, pack
from jserve.model.kv_quant import stored
from jserve.model.mesh import make_mesh
from jserve.model.shard import Axes, ShardRules, padded, partitions, shardings
from jserve.model.view import Bucket, StepDims, layout, unpack
from jserve.weights.place import tp_size
from tests.model.assembly import assemble_all

RULES = ShardRules()


@dataclass(frozen=True)
class NoSlots:
    """Slots of a test: nothing is read from them, since every start is given."""

    len_C: Any
    last_C: Any


class Driver:
    """A model with its KV: ``step`` returns the logits of every token of a step."""

    def __init__(
        self,
        family: Family,
        arch: Arch,
        get: Any,
        *,
        attn: str = "ref",
        tp: int = 1,
        mesh: Mesh | None = None,
        rules: ShardRules = RULES,
        n_pages: int = 40,
        Z: int = 8,
        M: int = 16,
        kv_dtype: Any = jnp.float32,
        dtype: Any = jnp.float32,
    ) -> None:
        self.family, self.arch = family, arch
        self.mesh = make_mesh(tp) if mesh is None else mesh
        self.axes = Axes.of(rules, self.mesh.shape)
        tp = tp_size(self.mesh, rules)
        self.attn = backend(attn)
        self.dims = StepDims(C=8, M=M, Z=Z, V=arch.V)
        specs = padded(family.specs(arch, tp), rules, self.mesh.shape)
        params = assemble_all(specs, get, dtype)
        self.params = jax.device_put(params, shardings(specs, self.mesh, rules))
        kv = KVLayout(layers=arch.kv_layers, page_size=Z, dtype=np.dtype(np.int8), tp=tp)
        self.kv_dtype = self.attn.kv_dtype(kv_dtype)
        self.kv = []
        for layer in kv.layers:
            spec = _kv_spec(layer, self.attn, self.axes)
            self.kv.append(
                tuple(
                    self._poison((kv.heads(layer, x), x.width), n_pages, spec) for x in layer.arrays
                )
            )
        self.param_specs = partitions(specs, rules)
        self._shared = (family, arch, self.attn, self.mesh, _Hashed(rules), self.dims)

    def _poison(self, size: tuple[int, int], n_pages: int, spec: PartitionSpec) -> jax.Array:
        """A pool full of NaN: unused pages must not be seen."""
        [shape] = self.attn.pool_shapes(*size, n_pages, self.dims.Z)
        pool = np.asarray(stored(jnp.full(shape, jnp.nan), self.kv_dtype))
        return jax.device_put(pool, jax.sharding.NamedSharding(self.mesh, spec))

    def step(
        self, bucket: Bucket, decode: Sequence[Row] = (), prefill: Sequence[Row] = ()
    ) -> np.ndarray:
        """float32[T, V]: logits of every token of the step, padding included."""
        buf = pack(bucket, self.dims, self.attn, decode, prefill)
        out, self.kv = self._compile(bucket)(self.params, self.kv, buf)
        return np.asarray(out)

    def _compile(self, bucket: Bucket) -> Any:
        return _compiled(bucket, *self._shared, _Hashed(self.param_specs))

    def greedy(self, prompt: Sequence[int], n: int) -> tuple[np.ndarray, list[int]]:
        """(logits of the prompt, n greedy tokens): the prompt in one step, then one decode row a
        step.

        Both use the bucket of two decode rows and 40 prefill tokens, so a model compiles once.
        """
        bucket = Bucket(D=2, P=40, F=1)
        pages = list(range(1, 1 + self.dims.M))
        first = self.step(bucket, prefill=[Row(pages, 0, prompt)])[2 : 2 + len(prompt)]
        tokens = [int(first[-1].argmax())]
        while len(tokens) < n:
            at = len(prompt) + len(tokens) - 1
            out = self.step(bucket, decode=[Row(pages, at, tokens[-1:])])
            tokens.append(int(out[0].argmax()))
        return first, tokens


def _kv_spec(layer: KVLayer, attn: AttentionBackend, axes: Axes) -> PartitionSpec:
    """Of each of a layer's arrays."""
    return PartitionSpec(*(None,) * attn.kv_axis, None if layer.replicated else axes.heads)


@dataclass(frozen=True)
class _Hashed:
    """What holds mappings, as part of a key."""

    value: Any

    def __hash__(self) -> int:
        return hash(repr(self.value))


@lru_cache(maxsize=32)
def _compiled(
    bucket: Bucket,
    family: Family,
    arch: Arch,
    attn: AttentionBackend,
    mesh: Mesh,
    rules: _Hashed,
    dims: StepDims,
    param_specs: _Hashed,
) -> Any:
    """The step of all drivers of such a model."""
    axes, whole = Axes.of(rules.value, mesh.shape), PartitionSpec()

    def step(params: Any, kv: Any, buf: jax.Array) -> Any:
        fields = layout(bucket, dims, attn.plan_shapes(bucket, dims))
        zeros = jnp.zeros(dims.C, jnp.int32)
        view = unpack(buf, fields, bucket, dims, NoSlots(zeros, zeros))
        x_TD, kv = family.forward(Ctx.of(arch, view, attn, axes), params, kv)
        return family.logits(arch, params, x_TD, axes), kv

    kv_specs = [(_kv_spec(x, attn, axes),) * len(x.arrays) for x in arch.kv_layers]
    fn = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(param_specs.value, kv_specs, whole),
        out_specs=(whole, kv_specs),
        check_vma=False,
    )
    return jax.jit(fn, donate_argnums=(1,))
