"""What sampling should do, in float64 numpy with full sorts: the oracle of the sampling tests."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from jserve.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a row has seen: prompt, output (drafts before the draw included), and its stop ids."""

    prompt: Seq[int]
    output: Seq[int]
    eos_ids: Seq[int] = ()
    mask: np.ndarray | None = None
    """bool[V] of the grammar."""


def adjusted(raw_V: np.ndarray, params: SamplingParams, context: Context) -> np.ndarray:
    """float64[V]: logits after everything that may change the greedy choice, in vLLM's order."""
    x = raw_V.astype(np.float64)
    if context.mask is not None:
        x[~context.mask] = -np.inf
    if params.allowed_token_ids is not None:
        keep = np.zeros(len(x), bool)
        keep[list(params.allowed_token_ids)] = True
        x[~keep] = -np.inf
    for word in params.bad_token_ids:
        before, last = list(word[:-1]), word[-1]
        if not before or list(context.output[-len(before) :]) == before:
            x[last] = -np.inf
    if len(context.output) < params.min_tokens:
        x[[*context.eos_ids, *params.stop_token_ids]] = -np.inf
    for token, bias in params.logit_bias.items():
        x[token] += -np.inf if bias <= -100 else bias
    seen = np.zeros(len(x), bool)
    seen[[*context.prompt, *context.output]] = True
    rep = params.repetition_penalty
    x[seen] = np.where(x[seen] > 0, x[seen] / rep, x[seen] * rep)
    counts = np.bincount(np.asarray(context.output, int), minlength=len(x))
    return x - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def distribution(logits_V: np.ndarray, params: SamplingParams) -> np.ndarray:
    """float64[V]: probabilities after temperature, min_p, top_k and top_p, ties at an edge all
    kept."""
    if params.greedy:
        return np.eye(len(logits_V))[int(np.argmax(logits_V))]
    p = np.exp((logits_V - logits_V.max()) / params.temperature)
    p = np.where(p >= params.min_p, p, 0.0)
    order = np.argsort(-p, kind="stable")
    if 0 < params.top_k < len(p):
        p = np.where(p >= p[order[params.top_k - 1]], p, 0.0)
    if params.top_p < 1.0:
        mass = np.cumsum(p[order])
        edge = order[min(int(np.searchsorted(mass, params.top_p * mass[-1])), len(p) - 1)]
        p = np.where(p >= p[edge], p, 0.0)
    return p / p.sum()
