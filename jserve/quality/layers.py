"""The error of each matrix product of a model, beside its reference on the reference's own activations.

It finds one broken tensor among many: a matrix with doubled scales is off by its own size, other layers are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.model.dot import dot
from jserve.model.families import family_for
from jserve.model.layer_pass import PRODUCTS, check_dense, layer_pass
from jserve.weights.loader import load_part
from jserve.weights.offline.calibration import LayerStream
from jserve.weights.quant.scheme import Scheme, quantised
from jserve.weights.source import Source

TEXTS = 16
"""Texts whose activations are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loadable:
    """A model whose layers are loaded one by one."""

    source: Source
    scheme: Scheme | None
    dtype: Any

    def load(self, layer: int) -> Any:
        """The parameters of a layer, on one device."""
        return self._load(lambda specs: specs["layers"][layer])

    def embedding(self) -> Any:
        return self._load(lambda specs: {"embed": specs["embed"]})["embed"]

    def _load(self, of: Any) -> Any:
        family = quantised(family_for(self.source.config), self.scheme)
        arch = family.arch(self.source.config)
        return load_part(family, arch, of, self.source, self.dtype, scheme=self.scheme)


def why_not(reference: Source, model: Source) -> str:
    """The reason why layers of these cannot be compared; empty: they can."""
    for source in (reference, model):
        if source.format not in ("safetensors", "gguf"):
            return f"{source.name} is {source.format}, not safetensors or gguf"
    mine, other = (family_for(s.config).arch(s.config) for s in (reference, model))
    try:
        check_dense(mine, "the error of layers")
    except ConfigError as error:
        return error.message
    return "" if mine.layers == other.layers else "the two models have other layers"


def layer_errors(
    reference: Loadable, model: Loadable, texts: Sequence[Sequence[int]]
) -> list[tuple[str, float]]:
    """("layer.product", relative error of its output), worst first, each layer on the reference's stream.

    Of ``qkv`` queries and keys count, of ``gate_up`` the gate: their other rows may have scales that ``o`` and ``down``
    give back, whose outputs show them. Empty: the models have different streams, as after a rotation or with a
    quantised embedding.
    """
    arch = family_for(reference.source.config).arch(reference.source.config)
    stream, table = LayerStream(arch, texts[:TEXTS]), reference.embedding()
    if not jnp.array_equal(table, model.embedding()):
        return []
    stream.enter(table)
    found = []
    for i in range(arch.L):
        p, q = reference.load(i), model.load(i)
        sums = {name: [0.0, 0.0] for name in PRODUCTS}
        for batch in stream.batches:
            mine = layer_pass(arch, i, p, batch.x_BSD)[1]
            other = layer_pass(arch, i, q, batch.x_BSD)[1]
            kept_T = jnp.asarray(batch.kept_BS.reshape(-1))
            for name in PRODUCTS:
                off = _off(name, (mine[name], p[name]), (other[name], q[name]), kept_T)
                for k, part in enumerate(off):
                    sums[name][k] += float(part)
        found += [(f"{i}.{name}", (a / max(b, 1e-30)) ** 0.5) for name, (a, b) in sums.items()]
        stream.pass_layer(i, p)
    return sorted(found, key=lambda item: -item[1])


Product = tuple[jax.Array, Any]
"""Activations [B, S, D] and the matrix that they meet."""


@partial(jax.jit, static_argnums=0)
def _off(
    name: str, mine: Product, other: Product, kept_T: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(sum of squared errors, sum of squares) of a product's output."""
    right, found = _output(name, *mine), _output(name, *other)
    kept = kept_T.reshape(-1, *(1,) * (right.ndim - 1))
    return (
        jnp.sum(jnp.where(kept, (found - right) ** 2, 0.0)),
        jnp.sum(jnp.where(kept, right**2, 0.0)),
    )


def _output(name: str, x_BSD: jax.Array, w: Any) -> jax.Array:
    y = dot(x_BSD.reshape(-1, x_BSD.shape[-1]), w).reshape(-1, *w.shape[:-1])
    if name == "qkv":
        return y[:, :, :-1]
    return y[:, 0] if name == "gate_up" else y
