"""Chooses the drafts of a step from measured step times and acceptance, with hysteresis and probes.

All rows of a step share one program, so they share k, of a table by rows and acceptance (``--table`` of
``bench.speculation_control`` prints it): the k with the most tokens per second ::

    (1 + drafts expected to be accepted of k) / seconds(rows, k)

among those with which no row gets fewer than ``min_speed`` of the tokens per second that it gets without drafts. The
seconds are those of a step without prompts: a prompt takes as many steps whatever its neighbours draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

from jserve.speculation.policy.acceptance import Odds

CHEAP = 1.03
"""A drafter whose steps take less than this factor longer always runs: its KV stays current, its acceptance known."""
MARGIN, WIDER = 1.05, 1.1
"""A k above 0 has to be better than none by the first factor, and than fewer drafts by the second: answers end."""
HOLD = 16
"""Steps before drafting ends or begins again, over which the time that it takes to begin is spread."""
PROBE_EVERY, PROBE_RARELY, PROBE_STEPS = 100, 1600, 16
"""Steps without drafts after which some are tried beside the next prompt, to see what is accepted; twice as many after
each such probe, up to the second number. A probe ends with the first step that verifies, or after PROBE_STEPS. If no
prompt comes for twice the second number, drafting begins as if it paid."""


def widths(max_drafts: int) -> tuple[int, ...]:
    """Tokens per row for which there are programs: 1, all drafts, and of 4 and 8 those well below."""
    most = 1 + max_drafts
    return (*(w for w in (1, 4, 8) if w == 1 < most or 3 * w < 2 * most), most)


def best_k(
    odds: Seq[Odds],
    options: Seq[int],
    depths: Seq[int],
    seconds: Callable[[int], float],
    min_speed: float,
) -> int:
    """Drafts of a step.

    Args:
        odds: of each row.
        options: numbers of drafts that there are programs for, ascending, 0 first.
        depths: drafts -> most of them that can be accepted (of a tree, its depth).
        seconds: drafts -> predicted seconds of a step.
        min_speed: least share of its speed without drafts that each row keeps.
    """
    if not any([one.offers for one in odds]):
        return 0
    plain = seconds(0)
    best, most = 0, 1.0 / plain
    for k in options[1:]:
        took, tokens_R = seconds(k), [1.0 + one.expected(depths[k]) for one in odds]
        rate = sum(tokens_R) / len(tokens_R) / took
        fair = min(tokens_R) * plain >= min_speed * took
        better = rate > (WIDER if best else MARGIN) * most
        if (fair and better) or (not best and took < CHEAP * plain):
            best, most = k, rate
    return best


class Hysteresis:
    """The k that is used where only verified drafts show what is accepted: drafting begins or ends once in HOLD steps
    at most, and while it is off ``probe`` drafts are tried now and then."""

    def __init__(self, probe: int) -> None:
        self.k, self.probe = 0, probe
        self._held, self._off = HOLD, PROBE_EVERY
        """Steps since drafting began or ended, and since the last draft (enough to probe at once)."""
        self._every, self._left = PROBE_EVERY // 2, 0
        """Steps between two probes, doubled by each, and those that a probe has left."""

    def step(self, wanted: int, *, new: bool) -> int:
        """Drafts of the next step, where ``wanted`` are best. ``new``: a probe may begin."""
        self._held += 1
        if self._off >= 2 * PROBE_RARELY:
            wanted = wanted or self.probe
        if bool(wanted) == bool(self.k):
            self.k = wanted  # more or fewer cost nothing to begin
        elif self._held >= HOLD:
            self.k, self._held = wanted, 0
        if self.k:
            self._off, self._left, self._every = 0, 0, PROBE_EVERY
            return self.k
        self._off, self._left = self._off + 1, max(0, self._left - 1)
        if new and self._off >= self._every:
            self._off, self._left = 0, PROBE_STEPS
            self._every = min(2 * self._every, PROBE_RARELY)
        return self.probe if self._left else 0

    def seen(self) -> None:
        """A step that shows what is accepted is planned."""
        self._left = 0
