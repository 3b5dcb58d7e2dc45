"""What a commit says: one output for every row that moved its sequence, one end for every sequence.

Owns what happens to a live sequence when its tokens come or when it is over. Must not know plans, budgets or
queues; counters that a row moves were settled before (``Scheduler.commit``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jserve.ports import Verdict
from jserve.sched import constraints, outcome
from jserve.sched.guided import obey
from jserve.types import Finish, Output, Sequence, StepResult

if TYPE_CHECKING:
    from jserve.sched.scheduler import Scheduler

NON_FINITE = "the model gave logits that are not finite"
NON_FINITE_CODE, GRAMMAR_FAILED = "nonfinite_logits", "grammar_failed"


def advance(
    sched: Scheduler,
    seq: Sequence,
    drawn: list[int],
    result: StepResult,
    row: int,
    n_drafts: int,
    now: float,
) -> Output:
    """Append what was drawn, publish the pages it proved sound, end what is over."""
    request, n_prompt = seq.request, seq.n_prompt
    first = len(seq.tokens) == n_prompt
    n_drawn, verdict = len(drawn), None
    if seq.guide is not None:
        verdict = _ask(sched, seq, drawn)
        if verdict.error is not None:
            return _end_failed(sched, seq, verdict, now)
        drawn = [*drawn, *verdict.forced]
    drawn = outcome.accept(seq, drawn)
    # The logits were finite, so the KV of everything before the last drawn token is sound.
    n_forced = len(drawn) - n_drawn
    n_sound = len(seq.tokens) - (1 + n_forced if n_forced > 0 else 1) if drawn else n_prompt
    n_accepted = min(n_drawn - 1, len(drawn)) if n_drafts else 0
    if verdict is not None:
        obey(seq, verdict)
    lease = seq.lease
    if lease is not None and (n_sound >= lease.next_full or request.cache is not None):
        publish(sched, seq, n_sound)
    sched.drafting.took(seq, drawn)
    if not first and seq.finish is None and request.params.logprobs is None:
        return Output(
            request_id=request.id,
            index=seq.index,
            token_ids=tuple(drawn),
            n_cached=seq.n_cached,
            n_drafted=n_drafts,
            n_accepted=n_accepted,
        )
    scores = sched.scores.take(seq) if first else None
    logprobs = None
    if request.params.logprobs is not None:
        logprobs = outcome.logprobs_of(seq, result, row, len(drawn))
    if seq.finish is not None:
        retire(sched, seq, now)
    return Output(
        request_id=request.id,
        index=seq.index,
        n_drafted=n_drafts,
        n_accepted=n_accepted,
        token_ids=tuple(drawn),
        logprobs=logprobs,
        prompt_logprobs=scores,
        finish=seq.finish,
        stop_reason=seq.stop_reason,
        n_cached=seq.n_cached,
        seed=seq.seed if first else None,
    )


def plain(seq: Sequence, token: int) -> Output | None:
    """What ``advance`` does with the one token of a row that read its slot, in the middle of a sequence:
    most rows are that, in every step. None, with nothing changed, where there is more to it."""
    tokens, request, lease = seq.tokens, seq.request, seq.lease
    n_sound = len(tokens)
    middle = n_sound < seq.max_len - 1 and token not in seq.stop_ids
    # Without a lease it is over or gave way.
    if not middle or lease is None or n_sound >= lease.next_full:
        return None
    if seq.guide is not None or request.cache is not None or request.params.logprobs is not None:
        return None
    tokens.append(token)
    return Output(request_id=request.id, index=seq.index, token_ids=(token,), n_cached=seq.n_cached)


def publish(sched: Scheduler, seq: Sequence, n_sound: int) -> None:
    """Let others find the full pages of the first ``n_sound`` tokens, whose logits were finite."""
    lease = seq.lease
    if lease is not None and n_sound // sched.limits.page_size > lease.n_published:
        sched.floor.cache.publish(lease, seq.tokens, n_sound)
        sched.floor.slide(seq, n_sound)
    if seq.request.cache is not None:
        sched.floor.keeping.settle(seq.request, lease)


def _ask(sched: Scheduler, seq: Sequence, drawn: list[int]) -> Verdict:
    assert seq.guide is not None
    try:
        verdict = seq.guide.take(drawn)
    except Exception as error:  # a fault of its guide ends this sequence, not the engine
        verdict = Verdict(error=f"the guide failed with {type(error).__name__}")
    _note(sched, seq, verdict)
    return verdict


def _note(sched: Scheduler, seq: Sequence, verdict: Verdict) -> None:
    if sched.journal is not None:
        sched.journal.guided(seq.request.id, seq.index, verdict)


def end_unsound(sched: Scheduler, seq: Sequence, drawn: list[int], now: float) -> Output:
    """End a sequence from which nothing could be drawn at, or behind, some of ``drawn``."""
    verdict = None if seq.guide is None else seq.guide.fault
    if verdict is None:
        own = constraints.excluded(seq, drawn[:-1], sched.limits.vocab_size)
        if own is None:
            sched.n_unsound += 1
            return end(sched, seq, Finish.ERROR, now, NON_FINITE, NON_FINITE_CODE)
        verdict = Verdict(error=own.message, code=own.code, field=own.field)
    if seq.guide is not None:
        _note(sched, seq, verdict)
    return _end_failed(sched, seq, verdict, now)


def _end_failed(sched: Scheduler, seq: Sequence, verdict: Verdict, now: float) -> Output:
    code = verdict.code or GRAMMAR_FAILED
    return end(sched, seq, Finish.ERROR, now, verdict.error, code, verdict.field)


def end(
    sched: Scheduler,
    seq: Sequence,
    finish: Finish,
    now: float,
    error: str | None = None,
    code: str | None = None,
    field: str | None = None,
) -> Output:
    """End ``seq`` from outside; its unpublished pages are forgotten."""
    seq.finish = finish
    retire(sched, seq, now)
    return Output(
        request_id=seq.request.id,
        index=seq.index,
        finish=finish,
        error=error,
        error_code=code,
        error_field=field,
        n_cached=seq.n_cached,
        seed=seq.seed if seq.n_output == 0 else None,
    )


def retire(sched: Scheduler, seq: Sequence, now: float) -> None:
    if seq.charged is not None:
        sched.gate.gaps.ended(now)
    if seq.finish in (Finish.STOP, Finish.LENGTH):
        sched.floor.lengths.ended(seq)
    sched.floor.leave(seq)
    sched.floor.keeping.abandon(seq.request)
    sched.leaders.forget(seq)
    sched.fetching.forget(seq)
    sched.drafting.forget(seq)
    sched.scores.drop(seq)
    sched.deadlines.forget(seq)
    sched.counts[seq.request.lane].ended(seq)
    if all(s.finish is not None for s in sched.groups[seq.request.id]):
        del sched.groups[seq.request.id]
