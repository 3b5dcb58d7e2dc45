"""The arrays of slots that step features keep: what each output token of a sequence makes of an array.

A state is a fold over the output tokens, so that it can be computed anew wherever it is lost. A slot holds that behind
its last token. Drafts are added where a draw needs them, and to the slot only those that are accepted; a sequence that
starts in a slot, or goes on there, has its tokens so far folded by a program of the feature's own::

    tokens    a b c | d1 d2 |      slot: f(f(f(start, a), b), c)     draw behind d2: f(f(slot, d1), d2)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model.draws import n_drafts, per_draw, prefixes
from jserve.model.feature import SlotArray, StepFeature
from jserve.model.slots import NONE
from jserve.model.view import StepView, state_name
from jserve.types import SlotLoad

_HEAD = 3
TOKENS = 2048
"""Tokens that one run of a load program carries."""
LOAD_SIZE = _HEAD + TOKENS


def at_draws(view: StepView, name: str, of: SlotArray) -> jax.Array:
    """[E, ...]: what slots hold for the feature ``name``, behind all tokens before each draw, drafts included."""
    x_E = per_draw(view, view.extra[state_name(name)])
    for token_E in prefixes(view, n_drafts(view)).T:
        next_E = jax.vmap(of.after)(x_E, jnp.maximum(token_E, 0))
        x_E = _where(token_E != NONE, next_E, x_E)
    return x_E


def advanced(
    states: Mapping[str, jax.Array],
    features: Sequence[StepFeature],
    view: StepView,
    token_RJ: jax.Array,
    n_ok_R: jax.Array,
) -> dict[str, jax.Array]:
    """The arrays of all slots once ``n_ok_R`` of ``token_RJ`` are accepted, of the features of this program."""
    found = dict(states)
    for feature in features:
        if feature.state is None:
            continue
        x_R = view.extra[state_name(feature.name)]
        for j in range(token_RJ.shape[1]):
            next_R = jax.vmap(feature.state.after)(x_R, jnp.maximum(token_RJ[:, j], 0))
            x_R = _where(j < n_ok_R, next_R, x_R)
        all_C = states[feature.name]
        at_R = jnp.where(n_ok_R > 0, view.slot_R, all_C.shape[0])
        found[feature.name] = all_C.at[at_R].set(x_R, mode="drop")
    return found


def loader(feature: StepFeature) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The array of all slots after one buffer of ``load_buffers``."""
    of = feature.state
    assert of is not None, f"{feature} has no state"

    def load(all_C: jax.Array, buf: jax.Array) -> jax.Array:
        slot, first, n = buf[0], buf[1] > 0, buf[2]
        start = jnp.where(first, jnp.asarray(of.start), all_C[slot])
        x = jax.lax.fori_loop(0, n, lambda i, x: of.after(x, buf[_HEAD + i]), start)
        return all_C.at[slot].set(x)

    return load


def load_buffers(item: SlotLoad) -> list[np.ndarray]:
    """The int32[LOAD_SIZE] buffers that ``loader`` runs, in order, to fill a slot; numpy only."""
    output, runs = item.tokens[item.n_prompt :], []
    for start in range(0, max(1, len(output)), TOKENS):
        part = output[start : start + TOKENS]
        buf = np.zeros(LOAD_SIZE, np.int32)
        buf[:_HEAD] = item.slot, start == 0, len(part)
        buf[_HEAD : _HEAD + len(part)] = part
        runs.append(buf)
    return runs


def _where(right_X: jax.Array, x_X: jax.Array, other_X: jax.Array) -> jax.Array:
    """[X, ...]: rows of ``x_X`` where ``right_X`` is true."""
    return jnp.where(right_X.reshape(-1, *[1] * (x_X.ndim - 1)), x_X, other_X)
