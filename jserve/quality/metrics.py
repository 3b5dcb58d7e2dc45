"""Compares two models on the same tokens: divergence, agreement, perplexity, with 95 % intervals.

It owns the arithmetic alone, in numpy. Both models give their most likely ids, so a divergence is a lower bound of the
true one: what lies beyond both lists counts as one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 1000
ROWS = 64
"""Tokens that are compared at once."""
NOISE = 1e-6
"""Of a sum of probabilities in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """The scores that one model gives n tokens, each after those before it."""

    logprob_n: np.ndarray
    """float32: of the token itself."""
    ids_nK: np.ndarray
    """int32: the most likely ids, best first."""
    top_nK: np.ndarray
    """float32: their log-probabilities; -inf where there are fewer ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Two models on the same tokens, a value per token."""

    kl_n: np.ndarray
    """float64, nats."""
    same_n: np.ndarray
    """bool: the most likely id is the same."""
    worse_n: np.ndarray
    """float64, nats: by how much the token is less likely than under the reference."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A value and its 95 % interval; without one both ends are the value."""

    value: float
    low: float
    high: float


def compared(reference: TokenScores, model: TokenScores, n_vocab: int) -> Compared:
    """``model`` beside ``reference``; both of the same tokens."""
    n = len(reference.logprob_n)
    cuts = [slice(i, i + ROWS) for i in range(0, n, ROWS)]
    kl = [_divergence(_cut(reference, cut), _cut(model, cut), n_vocab) for cut in cuts]
    return Compared(
        kl_n=np.concatenate(kl) if kl else np.zeros(0),
        same_n=reference.ids_nK[:, 0] == model.ids_nK[:, 0],
        worse_n=reference.logprob_n.astype(np.float64) - model.logprob_n,
    )


def _cut(scores: TokenScores, cut: slice) -> tuple[np.ndarray, np.ndarray]:
    return scores.ids_nK[cut], scores.top_nK[cut]


def _divergence(
    reference: tuple[np.ndarray, np.ndarray], model: tuple[np.ndarray, np.ndarray], n_vocab: int
) -> np.ndarray:
    """float64[n]: at least KL(reference || model), exact but for what lies beyond both lists.

    An id that the model does not list is at most as likely as the last one that it lists; all ids that the reference
    does not list count as one. Infinite where the model gives no numbers.
    """
    (p_ids, p_top), (q_ids, q_top) = reference, model
    listed = np.isfinite(q_top)
    rows, n_listed = np.arange(len(q_ids))[:, None], np.maximum(listed.sum(axis=1), 1)
    last_n1 = q_top[rows, n_listed[:, None] - 1].astype(np.float64)
    q_nV = np.broadcast_to(last_n1, (len(q_ids), n_vocab)).copy()
    both_nV = np.zeros((len(q_ids), n_vocab), bool)
    q_nV[np.nonzero(listed)[0], q_ids[listed]] = q_top[listed]
    both_nV[np.nonzero(listed)[0], q_ids[listed]] = True
    known = np.isfinite(p_top)
    log_p, log_q = np.where(known, p_top, 0.0).astype(np.float64), q_nV[rows, p_ids]
    p = np.where(known, np.exp(log_p), 0.0)
    q = np.where(known & both_nV[rows, p_ids], np.exp(log_q), 0.0)
    within = np.sum(p * np.where(known, log_p - log_q, 0.0), axis=1)
    p_rest, q_rest = (np.clip(1.0 - x.sum(axis=1), 0.0, 1.0) for x in (p, q))
    counts = p_rest > NOISE
    rest = np.where(
        counts, p_rest * np.log(np.maximum(p_rest, NOISE) / np.maximum(q_rest, NOISE)), 0
    )
    return np.where(np.isfinite(within), np.maximum(within + rest, 0.0), np.inf)


def metrics(found: Compared, text_n: np.ndarray) -> dict[str, Metric]:
    """The figures over all tokens; intervals by bootstrap over whole texts.

    Args:
        text_n: int, the number of the text that each token belongs to, from 0 on, in order.
    """
    texts = np.split(np.arange(len(text_n)), np.flatnonzero(np.diff(text_n)) + 1)
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(texts), (RESAMPLES, len(texts)))
    samples = [np.concatenate([texts[i] for i in row]) for row in picks]

    def of(values_n: np.ndarray, how: Callable[[np.ndarray], Any]) -> Metric:
        drawn = [how(values_n[at]) for at in samples]
        low, high = np.percentile(drawn, [2.5, 97.5])
        return Metric(float(how(values_n)), float(low), float(high))

    return {
        "mean_kl": of(found.kl_n, np.mean),
        "p99_kl": of(found.kl_n, lambda x: np.percentile(x, 99)),
        "same_top": of(found.same_n, np.mean),
        "ln_ppl_ratio": of(found.worse_n, np.mean),
    }


def share(right: int, of_reference: int) -> Metric:
    """Right answers beside those of the reference."""
    value = right / of_reference
    return Metric(value, value, value)
