"""Samples tokens from logits on the device.

It owns the sampling fields of ``SamplingParams`` and the order in which they act, which is vLLM's: whatever can change
the likeliest token (``adjust``), then the greedy choice, or temperature, min_p, top_k, top_p and a draw.
Log-probabilities are of the raw logits, before all of that, unless option ``logprobs_mode`` says otherwise.

Each of min_p, top_k and top_p keeps a set of the form "logit >= threshold", so truncation is one
threshold per row and the vocabulary is never sorted: the 64 largest logits decide it nearly always,
and otherwise a bisection over the bits of the floats finds the same number exactly. Equal logits at
the threshold are kept together.

A draw is the argmax of logits over temperature plus Gumbel noise (``noise``) over the tokens that are
left: one pass over the vocabulary. The noise depends on (seed, position of the token drawn, purpose,
token) and nothing else, so a drafter that adds the same noise to its own logits mostly finds the same
token.

Where a thought may begin or goes on before a structure, a mask applies to a draw only if the mask
forbids it: the token is drawn without the mask first, and only a forbidden one is drawn again, with
noise of its own. So the thought has the tokens that it has without a structure, and its
first token the probability.

Where the vocabulary is split over devices, each has the columns of its ``VocabPart``, all know the same numbers of
each row, and V below is the number of its columns.

``flags`` says what any row of the step needs; the rest is skipped by ``lax.cond``. E below counts
draws (rows of the step times their positions), not experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from jserve.model.adjust import CHANGES, adjust, in_mask, masked, without_token
from jserve.model.draws import Draws
from jserve.model.noise import Purpose, gumbel
from jserve.model.slots import NONE, SlotState
from jserve.model.view import LOGPROBS, RANDOM, TRUNCATE
from jserve.model.vocab_part import WHOLE, VocabPart
from jserve.sampling import GREEDY_TEMPERATURE, MAX_LOGPROBS

PURPOSE_TOKEN = 0
PURPOSE_REDRAW = 1
PURPOSE_OWN = 2
"""Added to one of the others: draws of step features."""
PREFILTER = 64
"""Largest logits looked at before falling back to bisection."""
_NEG = -jnp.inf


Own = Callable[[jax.Array, Draws, jax.Array, jax.Array], jax.Array]
"""(float32[E, V] after all that changes the likeliest token, the draws, int32[E] purposes, int32[E] tokens drawn) ->
int32[E] tokens in their place, below 0 where there is none."""


@register_dataclass
@dataclass(frozen=True)
class Chosen:
    """The log-probabilities of the drawn tokens; zeros unless flagged."""

    logprob_E: jax.Array
    top_ids_EL: jax.Array
    """int32[E, n_top]: the most likely ids, best first."""
    top_logprobs_EL: jax.Array
    rank_E: jax.Array | None = None
    """int32: one more than the tokens of a greater logit; None: programs do not count it."""
    picked_EK: jax.Array | None = None
    """float32: log-probabilities of the ids that the row's request names; None with ``rank_E``."""


def sample(
    raw_EV: jax.Array,
    draws: Draws,
    slots: SlotState,
    flags: jax.Array,
    part: VocabPart = WHOLE,
    *,
    given_EV: jax.Array | None = None,
    own: Own | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Draw one token per row of logits.

    Args:
        given_EV: the logits to draw from, in which -inf forbids a token; by default ``raw_EV``.
        own: draws in place of the engine.

    Returns:
        int32[E] tokens and bool[E], False where ``raw_EV`` held NaN or infinity, everything was
        forbidden, or ``own`` drew nothing.
    """
    # Not by the largest and smallest: XLA:CPU's pass over a NaN among some hundred numbers.
    ok_E = part.all_finite(raw_EV)
    raw_EV = part.real(raw_EV if given_EV is None else given_EV)

    def greedy(raw_EV):
        return argmax(raw_EV, part), jnp.ones_like(ok_E)

    def full(raw_EV):
        return _chosen(raw_EV, draws, slots, flags, part=part, own=own)

    def guided(raw_EV):
        return _guided(raw_EV, draws, slots, flags, part, own)

    plain, other = (flags & ~LOGPROBS) == 0, full
    if draws.mask_EW is not None:
        # In steps where no row asked for a mask, which may run the same program (``Ladder.of``), all bits are ones.
        plain, other = plain & jnp.all(draws.mask_EW == -1), guided
    if own is None:
        token_E, allowed_E = jax.lax.cond(plain, greedy, other, raw_EV)
    else:
        token_E, allowed_E = other(raw_EV)
        allowed_E &= token_E >= 0
    return token_E, ok_E & allowed_E


def _chosen(
    raw_EV: jax.Array,
    draws: Draws,
    slots: SlotState,
    flags: jax.Array,
    purpose: Purpose = PURPOSE_TOKEN,
    part: VocabPart = WHOLE,
    own: Own | None = None,
) -> tuple[jax.Array, jax.Array]:
    """int32[E] tokens and bool[E], False where everything was forbidden or ``own`` drew nothing."""

    def adjusted(raw_EV):
        return adjust(raw_EV, draws, slots, flags, part)

    def greedy(raw_EV):
        logits_EV = adjusted(raw_EV)
        return argmax(logits_EV, part), part.max(jnp.max(logits_EV, axis=-1)) > _NEG

    def random(raw_EV):
        # Both branches compute what they give: one that gave its operand back would copy it.
        scaled_EV, allowed_E = jax.lax.cond(
            flags & CHANGES,
            lambda x: scaled(adjusted(x), draws, part),
            lambda x: scaled(x, draws, part),
            raw_EV,
        )
        return draw(scaled_EV, draws, flags, purpose, part), allowed_E

    token_E, allowed_E = jax.lax.cond(flags & RANDOM, random, greedy, raw_EV)
    if own is None:
        return token_E, allowed_E
    purpose_E = jnp.full_like(token_E, purpose) + PURPOSE_OWN
    token_E = own(adjusted(raw_EV), draws, purpose_E, token_E)
    return token_E, allowed_E & (token_E >= 0)


def _guided(
    raw_EV: jax.Array,
    draws: Draws,
    slots: SlotState,
    flags: jax.Array,
    part: VocabPart,
    own: Own | None,
) -> tuple[jax.Array, jax.Array]:
    """As ``_chosen``, of which a row with ``redraw_E`` gets its own only where the mask forbids its
    first, unmasked draw."""
    mask_EW = draws.mask_EW
    assert mask_EW is not None, "a program with masks"
    redraw_E = jnp.full(len(mask_EW), NONE) if draws.redraw_E is None else draws.redraw_E
    redraws_E = redraw_E != NONE
    less_EW, unmasked = without_token(mask_EW, redraw_E), replace(draws, mask_EW=None)

    # A loop rather than two calls, so that the draw is compiled once.
    def drawn(i: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """With the masks, then without for rows with ``redraw_E``: their first draw, which stays if it is allowed."""
        first = i > 0
        given_EV = masked(raw_EV, jnp.where(first, -1, less_EW), part)
        purpose_E = jnp.where(redraws_E & ~first, PURPOSE_REDRAW, PURPOSE_TOKEN)
        token_E, allowed_E = _chosen(given_EV, unmasked, slots, flags, purpose_E, part, own)
        stays_E = in_mask(mask_EW, jnp.maximum(token_E, 0))
        if own is not None:
            stays_E |= token_E < 0
        stays_E &= redraws_E
        kept_E = jnp.where(stays_E, token_E, found[0])
        return jnp.where(first, kept_E, token_E), jnp.where(first, found[1] | stays_E, allowed_E)

    none = jnp.zeros_like(redraw_E), jnp.zeros_like(redraws_E)
    return jax.lax.fori_loop(0, 1 + jnp.any(redraws_E).astype(jnp.int32), drawn, none)


def argmax(x_EV: jax.Array, part: VocabPart = WHOLE) -> jax.Array:
    """int32[E], the lowest id of the maximum; one pass over V (XLA:CPU's own argmax is 20 times
    slower)."""
    x_ENB = _blocks(x_EV, _NEG)
    best_EN = jnp.max(x_ENB, axis=2)
    block_E = jnp.argmax(best_EN, axis=1)
    x_EB = _pick(x_ENB, block_E)
    column_E = (block_E * x_ENB.shape[2] + jnp.argmax(x_EB, axis=1)).astype(jnp.int32)
    return part.best(jnp.max(best_EN, axis=1), column_E, x_EV.shape[1])


def logprobs(
    raw_EV: jax.Array,
    token_E: jax.Array,
    flags: jax.Array,
    pick_EK: jax.Array | None = None,
    *,
    n_top: int = MAX_LOGPROBS,
    part: VocabPart = WHOLE,
) -> Chosen:
    """Log-probabilities of the tokens, of the ``n_top`` most likely ids and of the ids ``pick_EK``."""
    E, n = raw_EV.shape[0], min(n_top, part.n_ids(raw_EV))
    raw_EV = part.real(raw_EV)

    def some(raw_EV):
        lse_E = part.logsumexp(raw_EV)
        top_EL, ids_EL = part.largest_ids(raw_EV, n)
        pad = ((0, 0), (0, n_top - n))
        chosen_E = part.at(raw_EV, token_E[:, None])[:, 0]
        found = Chosen(
            logprob_E=chosen_E - lse_E,
            top_ids_EL=jnp.pad(ids_EL, pad),
            top_logprobs_EL=jnp.pad(top_EL - lse_E[:, None], pad, constant_values=_NEG),
        )
        if pick_EK is None:
            return found
        picked_EK = part.at(raw_EV, pick_EK) - lse_E[:, None]
        rank_E = ranks(raw_EV, chosen_E, part)
        return replace(found, rank_E=rank_E, picked_EK=picked_EK)

    def none(raw_EV):
        ids_EL = jnp.zeros((E, n_top), jnp.int32)
        found = Chosen(jnp.zeros(E), ids_EL, jnp.zeros((E, n_top)))
        if pick_EK is None:
            return found
        zeros = jnp.zeros(E, jnp.int32), jnp.zeros(pick_EK.shape)
        return replace(found, rank_E=zeros[0], picked_EK=zeros[1])

    return jax.lax.cond(flags & LOGPROBS, some, none, raw_EV)


def processed(
    raw_EV: jax.Array,
    draws: Draws,
    slots: SlotState,
    flags: jax.Array,
    part: VocabPart = WHOLE,
) -> jax.Array:
    """float32[E, V]: the logits of which the draw is the softmax, with -inf for what cannot be drawn: after masks,
    biases, bad words and penalties, and unless the row is greedy after temperature and truncation. Of a row with
    ``redraw_E`` those of the second draw. ``raw_EV`` unless log-probabilities are flagged."""

    def of(raw_EV):
        logits_EV = adjust(part.real(raw_EV), draws, slots, flags, part)
        scaled_EV, _ = scaled(logits_EV, draws, part)
        greedy_E1 = is_greedy(draws.temperature_E)[:, None]
        return jnp.where(greedy_E1, scaled_EV, truncated(scaled_EV, draws, flags, part))

    return jax.lax.cond(flags & LOGPROBS, of, lambda x: x, raw_EV)


def ranks(raw_EV: jax.Array, chosen_E: jax.Array, part: VocabPart = WHOLE) -> jax.Array:
    """int32[E]: the rank of a token with the logit ``chosen_E``; 1 for the most likely one."""
    greater_EV = part.real(raw_EV) > chosen_E[:, None]
    return 1 + part.sum(jnp.sum(greater_EV, axis=1, dtype=jnp.int32))


def scaled(
    logits_EV: jax.Array, draws: Draws, part: VocabPart = WHOLE
) -> tuple[jax.Array, jax.Array]:
    """float32[E, V]: logits over temperature (of greedy rows: over 1), 0 for the likeliest; and bool[E], False
    where every token is forbidden."""
    temperature_E = jnp.where(is_greedy(draws.temperature_E), 1.0, draws.temperature_E)
    top_E1 = part.max(jnp.max(logits_EV, axis=-1, keepdims=True))
    allowed_E = top_E1[:, 0] > _NEG
    top_E1 = jnp.maximum(top_E1, jnp.finfo(jnp.float32).min)
    return (logits_EV - top_E1) / temperature_E[:, None], allowed_E


def draw(
    scaled_EV: jax.Array,
    draws: Draws,
    flags: jax.Array,
    purpose: Purpose = PURPOSE_TOKEN,
    part: VocabPart = WHOLE,
) -> jax.Array:
    """int32[E]: a token of each row's truncated distribution; of a greedy row the likeliest."""
    V = scaled_EV.shape[1]
    noise_EV = gumbel(draws.seed_E2, draws.pos_E, V, purpose, part.first(V))
    noisy_EV = truncated(scaled_EV, draws, flags, part) + noise_EV
    return argmax(jnp.where(is_greedy(draws.temperature_E)[:, None], scaled_EV, noisy_EV), part)


def truncated(
    scaled_EV: jax.Array, draws: Draws, flags: jax.Array, part: VocabPart = WHOLE
) -> jax.Array:
    """float32[E, V]: what ``scaled`` gives, of which the draw is the softmax, with -inf for a token that was cut."""
    floor_E = jax.lax.cond(
        flags & TRUNCATE,
        lambda x: threshold(x, draws, part),
        lambda x: jnp.full(x.shape[:1], _NEG),
        scaled_EV,
    )
    return jnp.where(scaled_EV >= floor_E[:, None], scaled_EV, _NEG)


def threshold(scaled_EV: jax.Array, draws: Draws, part: VocabPart = WHOLE) -> jax.Array:
    """float32[E]: min_p, then top_k of what is left, then top_p of that, as one lower bound on
    logits.

    Args:
        scaled_EV: logits over temperature, shifted so that the largest of a row is 0.
    """
    V = part.n_ids(scaled_EV)
    n = min(PREFILTER, V)
    weight_EV = jnp.exp(scaled_EV)
    best_En, n_sure_E = part.largest(scaled_EV, n)
    k_E = jnp.where((draws.top_k_E <= 0) | (draws.top_k_E > V), V, draws.top_k_E)
    floor_E = jnp.where(draws.min_p_E > 0, jnp.log(draws.min_p_E), _NEG)
    kth_E = jnp.take_along_axis(best_En, jnp.minimum(k_E, n)[:, None] - 1, axis=1)[:, 0]
    wide_E = (k_E < V) & (k_E > n_sure_E)
    k_float_E, ones_EV = k_E.astype(jnp.float32), jnp.ones_like(weight_EV)
    kth_E = _search(scaled_EV, ones_EV, k_float_E, kth_E, wide_E, part)
    floor_E = jnp.maximum(floor_E, jnp.where(k_E < V, kth_E, _NEG))

    kept_EV = jnp.where(scaled_EV >= floor_E[:, None], weight_EV, 0.0)
    total_E = part.sum(jnp.sum(kept_EV, axis=1))
    want_E = draws.top_p_E * total_E
    mass_En = _cumulative(jnp.where(best_En >= floor_E[:, None], jnp.exp(best_En), 0.0))
    at_E = jnp.sum((mass_En < want_E[:, None]).astype(jnp.int32), axis=1)
    edge_E = jnp.take_along_axis(best_En, jnp.minimum(at_E, n - 1)[:, None], axis=1)[:, 0]
    cuts_E = (draws.top_p_E < 1.0) & ~is_greedy(draws.temperature_E)
    # Not best_En[:, -1]: a second slice of the sort that top_k lowers to keeps it a full sort.
    sure_En = jnp.arange(n, dtype=jnp.int32) < n_sure_E[:, None]
    least_E = jnp.min(jnp.where(sure_En, best_En, jnp.inf), axis=1)
    wide_E = cuts_E & (at_E >= n_sure_E) & (least_E > floor_E)
    edge_E = _search(scaled_EV, weight_EV, want_E, edge_E, wide_E, part)
    return jnp.where(cuts_E, jnp.maximum(floor_E, edge_E), floor_E)


def _search(
    x_EV: jax.Array,
    weight_EV: jax.Array,
    want_E: jax.Array,
    known_E: jax.Array,
    wide_E: jax.Array,
    part: VocabPart,
) -> jax.Array:
    """The largest t whose ``sum(weight[x >= t])`` reaches ``want``, for rows in ``wide_E``; else
    ``known_E``.

    ``x <= 0``, so the bits of ``-x`` order like the values and 31 halvings are exact.
    """
    if part.n_ids(x_EV) <= PREFILTER:
        return known_E
    last = jax.lax.bitcast_convert_type(jnp.float32(jnp.inf), jnp.int32)

    def halve(bits_EV, bounds):
        low_E, high_E = bounds
        mid_E = low_E + (high_E - low_E) // 2
        sum_E = part.sum(jnp.sum(jnp.where(bits_EV <= mid_E[:, None], weight_EV, 0.0), axis=1))
        enough_E = sum_E >= want_E
        return jnp.where(enough_E, low_E, mid_E + 1), jnp.where(enough_E, mid_E, high_E)

    def search(x_EV):
        bits_EV = jax.lax.bitcast_convert_type(jnp.abs(x_EV), jnp.int32)
        bounds = jnp.zeros_like(wide_E, jnp.int32), jnp.where(wide_E, last, 0)
        _, high_E = jax.lax.while_loop(
            lambda b: jnp.any(b[0] < b[1]), lambda b: halve(bits_EV, b), bounds
        )
        return jnp.where(wide_E, -jax.lax.bitcast_convert_type(high_E, jnp.float32), known_E)

    return jax.lax.cond(jnp.any(wide_E), search, lambda _: known_E, x_EV)


def _cumulative(x_EN: jax.Array) -> jax.Array:
    """Running sums along N, as one small product (a scan costs a dozen device operations)."""
    n = x_EN.shape[1]
    upto_NN = jnp.tril(jnp.ones((n, n), jnp.float32))
    return jax.lax.dot_general(
        x_EN, upto_NN, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
    )


def _block_size(V: int) -> int:
    size = 32
    while size * size < V:
        size *= 2
    return size


def _blocks(x_EV: jax.Array, fill: float) -> jax.Array:
    E, V = x_EV.shape
    size = _block_size(V)
    x_EV = jnp.pad(x_EV, ((0, 0), (0, -V % size)), constant_values=fill)
    return x_EV.reshape(E, -1, size)


def _pick(x_ENB: jax.Array, block_E: jax.Array) -> jax.Array:
    return x_ENB[jnp.arange(x_ENB.shape[0]), block_E]


def is_greedy(temperature_E: jax.Array) -> jax.Array:
    """bool[E]: rows that take the likeliest token."""
    return temperature_E < GREEDY_TEMPERATURE
