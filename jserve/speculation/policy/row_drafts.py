"""Defines the values that the parts of speculation exchange: drafts of a row, load of a step, acceptance of a
sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from jserve.speculation.policy.acceptance import Acceptance, Shadow
from jserve.types import Sequence

GRAMMAR, DEVICE = "grammar", "device"


@dataclass(slots=True)
class RowDrafts:
    """The drafts that one row tries."""

    ids: Seq[int] = ()
    source: str = ""

    def cut(self, most: int) -> RowDrafts:
        """At most ``most`` of them."""
        return self if most >= len(self.ids) else RowDrafts(self.ids[: max(0, most)], self.source)


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The load of the planned step beside its decode rows."""

    n_context: int
    behind: bool
    """True when no step is in flight: the host's time is not hidden."""
    entering: Seq[Sequence] = ()
    """Sequences whose prompts the step may compute, in part or whole: they will decode soon."""


@dataclass(slots=True, eq=False)
class SequenceAcceptance:
    """The measured acceptance of one sequence."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    shadow: Shadow = field(default_factory=Shadow)
    left: int = 0
    """Drafts that the device holds for it."""


def room(seq: Sequence, most: int) -> int:
    """Drafts, up to ``most``, for which the length of ``seq`` leaves room."""
    return max(0, min(most, seq.max_len - len(seq.tokens) - seq.in_flight - 1))


def may_hold(seq: Sequence) -> bool:
    """True for one that may use drafts of the device. A guide's masks follow the drafts' ids, which only the
    device knows."""
    return seq.request.speculative and seq.guide is None
