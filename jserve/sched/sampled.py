"""Appends sampled tokens to a sequence, checks stop conditions and collects log-probabilities.

The device bans stop ids before ``min_len``; the rule here is the same, so host and device agree on where a sequence
may end.
"""

from __future__ import annotations

from typing import Any

from jserve.types import Finish, Sequence, StepResult, TokenLogprob


def accept(seq: Sequence, drawn: list[int]) -> list[int]:
    """Append the drawn tokens that count and note the finish; gives those appended."""
    tokens = seq.tokens
    room = seq.max_len - len(tokens)
    if not seq.stop_ids.isdisjoint(drawn):
        drawn = _cut_at_stop(seq, drawn[:room])
    if len(drawn) >= room:
        drawn = drawn[:room]
        seq.finish = seq.finish or Finish.LENGTH
    tokens += drawn
    return drawn


def _cut_at_stop(seq: Sequence, drawn: list[int]) -> list[int]:
    for i, token in enumerate(drawn):
        if token in seq.stop_ids and len(seq.tokens) + i >= seq.min_len:
            seq.finish = Finish.STOP
            seq.stop_reason = _stop_reason(seq, token)
            return drawn[: i + 1]
    return drawn


def _stop_reason(seq: Sequence, token: int) -> int | None:
    """The id for a stop id of the request; None for the model's own EOS."""
    params = seq.request.params
    is_eos = token in seq.request.eos_ids and not params.ignore_eos
    return None if is_eos else token


def stop_ids(eos: tuple[int, ...], stops: tuple[int, ...], ignore_eos: bool) -> frozenset[int]:
    """Ids that end a sequence: those of its request, and the model's own unless they are ignored."""
    return frozenset(stops) if ignore_eos else frozenset((*eos, *stops))


def logprobs_of(
    seq: Sequence, result: StepResult, row: int, n: int
) -> tuple[TokenLogprob, ...] | None:
    """Log-probabilities of the last ``n`` tokens, drawn by ``row``; None when not asked for."""
    params = seq.request.params
    if not params.shows_logprobs or n == 0:
        return None
    picks = params.logprob_token_ids
    if picks is None:
        ids_JL, tops_JL = _top(result, row, n, params.logprobs or 0)
    else:
        ids_JL, tops_JL = [picks] * n, _picked(result, row, n, len(picks))
    ranks = [None] * n if result.rank_RJ is None else result.rank_RJ[row, :n].tolist()
    logprobs = result.logprob_RJ[row, :n].tolist()
    drawn = zip(seq.tokens[-n:], logprobs, ranks, ids_JL, tops_JL, strict=True)
    return tuple(
        TokenLogprob(
            token=token,
            logprob=logprob,
            rank=rank,
            top_ids=tuple(ids),
            top_logprobs=tuple(tops),
            named=picks is not None,
        )
        for token, logprob, rank, ids, tops in drawn
    )


def extra_of(
    seq: Sequence, result: StepResult, row: int, n: int
) -> dict[str, tuple[Any, ...]] | None:
    """The values that the step features of its request give the last ``n`` tokens, drawn by ``row``; None
    when it names none."""
    names = seq.request.params.extra_args
    if not names or n == 0:
        return None
    given = {name: result.extra.get(name, {}).get(row) for name in names}
    return {name: tuple(values[:n]) for name, values in given.items() if values is not None}


def _picked(result: StepResult, row: int, n: int, k: int) -> list:
    assert result.picked_RJK is not None, "log-probabilities of named ids did not come"
    return result.picked_RJK[row, :n, :k].tolist()


def _top(result: StepResult, row: int, n: int, k: int) -> tuple[list, list]:
    if k == 0:
        return [()] * n, [()] * n
    assert result.top_ids_RJL is not None, "top log-probabilities were asked for and did not come"
    assert result.top_logprobs_RJL is not None, "top ids came without their log-probabilities"
    return (
        result.top_ids_RJL[row, :n, :k].tolist(),
        result.top_logprobs_RJL[row, :n, :k].tolist(),
    )
