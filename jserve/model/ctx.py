"""``Ctx``: the values that all parts of one decoder pass share.

It owns ``Ctx``, which blocks and families take beside weights, activations and KV. Hooks of step features read it
too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from jserve.model.arch import Arch, DecoderLayer, Rope
from jserve.model.attention import AttentionBackend
from jserve.model.collectives import gather, own_columns, own_rows, reduce, reduce_scatter
from jserve.model.mesh import MeshAxis
from jserve.model.moe_places import Placement
from jserve.model.rope import rope_tables, rotate
from jserve.model.shard import Axes
from jserve.model.view import StepView

Tables = tuple[jax.Array, jax.Array]
"""Cosines and sines of the tokens' positions under one rope, as ``rope.rope_tables`` gives them."""
Edit = Callable[[jax.Array], jax.Array]
"""float32[T, D] at a point -> what goes on from there."""


@register_dataclass
@dataclass(frozen=True)
class Ctx:
    """The context of a pass, frozen. A pytree whose leaves are the tables and the view; the rest is static,
    so layers that differ in weights alone are one traced function."""

    tables: tuple[Tables, ...] | None
    """Of each of ``Arch.ropes``; None outside the layers."""
    view: StepView
    edits: dict[str, Edit]
    """Point of the residual stream -> what changes it there; none inside layers."""
    arch: Arch = jax.tree.static()
    attn: AttentionBackend = jax.tree.static()
    axes: Axes = jax.tree.static()
    places: Placement | None = None
    """Of the layer's experts, of all such layers outside of these; None: an expert has the slot of its number, and no
    tokens are counted."""
    layer: int = jax.tree.static(default=0)
    """Number of the layer, or of the first one that is like it."""
    points: tuple[str, ...] = jax.tree.static(default=())
    """Those of ``points.INSIDE`` that are read of the layer."""

    @classmethod
    def of(
        cls,
        arch: Arch,
        view: StepView,
        attn: AttentionBackend,
        axes: Axes,
        places: Placement | None = None,
    ) -> Ctx:
        """Of a pass over the tokens of ``view``, before its first layer. The residual stream is split as ``axes`` say
        only where prompts are computed: over few tokens two collectives in place of one cost more than they spare."""
        if axes.tokens is not None and not view.P:
            axes = axes.whole_tokens
        return cls(tables=None, view=view, edits={}, arch=arch, attn=attn, axes=axes, places=places)

    def with_tables(self) -> Ctx:
        """The same for layers: with the tables of the view's positions."""
        tables = tuple(self.tables_at(rope, self.view.pos_T) for rope in self.arch.ropes)
        return replace(self, tables=tables)

    def tables_at(self, rope: Rope, pos_T: jax.Array) -> Tables:
        """Of the view's tokens, as if they were at ``pos_T``."""
        by_row = rope.scaling is not None and rope.scaling.by_row
        return rope_tables(rope, self.arch.H, pos_T, self.view.long_T if by_row else None)

    def at(self, layer: int, places: Placement | None = None, points: tuple[str, ...] = ()) -> Ctx:
        """The same for a layer like ``layer``, whose experts have these places, and of which ``points`` are read."""
        return replace(self, layer=layer, places=places, points=points, edits={})

    def edited(self, point: str, x_TD: jax.Array) -> jax.Array:
        """The residual stream at ``point``, changed as it is to be there."""
        return self.own(self.edits[point](self.whole(x_TD))) if point in self.edits else x_TD

    def summed(self, y_TD: jax.Array, axis: MeshAxis, weights: Any) -> jax.Array:
        """The sum over ``axis`` of partial products with ``weights``, of the residual stream's own tokens."""
        kind = self.axes.exchanged(weights)
        if axis == self.axes.tokens:
            return reduce_scatter(y_TD, axis, kind)
        return self.own_tokens(reduce(y_TD, axis, kind))

    def over_width(self, y_TN: jax.Array, weights: Any) -> jax.Array:
        """The whole of a product of the residual stream with ``weights``."""
        return reduce(y_TN, self.axes.embed, self.axes.exchanged(weights))

    def own(self, x_TD: jax.Array) -> jax.Array:
        """The part of ``x_TD`` that the residual stream has here."""
        return own_columns(self.own_tokens(x_TD), self.axes.embed)

    def own_tokens(self, x_TD: jax.Array) -> jax.Array:
        """The tokens of ``x_TD`` that the residual stream has here."""
        return own_rows(x_TD, self.axes.tokens)

    def whole(self, x_TD: jax.Array) -> jax.Array:
        """The residual stream, or what was made of it, as others than layers see it."""
        return gather(self.all_tokens(x_TD), self.axes.embed, 1)

    def all_heads(self, x_TNH: jax.Array, n: int) -> jax.Array:
        """float32[T, n, H]: all heads of what each device has of its own ones; kv heads that are fewer than devices are
        repeated there, and come once."""
        x_TNH = gather(x_TNH.astype(jnp.float32), self.axes.heads, 1)
        return x_TNH[:, :: x_TNH.shape[1] // n]

    def all_tokens(self, x_TD: jax.Array, read_as: Any = jnp.float32) -> jax.Array:
        """All tokens of what was made of the residual stream, for readers that round it to ``read_as`` first."""
        if self.axes.tokens is None:
            return x_TD
        whole_TD = gather(x_TD.astype(read_as), self.axes.tokens, 0).astype(x_TD.dtype)
        return whole_TD[: self.view.tok_T.shape[0]]

    def of_layer(
        self,
        layer: int,
        like: int,
        places: Placement | None = None,
        points: tuple[str, ...] = (),
    ) -> Ctx:
        """``at`` the layer ``like``, with the pages of ``layer``, which is like it."""
        ctx = replace(self, view=self.view.of_layer(layer))
        return ctx.at(like, places, points)

    @property
    def spec(self) -> DecoderLayer:
        """Of the layer."""
        return self.arch.layers[self.layer]

    @property
    def window(self) -> int:
        """Of the layer, 0 for full attention."""
        return self.spec.attn.window

    def turned(self, x_TNH: jax.Array) -> jax.Array:
        """Heads turned to their tokens' positions, as the layer's rope says."""
        assert self.tables is not None, "a layer needs Ctx.with_tables"
        rope = self.spec.attn.rope
        if rope is None:
            return x_TNH
        return rotate(x_TNH, *self.tables[self.arch.ropes.index(rope)], pairs=rope.pairs)
