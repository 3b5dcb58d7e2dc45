"""Computes which tokens a request's own constraints exclude, and which field leaves none.

It owns the host's account of what the device forbids (``model.sample``): a row from which nothing can be drawn is
either the fault of its request's constraints, which this module decides, or of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from jserve.errors import NothingAllowed
from jserve.sampling import BAN
from jserve.types import Request, Sequence


def check_static(request: Request, vocab: int) -> None:
    """Refuse constraints that leave no first token, whatever a grammar says.

    Raises:
        NothingAllowed: naming the fields.
    """
    if not _left(request, vocab, (), None):
        raise _nothing(request, 0, guided=False)


def excluded(seq: Sequence, drawn: Seq[int], vocab: int) -> NothingAllowed | None:
    """The reason why nothing could be drawn behind some first ones of ``drawn``, if the constraints of ``seq``
    say so; None: they left something."""
    mask_JW = None if seq.guide is None else seq.guide.mask(drawn)
    for j in range(len(drawn) + 1 if mask_JW is None else len(mask_JW)):
        output = [*seq.tokens[seq.n_prompt :], *drawn[:j]]
        mask_W = None if mask_JW is None else mask_JW[j]
        if not _left(seq.request, vocab, output, mask_W):
            return _nothing(seq.request, len(output), guided=mask_W is not None)
    return None


def _left(request: Request, vocab: int, output: Seq[int], mask_W: np.ndarray | None) -> bool:
    """True if anything may follow ``output``; ``mask_W``: int32 bits of what a guide allows."""
    params = request.params
    banned = {token for token, bias in params.logit_bias.items() if bias <= BAN}
    banned |= {word[-1] for word in params.bad_token_ids if _completes(word, output)}
    if len(output) < params.min_tokens:
        banned.update(request.eos_ids, params.stop_token_ids)
    allowed = params.allowed_token_ids
    ids: Seq[int] = range(vocab) if allowed is None else allowed
    if mask_W is not None:
        ids_N = np.array(ids, np.int64)
        ids = ids_N[mask_W[ids_N >> 5] >> (ids_N & 31) & 1 != 0].tolist()
    return any(token not in banned for token in ids)


def _completes(word: Seq[int], output: Seq[int]) -> bool:
    """True if one more token would complete ``word`` at the end."""
    n = len(word) - 1
    return n == 0 or tuple(output[-n:]) == tuple(word[:-1])


def _nothing(request: Request, n_drawn: int, *, guided: bool) -> NothingAllowed:
    params = request.params
    guide = "structured_outputs" if params.structured_outputs else "thinking_token_budget"
    in_force = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "logit_bias": any(bias <= BAN for bias in params.logit_bias.values()),
        "bad_words": bool(params.bad_token_ids),
        "min_tokens": n_drawn < params.min_tokens,
        guide: guided,
    }
    fields = [name for name, holds in in_force.items() if holds]
    verb = "leaves" if len(fields) == 1 else "together leave"
    return NothingAllowed(
        f"{' and '.join(fields)} {verb} no token that may be drawn", field=fields[0]
    )
