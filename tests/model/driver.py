"""Runs a family by hand, step by step, without the runner: packs a step, calls forward and logits.

What the tests build on: rows are lists of token ids written to pages of their own, and a step is
a list of (row, start, tokens), decode rows first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jserve.kv_layout import KVLayout
from jserve.model.arch import Arch
from jserve.model.attention import backend
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
        self.param_specs = partitions(specs, rules)
        kv = KVLayout(layers=arch.kv_layers, page_size=Z, dtype=np.dtype(np.int8), tp=tp)
        self.kv_dtype = self.attn.kv_dtype(kv_dtype)
        self.kv_specs, self.kv = [], []
        for layer in kv.layers:
            spec = PartitionSpec(
                *(None,) * self.attn.kv_axis, None if layer.replicated else self.axes.heads
            )
            self.kv_specs.append((spec,) * len(layer.arrays))
            self.kv.append(
                tuple(
                    self._poison((kv.heads(layer, x), x.width), n_pages, spec) for x in layer.arrays
                )
            )
        self._fns: dict[Bucket, Any] = {}

    def _poison(self, size: tuple[int, int], n_pages: int, spec: PartitionSpec) -> jax.Array:
        """A pool full of NaN: unused pages must not be seen."""
        [shape] = self.attn.pool_shapes(*size, n_pages, self.dims.Z)
        pool = np.asarray(stored(jnp.full(shape, jnp.nan), self.kv_dtype))
        return jax.device_put(pool, jax.sharding.NamedSharding(self.mesh, spec))

    def step(
        self, bucket: Bucket, decode: Sequence[Row] = (), prefill: Sequence[Row] = ()
    ) -> np.ndarray:
        """float32[T, V]: logits of every token of the step, padding included."""
        if bucket not in self._fns:
            self._fns[bucket] = self._compile(bucket)
        buf = pack(bucket, self.dims, self.attn, decode, prefill)
        out, self.kv = self._fns[bucket](self.params, self.kv, buf)
        return np.asarray(out)

    def _compile(self, bucket: Bucket) -> Any:
        whole = PartitionSpec()
        kv = self.kv_specs
        fn = jax.shard_map(
            partial(self._step, bucket),
            mesh=self.mesh,
            in_specs=(self.param_specs, kv, whole),
            out_specs=(whole, kv),
            check_vma=False,
        )
        return jax.jit(fn, donate_argnums=(1,))

    def _step(self, bucket: Bucket, params: Any, kv: Any, buf: jax.Array) -> Any:
        fields = layout(bucket, self.dims, self.attn.plan_shapes(bucket, self.dims))
        zeros = jnp.zeros(self.dims.C, jnp.int32)
        view = unpack(buf, fields, bucket, self.dims, NoSlots(zeros, zeros))
        x_TD, kv = self.family.forward(Ctx.of(self.arch, view, self.attn, self.axes), params, kv)
        return self.family.logits(self.arch, params, x_TD, self.axes), kv

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
