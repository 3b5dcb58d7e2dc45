"""Compares two models on the same tokens: divergence, agreement, perplexity, with 95 % intervals.

It owns the arithmetic alone, in numpy. Both models give their most likely ids; the ids that both name count one by one,
and all else together, so a divergence is a lower bound of the true one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000
ROWS = 64
"""Tokens that are compared at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What one model says of n tokens, each after those before it."""

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


def compared(reference: Scores, model: Scores, n_vocab: int) -> Compared:
    """``model`` beside ``reference``; both of the same tokens."""
    n = len(reference.logprob_n)
    kl = [
        _divergence(
            *(x[i : i + ROWS] for x in (reference.ids_nK, reference.top_nK)),
            *(x[i : i + ROWS] for x in (model.ids_nK, model.top_nK)),
            n_vocab,
        )
        for i in range(0, n, ROWS)
    ]
    return Compared(
        kl_n=np.concatenate(kl) if kl else np.zeros(0),
        same_n=reference.ids_nK[:, 0] == model.ids_nK[:, 0],
        worse_n=reference.logprob_n.astype(np.float64) - model.logprob_n,
    )


def _divergence(
    p_ids: np.ndarray, p_top: np.ndarray, q_ids: np.ndarray, q_top: np.ndarray, n_vocab: int
) -> np.ndarray:
    """float64[n]: KL(p || q) over the ids that both name, and the rest as one."""
    rows = np.arange(len(p_ids))[:, None]
    q_nV = np.full((len(p_ids), n_vocab), np.nan)
    q_nV[rows, np.where(np.isfinite(q_top), q_ids, q_ids[:, :1])] = np.where(
        np.isfinite(q_top), q_top, q_top[:, :1]
    )
    log_p, log_q = p_top.astype(np.float64), q_nV[rows, p_ids]
    both = np.isfinite(log_p) & np.isfinite(log_q)
    p = np.where(both, np.exp(log_p), 0.0)
    q = np.where(both, np.exp(log_q), 0.0)
    within = np.sum(p * np.where(both, log_p - log_q, 0.0), axis=1)
    p_rest, q_rest = (np.clip(1.0 - x.sum(axis=1), 0.0, 1.0) for x in (p, q))
    seen = (p_rest > 1e-6) & (q_rest > 0)
    rest = p_rest * np.log(np.where(seen, p_rest, 1.0) / np.where(seen, q_rest, 1.0))
    return np.maximum(within + rest, 0.0)


def metrics(found: Compared, text_n: np.ndarray) -> dict[str, Metric]:
    """The figures over all tokens; intervals by bootstrap over whole texts.

    Args:
        text_n: int, the number of the text that each token belongs to, from 0 on, in order.
    """
    starts = np.flatnonzero(np.diff(text_n, prepend=-1))
    ends = np.append(starts[1:], len(text_n))
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(starts), (RESAMPLES, len(starts)))
    samples = [np.concatenate([np.arange(starts[i], ends[i]) for i in row]) for row in picks]

    def of(values_n: np.ndarray, how: object) -> Metric:
        assert callable(how)
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
