"""Tracks by token ids whether a sequence is inside its reasoning or its answer.

::

    BEFORE --open_id--> INSIDE --close_id or budget--> GAP --gap_ids--> ANSWER
     |  ^ |                                                               ^
     '--' '---------------------- any other token ------------------------'
    blank

White space before the opening tag is the thought's, as in ``text.parsers.reasoning``. Where a structured
answer follows it is the answer's: its grammar says whether it is allowed there. The gap is forced only
in front of a structured answer.

A structured answer waits for its thought only where the model begins one on its own: its grammar may
forbid what the model wants to say, and must not make it think instead.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum

from jserve.sampling import Thinking


def default_budget(most: int, tags: Thinking) -> int:
    """Tokens of a thought before a structured answer, where the request does not say: with its tags it
    leaves the answer half of ``most``, the output tokens that there may be."""
    return max(0, most // 2 - 1 - len(tags.end_ids[tags.n_lead :]))


class Phase(Enum):
    BEFORE = "before"
    INSIDE = "inside"
    GAP = "gap"
    ANSWER = "answer"


@dataclass(slots=True, kw_only=True)
class Thought:
    """The thinking of one sequence. ``must`` are the ids that have to come next in the GAP."""

    tags: Thinking | None
    budget: int | None = None
    structured: bool = True
    """True where the answer has a structure of its own."""
    phase: Phase = Phase.ANSWER
    blank_ids: Container[int] = ()
    """Tokens of white space alone."""
    n_tokens: int = 0
    must: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.tags is not None:
            self.phase = Phase.INSIDE if self.tags.inside else Phase.BEFORE
            if self.tags.inside:
                self._check_budget()

    @property
    def may_grow(self) -> bool:
        """True where the model's next draw may begin the thought or go on with it."""
        return self.phase in (Phase.BEFORE, Phase.INSIDE)

    @property
    def left(self) -> int | None:
        """Tokens until the budget may be spent; None when it cannot be."""
        if self.budget is None or not self.may_grow:
            return None
        opening = 1 if self.phase is Phase.BEFORE else 0
        return opening + self._cut(self.budget)[0] - self.n_tokens

    def take(self, token: int) -> bool:
        """Move past ``token``; True when it belongs to the answer.

        Raises:
            ValueError: another token had to come.
        """
        tags = self.tags
        if self.phase is Phase.ANSWER or tags is None:
            return True
        if self.phase is Phase.GAP:
            if token != self.must[0]:
                raise ValueError(f"token {token} where {self.must[0]} had to come")
            self._force(self.must[1:])
            return False
        if self.phase is Phase.BEFORE:
            if not self.structured and token in self.blank_ids:
                return False
            if token != tags.open_id:
                self.phase = Phase.ANSWER
                return True
            self.phase = Phase.INSIDE
        elif token == tags.close_id:
            self._force(tags.gap_ids if self.structured else ())
            return False
        else:
            self.n_tokens += 1
        self._check_budget()
        return False

    def _check_budget(self) -> None:
        if self.budget is None:
            return
        most, end_ids = self._cut(self.budget)
        if self.n_tokens >= most:
            self._force(end_ids)

    def _cut(self, budget: int) -> tuple[int, tuple[int, ...]]:
        """(tokens that the model may draw, what is forced behind them). The forced tokens in front of the
        closing tag are of the budget; one too small for them goes without."""
        assert self.tags is not None
        end_ids, n_lead = self.tags.end_ids, self.tags.n_lead
        return (budget - n_lead, end_ids) if budget >= n_lead else (budget, end_ids[n_lead:])

    def _force(self, ids: tuple[int, ...]) -> None:
        self.must = ids
        self.phase = Phase.GAP if ids else Phase.ANSWER
