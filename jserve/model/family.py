"""The ``Family`` type: a model family as a value of plain functions over one ``Arch``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jserve.errors import ConfigError
from jserve.model.arch import Arch, Mlp
from jserve.model.attention import LayerKV
from jserve.model.ctx import Ctx
from jserve.model.shard import Axes


def check_layout(family: Family, arch: Arch, axes: Axes) -> None:
    """Refuse a residual stream that is split where the family's pass has it whole.

    Raises:
        ConfigError: ``field`` is the key of the sharding.
    """
    dense = all(isinstance(x.ffn, Mlp) and x.attn.latent is None for x in arch.layers)
    own = f"the family {family.name} computes the residual stream itself, whole"
    for field, axis, why in (
        ("sharding.residual", axes.tokens, own if family.tapped is None else ""),
        ("sharding.rules.embed", axes.embed, own if family.tapped is None else ""),
        ("sharding.rules.embed", axes.embed, "" if dense else "experts and latents read it whole"),
        (
            "sharding.rules.embed",
            axes.embed,
            "quantised weights read it whole" if family.wide else "",
        ),
    ):
        if axis is not None and why:
            raise ConfigError(f"{field}: {why}", field=field)


class Pass(NamedTuple):
    """All that a pass over the layers gives."""

    x_TD: jax.Array
    """float32, after the final norm."""
    kv: list[LayerKV]
    read: list[jax.Array]
    """The values at each of the points that were named, float32[T, ...]."""
    count_LE: jax.Array | None
    """int32: tokens of each expert, of the layers that have experts; None: they are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family. All functions are pure; ``axes`` says over which mesh axis each dimension is
    split inside shard_map, and every collective reads its own.

    arch:    config.json as a mapping -> Arch. Raises ConfigError naming the key it cannot honour.
    specs:   (arch, tp) -> tree of ParamSpec (global shapes; kv heads repeated when tp > K).
    forward: (ctx, params, kv) -> (x_TD after the final norm, new kv). ``params`` and ``kv`` are this
             shard's.
    logits:  (arch, params, x_ED, axes) -> float32[E, V], the whole vocabulary on every shard.
    tapped:  forward with a last argument more, names of ``jserve.model.points``, that also gives the values,
             float32[T, ...], at each of them. None: nothing can be read, and heads that read hidden states cannot
             draft for this family.
    counted: as ``tapped``, and it counts the tokens of each expert where ``ctx`` has places of experts. None: experts
             of this family cannot move, nor be counted.
    embed:   (arch, params, tok_T, axes) -> float32[T, D]. None: nor can those without a table of their own.
    """

    name: str
    architectures: tuple[str, ...]
    arch: Callable[[Mapping[str, Any]], Arch]
    specs: Callable[[Arch, int], Any]
    forward: Callable[[Ctx, Any, list[LayerKV]], tuple[jax.Array, list[LayerKV]]]
    logits: Callable[[Arch, Any, jax.Array, Axes], jax.Array]
    tapped: (
        Callable[
            [Ctx, Any, list[LayerKV], Sequence[str]],
            tuple[jax.Array, list[LayerKV], list[jax.Array]],
        ]
        | None
    ) = None
    counted: Callable[[Ctx, Any, list[LayerKV], Sequence[str]], Pass] | None = None
    embed: Callable[[Arch, Any, jax.Array, Axes], jax.Array] | None = None
    wide: Family | None = None
    """Of a quantised family, the same one with its matrices in the type of the model."""
