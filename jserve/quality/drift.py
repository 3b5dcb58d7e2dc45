"""Activations beside the static scales of a checkpoint: how many it would clip, and how near the largest come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.model.families import family_for
from jserve.model.layer_pass import PRODUCTS
from jserve.model.quant import LARGEST, QTensor
from jserve.quality.layers import Loadable
from jserve.weights.offline.calibration import LayerStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The inputs of one matrix product."""

    product: str
    over: float
    """Share of the activations that are larger than the scale holds."""
    most: float
    """The largest activation, in units of the largest that the scale holds."""


def drift(model: Loadable, texts: Sequence[Sequence[int]]) -> list[Drift]:
    """Of every product with a static scale, worst first.

    Raises:
        ConfigError: there is none; ``field`` is drift.
    """
    arch = family_for(model.source.config).arch(model.source.config)
    stream, found = LayerStream(arch, texts), []
    stream.enter(model.embedding())
    for i in range(arch.L):
        p = model.load(i)
        limits = {name: limit for name in PRODUCTS if (limit := _limit(p[name])) is not None}
        if limits:
            for name, (n, over, most) in _counts(stream, i, p, limits).items():
                at = f"{i}.{name}"
                found.append(Drift(product=at, over=over / n, most=most / float(limits[name])))
        stream.pass_layer(i, p)
    if not found:
        why = f"{model.source.name} has no static scales of activations"
        raise ConfigError(f"drift: {why}", field="drift")
    return sorted(found, key=lambda one: (-one.over, -one.most))


def _limit(w: QTensor | jax.Array) -> jax.Array | None:
    """The largest activation that the static scale of a matrix holds; None: it has none."""
    if not isinstance(w, QTensor) or w.input_scale is None:
        return None
    return jnp.max(w.input_scale) * LARGEST[w.form.kind]


def _counts(
    stream: LayerStream, layer: int, p: dict, limits: dict[str, jax.Array]
) -> dict[str, tuple[int, int, float]]:
    """(activations, those over the limit, the largest) of the inputs of each product."""
    found: dict[str, tuple[int, int, float]] = dict.fromkeys(limits, (0, 0, 0.0))
    for x_TD, name, kept_T in stream.inputs(layer, p):
        if name in limits:
            n, over, most = found[name]
            size_TD = jnp.where(kept_T[:, None], jnp.abs(x_TD), 0.0)
            found[name] = (
                n + int(jnp.sum(kept_T)) * x_TD.shape[1],
                over + int(jnp.sum(size_TD > limits[name])),
                max(most, float(jnp.max(size_TD))),
            )
    return found
