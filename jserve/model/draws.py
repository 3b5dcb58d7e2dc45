"""Lists the positions of a step that sample a token, and the sampling inputs of each.

A token is drawn after every token of a decode row and after the last one of a prefill row (E = D * J + F)::

    T      |d0 d0 d1 d1 |f0 f0 f0 f0 f1 f1 f1 pad|
    drawn    ^  ^  ^  ^            ^        ^
    rows   |d0: 2 draws, d1: 2 draws, f0: 1 draw, f1: 1 draw|
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from jserve.model.draft_tree import path_to
from jserve.model.slots import NONE
from jserve.model.view import SAMPLING, StepView


@register_dataclass
@dataclass(frozen=True)
class Draws:
    """The inputs of a draw besides its logits; E draws, J - 1 drafts before each."""

    slot_E: jax.Array
    uses_E: jax.Array
    """int32: flag bits of this row; its slot's vocab row and bad words are meaningless without
    theirs."""
    pos_E: jax.Array
    """int32: position of the token to be drawn."""
    prefix_EJ: jax.Array
    """int32: drafts between the slot's last token and this draw, oldest first, NONE where there is
    none."""
    n_prefix_E: jax.Array
    temperature_E: jax.Array
    top_p_E: jax.Array
    min_p_E: jax.Array
    repetition_E: jax.Array
    presence_E: jax.Array
    frequency_E: jax.Array
    top_k_E: jax.Array
    seed_E2: jax.Array
    min_pos_E: jax.Array
    stop_ES: jax.Array
    mask_EW: jax.Array | None = None
    redraw_E: jax.Array | None = None
    """int32: as ``RowPlan.redraw``, NONE for none; None: none for any row."""


def drawn_places(view: StepView) -> jax.Array:
    """int32[E]: indices in T whose logits draw a token."""
    last_F = jnp.maximum(view.first_R + view.count_R - 1, 0)[view.D :]
    return jnp.concatenate([jnp.arange(view.D * view.J, dtype=jnp.int32), last_F])


def by_row(view: StepView, x_E: jax.Array, fill: Any) -> jax.Array:
    """[E, ...] -> [R, J, ...]; a prefill row has its one draw in column 0."""
    n, rest = view.D * view.J, x_E.shape[1:]
    decode = x_E[:n].reshape(view.D, view.J, *rest)
    prefill = jnp.full((view.F, view.J, *rest), fill, x_E.dtype).at[:, 0].set(x_E[n:])
    return jnp.concatenate([decode, prefill])


def draws_of(view: StepView) -> Draws:
    """The sampling values of each of the E tokens that are drawn."""
    place_E = n_drafts(view)
    last_R = jnp.where(jnp.arange(view.D + view.F) < view.D, 0, view.count_R - 1)
    rows = {c.name.replace("_R", "_E"): per_draw(view, getattr(view, c.name)) for c in SAMPLING}
    slot_R = jnp.where(view.count_R > 0, view.slot_R, 0)
    mask_EW = redraw_E = None
    if "mask_RJW" in view.extra:
        mask_EW, redraw_E = (_drawn(view, view.extra[f]) for f in ("mask_RJW", "redraw_RJ"))
    return Draws(
        slot_E=per_draw(view, slot_R),
        pos_E=per_draw(view, view.start_R + last_R) + place_E + 1,
        prefix_EJ=prefixes(view, place_E),
        n_prefix_E=place_E,
        mask_EW=mask_EW,
        redraw_E=redraw_E,
        **rows,
    )


def per_draw(view: StepView, x_R: jax.Array) -> jax.Array:
    """A row's value at each of its draws."""
    return jnp.concatenate([jnp.repeat(x_R[: view.D], view.J, axis=0), x_R[view.D :]])


def _drawn(view: StepView, x_RJ: jax.Array) -> jax.Array:
    """[R, J, ...] -> [E, ...], the inverse of ``by_row``."""
    decode = x_RJ[: view.D].reshape(view.D * view.J, *x_RJ.shape[2:])
    return jnp.concatenate([decode, x_RJ[view.D :, 0]])


def prefixes(view: StepView, place_E: jax.Array) -> jax.Array:
    """int32[E, J - 1]: the drafts between a row's known tokens and each draw, oldest first, NONE beyond them.

    Args:
        place_E: ``n_drafts(view)``.
    """
    if view.tree is not None:
        return _prefixes_in_tree(view)
    D, J = view.D, view.J
    draft_DJ = view.tok_T[: D * J].reshape(D, J)[:, 1:]
    draft_EJ = jnp.concatenate(
        [jnp.repeat(draft_DJ, J, axis=0), jnp.full((view.F, J - 1), NONE, jnp.int32)]
    )
    before = jnp.arange(J - 1, dtype=jnp.int32) < place_E[:, None]
    return jnp.where(before, draft_EJ, NONE)


def n_drafts(view: StepView) -> jax.Array:
    """int32[E]: drafts before each draw."""
    place_DJ = jnp.arange(view.J, dtype=jnp.int32) if view.tree is None else view.tree.depth_DX
    place_n = jnp.broadcast_to(place_DJ, (view.D, view.J)).reshape(-1)
    return jnp.concatenate([place_n, jnp.zeros(view.F, jnp.int32)])


def _prefixes_in_tree(view: StepView) -> jax.Array:
    """int32[E, J - 1]: the drafts before each draw, NONE beyond them."""
    assert view.tree is not None
    D, J = view.D, view.J
    at_DJJ = jnp.broadcast_to(path_to(view.tree), (D, J, J - 1))
    token_DJ = view.tok_T[: D * J].reshape(D, J)
    found_DJJ = jnp.take_along_axis(token_DJ[:, None], at_DJJ, axis=2)
    draft_DJJ = jnp.where(at_DJJ > 0, found_DJJ, NONE)
    rest = jnp.full((view.F, J - 1), NONE, jnp.int32)
    return jnp.concatenate([draft_DJJ.reshape(D * J, J - 1), rest])
