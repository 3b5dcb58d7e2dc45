"""The ``Drafter`` type: what drafts on the device, as a value of plain functions.

A drafter keeps KV of its own, if any, under the page ids of the target: entry p of a sequence lies
in the page and at the offset where the target's position p lies, so what is cached, preempted,
moved or spilled is so for both. Entry p may depend on tokens up to p and, where ``reads_next``, on
the one at p + 1 and on the target's hidden state at p::

    target           t0 t1 t2 t3            hidden  h0 h1 h2 h3      drawn: t4
    draft model      t0 t1 t2 t3            then a pass over t4 at 4 gives the first draft
    reads_next       (h0,t1) (h1,t2) (h2,t3) (h3,t4)      whose last output gives the first draft

The last entry of a shared page depends, where ``reads_next``, on the token that followed when it
was written; another continuation reads it as it is. That can cost a draft, never a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.tree_util import register_dataclass

from jserve.errors import ConfigError
from jserve.kv_layout import KVLayer, KVLayout
from jserve.model.arch import Arch
from jserve.model.attention import AttentionBackend, LayerKV
from jserve.model.collectives import n_shards
from jserve.model.mesh import AXIS
from jserve.model.shard import Axes, ShardRules, padded
from jserve.model.view import StepView
from jserve.sampling import MAX_LOGPROBS

REPLICATED = ShardRules(vocab=None, kv_heads=None, ffn=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The parts of the target model that a drafter may use, on this shard."""

    arch: Arch
    params: Any
    embedding: Callable[[Arch, Any, jax.Array, Axes], jax.Array] | None
    """``Family.embed``"""
    unembedding: Callable[[Arch, Any, jax.Array, Axes], jax.Array]
    """``Family.logits``"""
    attn: AttentionBackend
    axes: Axes
    scored: int = MAX_LOGPROBS
    """``StepDims.scored``"""

    def embed(self, tok_T: jax.Array) -> jax.Array:
        """float32[T, D]: the target's embedding."""
        assert self.embedding is not None, f"{self.arch.family} shows no embedding"
        return self.embedding(self.arch, self.params, tok_T, self.axes)

    def logits(self, x_ED: jax.Array) -> jax.Array:
        """float32[E, V]: the target's unembedding."""
        return self.unembedding(self.arch, self.params, x_ED, self.axes.gathered)

    def own_logits(self, x_ED: jax.Array) -> jax.Array:
        """float32[E, V]: the same, or the columns of this device's part (``VocabPart``) where logits stay split.

        Raises:
            ConfigError: logits are to stay split, and the family's are whole.
        """
        x_EV, axes = self.unembedding(self.arch, self.params, x_ED, self.axes), self.axes
        if axes.split_logits and x_EV.shape[1] != -(-self.arch.V // n_shards(axes.vocab)):
            why = "the logits of this family are whole on every device"
            raise ConfigError(f"sharding.logits: {why}", field="sharding.logits")
        return x_EV


@register_dataclass
@dataclass(frozen=True)
class Seen:
    """The hidden states that a step computed for its tokens. Tokens of a decode row are the accepted ones, then
    others that may hold anything: no later pass reads what is written for them before writing it anew."""

    view: StepView
    next_T: jax.Array
    """int32: the token after each token (for the last of a row that draws, the one drawn)."""
    x_TD: jax.Array
    """float32: the target's hidden states after its final norm."""
    taps: list[jax.Array]
    """float32[T, D] each: its residual stream entering the layers in ``Drafter.taps``."""
    last_R: jax.Array
    """int32: index in T of the last accepted token of each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """A drafter. All functions are pure and run inside the step's shard_map; ``params`` and ``kv``
    are this shard's, split as ``axes`` says (as the target is, or not at all: ``replicated``).

    specs:   tp -> tree of ParamSpec (global shapes). Raises ConfigError where it cannot be split over
             so many devices; ``field`` is the config.json key.
    observe: (target, params, seen, kv, axes) -> (carry, kv): write the KV of all tokens of a step;
             ``carry`` float32[R, X] is what the last token of each row leaves.
    advance: (target, params, carry float32[E, X], view, kv, axes) -> (carry float32[E, X], kv): one
             pass over the view's tokens, each after the carry of the token before it (which may be
             ignored). None: all drafts come from the first carry.
    logits:  (target, params, carry float32[E, X], depth, axes) -> float32[E, V] of draft number
             ``depth`` (0, 1 ...; static where there is no ``advance``), -inf for tokens it never
             drafts.
    copy:    (text int32[R, S], newest int32[R], n) -> int32[R, n] drafts, for one that knows no more than
             the text: a ring of its newest S tokens (position p in place p % S) up to position
             ``newest``. It has none of the other functions.
    """

    name: str
    arch: Arch
    """Of its own layers: L of them keep KV (0: none), with K heads of H."""
    n_max: int
    """Most drafts in a chain, or most depth of a tree."""
    taps: tuple[int, ...] = ()
    """Layers of the target whose entering residual stream it reads (L: entering the final norm)."""
    reads_next: bool
    replicated: bool = False
    """True: every device holds all of it and does the same work; False: sharded as the target is.
    ``split_over`` decides."""
    specs: Callable[[int], Any]
    observe: (
        Callable[[Target, Any, Seen, list[LayerKV], Axes], tuple[jax.Array, list[LayerKV]]] | None
    ) = None
    advance: (
        Callable[
            [Target, Any, jax.Array, StepView, list[LayerKV], Axes],
            tuple[jax.Array, list[LayerKV]],
        ]
        | None
    ) = None
    logits: Callable[[Target, Any, jax.Array, Any, Axes], jax.Array] | None = None
    text: int = 0
    """Newest tokens of a text that ``copy`` reads."""
    copy: Callable[[jax.Array, jax.Array, int], jax.Array] | None = None

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        """The KV that each of its own layers keeps of a token; none where it has no layers."""
        layers = self.arch.kv_layers if self.advance is not None else ()
        return tuple(replace(x, replicated=x.replicated or self.replicated) for x in layers)


def kv_layout(
    arch: Arch, drafter: Drafter | None, *, page_size: int, dtype: Any, tp: int
) -> KVLayout:
    """The KV of a target and what drafts for it.

    Args:
        dtype: as the attention backend stores it.
        tp: devices that the kv heads are split over.
    """
    own = () if drafter is None else drafter.kv_layers
    if arch.kv_forms:  # the pool is of bytes
        own = tuple(layer.as_bytes(arch.kv_form) for layer in own)
    layers = (*arch.kv_layers, *own)
    return KVLayout(layers=layers, page_size=page_size, dtype=np.dtype(dtype), tp=tp)


def split_over(drafter: Drafter, tp: int, wished: int = 0) -> Drafter:
    """``drafter`` as the target's ``tp`` devices hold it: a part each, or all of it each.

    Args:
        wished: 1: all of it each; ``tp``: a part each; 0: a part each if its sizes allow that.

    Raises:
        ConfigError: a part each was wished, and its sizes do not allow it.
    """
    assert wished in (0, 1, tp), "refused before a drafter was read"
    if tp == 1 or wished == 1:
        return replace(drafter, replicated=tp > 1)
    try:
        padded(drafter.specs(tp), ShardRules(), {AXIS: tp})
    except ConfigError as error:
        if wished:
            field = "speculative.tensor_parallel_size"
            raise ConfigError(
                f"{field} {tp}: this drafter cannot be split, {error.message}", field=field
            ) from None
        return replace(drafter, replicated=True)
    return replace(drafter, replicated=False)
