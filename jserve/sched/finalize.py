"""Applies sampled tokens to sequences, emits outputs and finishes sequences.

``Finalizer.advance`` is the one transition of a row: it rolls back unused bounds of the plan, appends sampled
tokens, publishes full pages whose logits were finite, and finishes sequences that ended.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence as Seq
from typing import Protocol

from jserve.errors import NothingAllowed, StepFeatureFailed
from jserve.ports import Journal, Verdict
from jserve.sched import sampled
from jserve.sched.admission import constraints
from jserve.sched.admission.estimate import FinishIntervals
from jserve.sched.guided import apply_verdict
from jserve.sched.prompt_scores import PromptScores, PromptValues
from jserve.sched.resources import Resources
from jserve.sched.stats import LaneCounts
from jserve.sched.versions import WeightVersions
from jserve.speculation.policy.controller import SpeculationController
from jserve.types import (
    NOTHING_LEFT,
    Finish,
    Lane,
    Output,
    RowPlan,
    Sequence,
    StepPlan,
    StepResult,
)

NON_FINITE = "the model gave logits that are not finite"
NON_FINITE_CODE, GRAMMAR_FAILED = "nonfinite_logits", "grammar_failed"


class PerSequenceState(Protocol):
    """A part that keeps state per sequence."""

    def forget(self, seq: Sequence) -> None:
        """``seq`` is over."""
        ...


class Finalizer:
    """Applies results to sequences, emits outputs, finishes sequences.

    Args:
        resources: queue, running sequences, and the cache that pages are published to.
        speculation: sees every token.
        scores: the log-probabilities of prompts, until they are sent.
        prompt_values: likewise what step features give their tokens.
        versions: of the weights that draw; outputs carry them.
        finish_intervals: records when an admitted sequence finishes.
        groups: the sequences of every live request; a request goes with the last of them.
        counts: finished sequences by lane.
        remember: parts with state per sequence, cleared when it finishes.
        vocab_size: token ids below it can be drawn.
        journal: records guides' verdicts.
    """

    def __init__(
        self,
        *,
        resources: Resources,
        speculation: SpeculationController,
        scores: PromptScores,
        prompt_values: PromptValues,
        versions: WeightVersions,
        finish_intervals: FinishIntervals,
        groups: MutableMapping[str, list[Sequence]],
        counts: Mapping[Lane, LaneCounts],
        remember: Seq[PerSequenceState],
        vocab_size: int,
        journal: Journal | None,
    ) -> None:
        self.resources, self.speculation = resources, speculation
        self.scores, self.prompt_values = scores, prompt_values
        self.finish_intervals = finish_intervals
        self.groups, self.counts, self.remember = groups, counts, remember
        self.vocab_size, self.journal = vocab_size, journal
        self.versions = versions
        self.n_nonfinite = 0
        """Counter: sequences that ended because their logits were not finite."""

    def advance(
        self, plan: StepPlan, seqs: Seq[Sequence], result: StepResult, now: float
    ) -> list[Output]:
        """Advance the sequence of every row of ``plan``; returns one output per row that advanced a live one."""
        outputs: list[Output] = []
        drafts, version = self.speculation.on, self.versions.version
        columns = (result.tokens_RJ.tolist(), result.n_ok_R.tolist(), result.finite_R.tolist())
        rows = zip(seqs, plan.rows, range(len(seqs)), *columns, strict=True)
        for seq, row, r, drawn, n_ok, finite in rows:
            most = row.count if row.from_slot else int(row.emits)
            seq.pending -= 1
            seq.in_flight -= most
            if n_ok != most:
                roll_back(seq, most - n_ok)
            if drafts and row.from_slot:
                self.speculation.drawn(row, seq, n_ok)
            if seq.finish is not None:
                continue  # over-run: it ended while this row was in flight
            n, lease = len(seq.tokens), seq.lease
            if (
                row.from_slot
                and not drafts
                and finite
                and seq.plain
                and seq.guide is None
                and lease is not None
                and n < lease.next_full
                and n < seq.max_len - 1
                and drawn[0] not in seq.stop_ids
            ):  # most rows of most steps: nothing but an append follows
                seq.tokens.append(drawn[0])
                outputs.append(
                    Output(
                        request_id=seq.request.id,
                        index=seq.index,
                        token_ids=(drawn[0],),
                        n_cached=seq.n_cached,
                        attempt=seq.request.attempt,
                        weights=self.versions.of(seq) if seq.old_weights else version,
                    )
                )
                continue
            output = self._settle(seq, row, r, drawn[:n_ok], finite, result, now)
            if output is not None:
                outputs.append(output)
        return outputs

    def _settle(
        self,
        seq: Sequence,
        row: RowPlan,
        r: int,
        drawn: list[int],
        finite: bool,
        result: StepResult,
        now: float,
    ) -> Output | None:
        """Apply row ``r`` to a live sequence: the general case."""
        if not finite:
            return self._end_nonfinite(seq, drawn, result.faults.get(r), now)
        if row.targets:
            self.scores.add(seq, result.prompt[r])
        for name in row.prompt_features:
            self.prompt_values.add(seq, name, row.start, result.prompt_extra[name][r])
        if row.emits:
            return self._take(seq, drawn, result, r, len(row.drafts), now)
        self._publish(seq, row.start + row.count)
        self.speculation.took(seq, ())
        return None

    def _take(
        self,
        seq: Sequence,
        drawn: list[int],
        result: StepResult,
        row: int,
        n_drafts: int,
        now: float,
    ) -> Output:
        """Append sampled tokens, publish verified pages, finish if stopped."""
        first = len(seq.tokens) == seq.n_prompt
        verdict = None if seq.guide is None else self._ask(seq, drawn)
        if verdict is not None and verdict.error is not None:
            return self._end_failed(seq, verdict, now)
        taken = sampled.accept(seq, drawn if verdict is None else [*drawn, *verdict.forced])
        if verdict is not None:
            apply_verdict(seq, verdict)
        # The logits were finite, so the KV of everything before the last drawn token is sound.
        n_behind = 1 + max(0, len(taken) - len(drawn)) if taken else 0
        n_sound, lease = len(seq.tokens) - n_behind, seq.lease
        if lease is not None and (n_sound >= lease.next_full or seq.request.cache is not None):
            self._publish(seq, n_sound)
        self.speculation.took(seq, taken)
        scores = self.scores.take(seq) if first else None
        prompt_extra = self.prompt_values.take(seq) if first else None
        logprobs = sampled.logprobs_of(seq, result, row, len(taken))
        extra = sampled.extra_of(seq, result, row, len(taken))
        if seq.finish is not None:
            self._retire(seq, now)
        return Output(
            request_id=seq.request.id,
            index=seq.index,
            n_drafted=n_drafts,
            n_accepted=min(len(drawn) - 1, len(taken)) if n_drafts else 0,
            token_ids=tuple(taken),
            logprobs=logprobs,
            extra=extra,
            prompt_logprobs=scores,
            prompt_extra=prompt_extra,
            finish=seq.finish,
            stop_reason=seq.stop_reason,
            n_cached=seq.n_cached,
            seed=seq.seed if first else None,
            attempt=seq.request.attempt,
            weights=self.versions.of(seq),
        )

    def _publish(self, seq: Sequence, n_sound: int) -> None:
        """Let others find the full pages of the first ``n_sound`` tokens, whose logits were finite."""
        lease = seq.lease
        if lease is not None and n_sound // self.resources.cache.page_size > lease.n_published:
            self.resources.cache.publish(lease, seq.tokens, n_sound)
            self.resources.export(seq)
            self.resources.slide(seq, n_sound)
        if seq.request.cache is not None:
            self.resources.retention.settle(seq.request, lease)

    def end(
        self,
        seq: Sequence,
        finish: Finish,
        now: float,
        error: str | None = None,
        code: str | None = None,
        field: str | None = None,
    ) -> Output:
        """End ``seq`` from outside; its unpublished pages are forgotten."""
        seq.finish = finish
        self._retire(seq, now)
        return Output(
            request_id=seq.request.id,
            index=seq.index,
            finish=finish,
            error=error,
            error_code=code,
            error_field=field,
            n_cached=seq.n_cached,
            seed=seq.seed if seq.n_output == 0 else None,
            attempt=seq.request.attempt,
            weights=self.versions.of(seq),
        )

    def _end_nonfinite(
        self, seq: Sequence, drawn: list[int], fault: tuple[str, str] | None, now: float
    ) -> Output:
        """End a sequence from which nothing could be drawn at, or behind, some of ``drawn``; ``fault``: the step
        feature that is to blame, and what it did."""
        verdict = None if seq.guide is None else seq.guide.fault
        if verdict is None:
            own = constraints.excluded(seq, drawn[:-1], self.vocab_size)
            if own is None and fault is not None:
                return self.end(seq, Finish.ERROR, now, *_of_feature(*fault))
            if own is None:
                self.n_nonfinite += 1
                return self.end(seq, Finish.ERROR, now, NON_FINITE, NON_FINITE_CODE)
            verdict = Verdict(error=own.message, code=own.code, field=own.field)
        if seq.guide is not None:
            self._note(seq, verdict)
        return self._end_failed(seq, verdict, now)

    def counters(self) -> dict[str, float]:
        """For /metrics."""
        return {"sequences_nonfinite_total": float(self.n_nonfinite)}

    def _retire(self, seq: Sequence, now: float) -> None:
        """Free everything that is kept for the finished ``seq``."""
        if seq.charged is not None:
            self.finish_intervals.ended(now)
        if seq.finish in (Finish.STOP, Finish.LENGTH):
            self.resources.lengths.ended(seq)
        self.resources.leave(seq)
        self.resources.retention.abandon(seq.request)
        for part in self.remember:
            part.forget(seq)
        self.counts[seq.request.lane].ended(seq)
        if all(s.finish is not None for s in self.groups[seq.request.id]):
            del self.groups[seq.request.id]

    def _ask(self, seq: Sequence, drawn: list[int]) -> Verdict:
        assert seq.guide is not None
        try:
            verdict = seq.guide.take(drawn)
        except Exception as error:  # a fault of its guide ends this sequence, not the engine
            verdict = Verdict(error=f"the guide failed with {type(error).__name__}")
        self._note(seq, verdict)
        return verdict

    def _note(self, seq: Sequence, verdict: Verdict) -> None:
        if self.journal is not None:
            self.journal.guided(seq.request.id, seq.index, verdict)

    def _end_failed(self, seq: Sequence, verdict: Verdict, now: float) -> Output:
        code = verdict.code or GRAMMAR_FAILED
        return self.end(seq, Finish.ERROR, now, verdict.error, code, verdict.field)


def _of_feature(name: str, what: str) -> tuple[str, str | None, str]:
    """Message, code and field: of a request that leaves nothing, or of a feature that is broken."""
    kind = NothingAllowed if what == NOTHING_LEFT else StepFeatureFailed
    return f"the step feature {name} {what}", kind.code, f"extra_args.{name}"


def roll_back(seq: Sequence, n: int) -> None:
    """``n`` tokens of a row's bound were not drawn."""
    # No sequence is readmitted with rows in flight, so a running sequence's row is of this admission.
    if seq.lease is not None:
        seq.scheduled -= n
