"""``SlotState``: per-slot device state that persists between steps.

It owns the truth that the host only bounds from above (length, last token) and the per-slot rows that sampling
reads (bad words, the number of a vocab row) and drafters that copy (text), how a step advances them and how the
host fills them. ``vocab_rows`` has counts and biases.

``recent_CB`` is the tail of the output, newest last, ``NONE`` before its start; a row of
``bad_CWK`` is one word, right-aligned, ``NONE`` on its left, its last id forbidden whenever the
output ends with the ids before it::

    recent   NONE NONE  7   4        bad   NONE  7  4  9   -> 9 is forbidden now
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from jserve.model import vocab_rows
from jserve.model.vocab_rows import IN_PROMPT, VocabState
from jserve.sampling import BAN, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from jserve.types import SlotLoad

NONE = -1
LOAD_PAIRS = 512
"""(id, value) pairs of each kind that one run of the load program carries."""
_TAIL = MAX_BAD_WORD_TOKENS - 1


@register_dataclass
@dataclass(frozen=True)
class SlotState:
    """Per-slot rows, replicated over the mesh. C slots, V vocabulary, B tail tokens, W words of K
    ids."""

    len_C: jax.Array
    """int32: tokens whose KV is written; the next row of the slot starts here."""
    last_C: jax.Array
    """int32: the token drawn last, at position ``len_C``."""
    recent_CB: jax.Array
    bad_CWK: jax.Array
    vocab: VocabState | None = None
    """Counts and biases; None: no request may have penalties or biases."""
    draft_CJ: jax.Array | None = None
    """int32: what the device drafter left for the next row; None: there is no drafter."""
    text_CS: jax.Array | None = None
    """int32: the newest S tokens, that of position p in place p % S; None: nobody reads them."""
    pick_CK: jax.Array | None = None
    """int32: ids that the request names to have their log-probabilities, padded with 0; meaningless for
    one that names none. None: no request may."""
    states: dict[str, jax.Array] = field(default_factory=dict)
    """[C, ...] each: what features keep, by name; meaningless for a request that does not ask for them."""


def empty(C: int, V: int, drafts: int = 0, **sizes: Any) -> SlotState:
    """Slots nobody has held yet; ``sizes`` as of ``shapes``."""
    slots = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes(C, V, drafts, **sizes))
    return replace(slots, vocab=slots.vocab and vocab_rows.leased_to_none(slots.vocab))


def shapes(
    C: int,
    V: int,
    drafts: int = 0,
    *,
    text: int = 0,
    picks: int = 0,
    n_vocab_rows: int = 0,
    states: Sequence[tuple[str, tuple[int, ...], str]] = (),
) -> Any:
    """The abstract state, a ``SlotState`` of ``ShapeDtypeStruct``, with room for so many drafts, tokens of text
    and picked ids, so many vocab rows together, and what features keep, by name, shape and dtype."""

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    arrays: Any = {
        name: jax.ShapeDtypeStruct((C, *shape), jnp.dtype(dtype)) for name, shape, dtype in states
    }
    return SlotState(
        len_C=ints(C),
        last_C=ints(C),
        recent_CB=ints(C, _TAIL),
        bad_CWK=ints(C, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS),
        vocab=vocab_rows.shapes(C, V, n_vocab_rows) if n_vocab_rows else None,
        draft_CJ=ints(C, drafts) if drafts else None,
        text_CS=ints(C, text) if text else None,
        pick_CK=ints(C, picks) if picks else None,
        states=arrays,
    )


def advance(
    slots: SlotState,
    slot_R: jax.Array,
    len_R: jax.Array,
    token_RJ: jax.Array,
    n_ok_R: jax.Array,
    penalised_R: jax.Array,
) -> SlotState:
    """The slots after a step: ``n_ok_R`` of ``token_RJ`` accepted, ``len_R`` tokens of KV.

    Rows with ``n_ok_R == 0`` leave their slot alone, as do rows of slot C. Tokens of ``penalised_R``
    (bool) rows are counted in the vocab rows of their slots.
    """
    C = slots.len_C.shape[0]
    J = token_RJ.shape[1]
    live_R = n_ok_R > 0
    hit_CR = (slot_R[None, :] == jnp.arange(C, dtype=jnp.int32)[:, None]) & live_R[None, :]
    row_C = jnp.argmax(hit_CR, axis=1)
    live_C = jnp.any(hit_CR, axis=1)
    last_R = jnp.take_along_axis(token_RJ, jnp.maximum(n_ok_R - 1, 0)[:, None], axis=1)[:, 0]
    tail_CX = jnp.concatenate([slots.recent_CB, token_RJ[row_C]], axis=1)
    keep_CB = n_ok_R[row_C][:, None] + jnp.arange(_TAIL, dtype=jnp.int32)
    recent_CB = jnp.take_along_axis(tail_CX, keep_CB, axis=1)
    drawn_RJ = jnp.arange(J) < n_ok_R[:, None]
    text_CS = slots.text_CS
    if text_CS is not None:
        pos_RJ = len_R[:, None] + 1 - n_ok_R[:, None] + jnp.arange(J, dtype=jnp.int32)
        at_RJ = jnp.where(drawn_RJ, slot_R[:, None], C)
        text_CS = text_CS.at[at_RJ, pos_RJ % text_CS.shape[1]].set(token_RJ, mode="drop")
    vocab = slots.vocab
    if vocab is not None:
        counted_RJ = jnp.where(drawn_RJ, token_RJ, vocab.counts_UV.shape[1])
        vocab = vocab_rows.count(vocab, slot_R, penalised_R, counted_RJ)
    return replace(
        slots,
        vocab=vocab,
        text_CS=text_CS,
        len_C=jnp.where(live_C, len_R[row_C], slots.len_C),
        last_C=jnp.where(live_C, last_R[row_C], slots.last_C),
        recent_CB=jnp.where(live_C[:, None], recent_CB, slots.recent_CB),
    )


def keep_drafts(
    slots: SlotState,
    slot_R: jax.Array,
    live_R: jax.Array,
    draft_RJ: jax.Array,
) -> SlotState:
    """The slots with ``draft_RJ`` in those of the live rows."""
    C, n = slots.len_C.shape[0], draft_RJ.shape[1]
    assert slots.draft_CJ is not None, "slots without room for drafts"
    at_R = jnp.where(live_R, slot_R, C)
    return replace(slots, draft_CJ=slots.draft_CJ.at[at_R, :n].set(draft_RJ, mode="drop"))


def text_of(slots: SlotState, slot_R: jax.Array) -> jax.Array:
    """int32[R, S]: the text of each row's slot (of slot C: of any)."""
    assert slots.text_CS is not None, "slots without text"
    return slots.text_CS[jnp.minimum(slot_R, slots.len_C.shape[0] - 1)]


_HEAD = 4
_RECENT_AT = _HEAD
_BAD_AT = _RECENT_AT + _TAIL
_PAIRS_AT = _BAD_AT + MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS
LOAD_SIZE = _PAIRS_AT + 4 * LOAD_PAIRS
LOAD_TOKENS = 2048
"""Tokens that one run of ``load_text`` carries."""
_TEXT_HEAD = 3
TEXT_SIZE = _TEXT_HEAD + LOAD_TOKENS


def load(slots: SlotState, buf: jax.Array) -> SlotState:
    """Run one buffer of ``load_buffers``: reset the vocab row if told to, then set the pairs."""
    slot, reset, vocab = buf[0], buf[1] > 0, slots.vocab
    if vocab is not None:
        fill = jax.lax.bitcast_convert_type(buf[2], jnp.float32)
        pairs = buf[_PAIRS_AT:].reshape(4, LOAD_PAIRS)
        vocab = vocab_rows.load(vocab, slot, buf[3], fill, reset, pairs)
    bad_WK = buf[_BAD_AT:_PAIRS_AT].reshape(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
    return replace(
        slots,
        vocab=vocab,
        recent_CB=slots.recent_CB.at[slot].set(buf[_RECENT_AT:_BAD_AT]),
        bad_CWK=slots.bad_CWK.at[slot].set(bad_WK),
    )


def load_text(slots: SlotState, buf: jax.Array) -> SlotState:
    """Run one buffer of ``text_buffers``: set a stretch of the slot's text."""
    assert slots.text_CS is not None, "slots without text"
    C, S = slots.text_CS.shape
    slot, start, n = buf[0], buf[1], buf[2]
    i_X = jnp.arange(LOAD_TOKENS, dtype=jnp.int32)
    text_CS = slots.text_CS.at[jnp.where(i_X < n, slot, C), (start + i_X) % S].set(
        buf[_TEXT_HEAD:], mode="drop"
    )
    return replace(slots, text_CS=text_CS)


def load_picks(slots: SlotState, buf: jax.Array) -> SlotState:
    """Run the buffer of ``picks_buffer``: set the slot's picked ids."""
    assert slots.pick_CK is not None, "slots without picks"
    return replace(slots, pick_CK=slots.pick_CK.at[buf[0]].set(buf[1:]))


def picks_buffer(item: SlotLoad, K: int) -> np.ndarray:
    """The int32[1 + K] buffer that ``load_picks`` runs; numpy only."""
    ids = item.params.logprob_token_ids or ()
    buf = np.zeros(1 + K, np.int32)
    buf[0], buf[1 : 1 + len(ids)] = item.slot, ids
    return buf


def text_buffers(item: SlotLoad, S: int) -> list[np.ndarray]:
    """The int32[TEXT_SIZE] buffers that ``load_text`` runs to set a slot's text; numpy only."""
    runs = []
    for start in range(max(0, len(item.tokens) - S), len(item.tokens), LOAD_TOKENS):
        part = item.tokens[start : start + LOAD_TOKENS]
        buf = np.zeros(TEXT_SIZE, np.int32)
        buf[:_TEXT_HEAD] = item.slot, start, len(part)
        buf[_TEXT_HEAD : _TEXT_HEAD + len(part)] = part
        runs.append(buf)
    return runs


def load_buffers(item: SlotLoad, V: int) -> list[np.ndarray]:
    """The int32[LOAD_SIZE] buffers that ``load`` runs, in order, to fill one slot; numpy only."""
    count_ids, counts = _counts(item)
    bias_ids, bias, fill = _biases(item)
    n_runs = max(1, -(-max(len(count_ids), len(bias_ids)) // LOAD_PAIRS))
    runs = []
    for i in range(n_runs):
        buf = np.empty(LOAD_SIZE, np.int32)
        buf[:_HEAD] = item.slot, i == 0, np.float32(fill).view(np.int32), item.vocab_row
        buf[_RECENT_AT:_BAD_AT] = _recent(item)
        buf[_BAD_AT:_PAIRS_AT] = _bad_words(item).ravel()
        part = slice(i * LOAD_PAIRS, (i + 1) * LOAD_PAIRS)
        pairs = buf[_PAIRS_AT:].reshape(4, LOAD_PAIRS)
        _put(pairs[0], pairs[1], count_ids[part], counts[part], V)
        _put(pairs[2], pairs[3], bias_ids[part], bias[part].view(np.int32), V)
        runs.append(buf)
    return runs


def _put(ids: np.ndarray, values: np.ndarray, some: np.ndarray, what: np.ndarray, V: int) -> None:
    ids[: len(some)], ids[len(some) :] = some, V
    values[: len(some)], values[len(some) :] = what, 0


def _counts(item: SlotLoad) -> tuple[np.ndarray, np.ndarray]:
    if not item.params.penalised:
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    tokens = np.asarray(item.tokens, np.int32)
    ids, inverse = np.unique(tokens, return_inverse=True)
    output = np.bincount(inverse[item.n_prompt :], minlength=len(ids))
    prompt = np.bincount(inverse[: item.n_prompt], minlength=len(ids)) > 0
    return ids, (output + prompt * IN_PROMPT).astype(np.int32)


def _biases(item: SlotLoad) -> tuple[np.ndarray, np.ndarray, float]:
    """Ids, float32 values, and the value of every other id."""
    params = item.params
    allowed = params.allowed_token_ids
    bias = {} if allowed is None else dict.fromkeys(allowed, 0.0)
    for token, value in params.logit_bias.items():
        if allowed is None or token in bias:
            bias[token] = -np.inf if value <= BAN else value
    bias.update((word[0], -np.inf) for word in params.bad_token_ids if len(word) == 1)
    ids = np.fromiter(bias.keys(), np.int32, len(bias))
    values = np.fromiter(bias.values(), np.float32, len(bias))
    return ids, values, 0.0 if allowed is None else -np.inf


def _recent(item: SlotLoad) -> np.ndarray:
    tail = np.full(_TAIL, NONE, np.int32)
    output = item.tokens[max(item.n_prompt, len(item.tokens) - _TAIL) :]
    if len(output):
        tail[-len(output) :] = output
    return tail


def _bad_words(item: SlotLoad) -> np.ndarray:
    bad_WK = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), NONE, np.int32)
    for row, word in enumerate(w for w in item.params.bad_token_ids if len(w) > 1):
        bad_WK[row, -len(word) :] = word
    return bad_WK
