"""Prices requests in device seconds of a full engine, from which follows how many engines a load needs.

A request costs its share of the steps of an engine that has as many of its kind as fit, where each ends as another one
comes::

    rows = KV tokens of the pool / (new prompt tokens + output tokens), at most those of a step
    s = n_out / rows        steps that are its own
    n_new / s               prompt tokens that come with each of them; where that is more than a step takes, the
                            prompts fill all steps and fewer rows decode

An engine that takes requests of more than one such second a second cannot keep up. Drafts that are accepted make it
faster than that.
"""

from __future__ import annotations

from jserve.ports import StepCosts
from jserve.sched.admission.forecast import Lengths
from jserve.types import Finish, Lane, Sequence

FIRST_GUESS = 128
"""Output tokens of a sequence where none has ended yet."""
FADES = 0.9
"""The weight of earlier admissions in ``Demand.new_share`` that each one leaves."""


class Demand:
    """Counts the work of sequences that were admitted.

    Args:
        costs: of steps.
        lengths: of answers.
        max_rows: that decode in one step.
        chunk: prefill tokens of a step at most.
        kv_tokens: that the pool holds.

    Attributes:
        offered_s: seconds since the start, without what the prefix cache saves; never falls.
        saved_s: seconds that it saves.
    """

    def __init__(
        self, costs: StepCosts, lengths: Lengths, *, max_rows: int, chunk: int, kv_tokens: int
    ) -> None:
        self._costs, self._lengths = costs, lengths
        self._max_rows, self._chunk, self._kv_tokens = max_rows, chunk, kv_tokens
        self.offered_s = self.saved_s = 0.0
        self._counted: dict[tuple[str, int], tuple[int, int, float]] = {}
        """(tokens at admission, new ones of them, seconds counted) of those that have not ended."""
        self._n_new = self._n_known = 0.0
        """Tokens of the sequences admitted of late, those to compute and all; ``FADES`` with each one."""
        self._too_much_s = 0.0
        """Counted for answers that ended early; comes off what follows."""

    def add(self, seq: Sequence, n_cached: int) -> None:
        """Count a sequence that was admitted: its tokens, of which the cache has ``n_cached``, and those that its
        answer is expected to have."""
        n_known = len(seq.tokens)
        n_out = self._lengths.expected(seq.request.lane, seq.max_len - n_known, FIRST_GUESS)
        seconds = self.price(n_known - n_cached, n_out, n_known + n_out)
        self._counted[seq.request.id, seq.index] = n_known, n_known - n_cached, seconds
        self._n_new = FADES * self._n_new + n_known - n_cached
        self._n_known = FADES * self._n_known + n_known
        self._count(seconds)
        if n_cached:
            self.saved_s += max(0.0, self.price(n_known, n_out, n_known + n_out) - seconds)

    def forget(self, seq: Sequence) -> None:
        """It has ended: what it had takes the place of what was expected. One that was cancelled while it waited had
        nothing; perhaps another engine has it."""
        n_known, n_new, seconds = self._counted.pop((seq.request.id, seq.index))
        n = len(seq.tokens)
        waited = seq.finish is Finish.ABORT and seq.charged is None
        self._count((0.0 if waited else self.price(n_new, n - n_known, n)) - seconds)

    def _count(self, seconds: float) -> None:
        owed = seconds - self._too_much_s
        self.offered_s += max(0.0, owed)
        self._too_much_s = max(0.0, -owed)

    @property
    def new_share(self) -> float:
        """Of the tokens of sequences admitted of late, those that had to be computed; 1.0 before the first."""
        return self._n_new / self._n_known if self._n_known else 1.0

    def waiting_s(self, n: float, n_tokens: float, lane: Lane) -> float:
        """Device seconds of ``n`` sequences of ``lane`` that wait with ``n_tokens`` in all, of which the cache is taken
        to have as large a part as of late."""
        if not n:
            return 0.0
        n_known = round(n_tokens / n)
        n_out = self._lengths.expected(lane, self._kv_tokens, FIRST_GUESS)
        return n * self.price(round(n_known * self.new_share), n_out, n_known + n_out)

    def token_s(self, n_context: int) -> float:
        """Device seconds of one token of an answer that ends with ``n_context`` tokens, if all are so long."""
        n = max(1, n_context)
        return self.price(0, n, n) / n

    def price(self, n_new: int, n_out: int, n_context: int) -> float:
        """Device seconds of a sequence, the longest of whose steps reads ``n_context`` tokens."""
        seconds, chunk = self._costs.seconds, self._chunk
        rows = max(1, min(self._max_rows, self._kv_tokens // max(1, n_new + n_out)))
        own = n_out / rows
        if n_new > own * chunk:
            beside = round(chunk * n_out / n_new)
            return n_new / chunk * seconds(beside, chunk, n_context)
        per_step = min(n_new, chunk)
        with_prefill = n_new / per_step if n_new else 0.0
        if with_prefill > own:
            return own * seconds(rows, round(n_new / own), n_context)
        plain_s = seconds(rows, 0, n_context)
        return own * plain_s + with_prefill * (seconds(rows, per_step, n_context) - plain_s)

    def counters(self) -> dict[str, float]:
        return {"offered_seconds_total": self.offered_s, "saved_seconds_total": self.saved_s}
