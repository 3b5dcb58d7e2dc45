"""Matcher wrapper with accept, forced tokens and rollback.

It works on a copy of the compiled matcher, rolls back guesses without a trace and distinguishes a reached limit
from a wrong token.
"""

from __future__ import annotations

from typing import NamedTuple

from llguidance import LLMatcher

from jserve.faults import point
from jserve.grammar.compiler import CompiledGrammar

MAX_FORCED = 128
"""Most forced tokens at a time. A grammar may be one long text: all of it at once would hold up
every other sequence."""


class LimitReached(Exception):
    """The grammar allowed a token, and following it takes more work than the matcher may do."""


class Checkpoint(NamedTuple):
    """The state that ``RollbackMatcher.rollback`` goes back to."""

    n_taken: int
    forced: tuple[int, ...]
    at: int


class RollbackMatcher:
    """``accept`` tokens; ``rollback`` to a ``checkpoint`` behind guesses.

    Args:
        compiled: the grammar; its matcher is copied.
        end: ids that must follow a complete grammar, () or one.
        canonical: whether forced text has one tokenisation, the tokenizer's own.
    """

    def __init__(self, compiled: CompiledGrammar, end: tuple[int, ...], *, canonical: bool) -> None:
        self.matcher: LLMatcher = compiled.matcher.deep_copy()
        self._start = compiled.matcher
        self._end = end
        self._canonical = canonical
        self._taken: list[int] = []
        self._forced: tuple[int, ...] = compiled.forced if canonical else ()
        self._at = 0

    @property
    def forced(self) -> tuple[int, ...]:
        """The forced (jump-forward) ids, ``MAX_FORCED`` at most; () where there is a choice."""
        return self._forced[self._at : self._at + MAX_FORCED]

    @property
    def complete(self) -> bool:
        """True where the text may end here."""
        return self.matcher.is_accepting()

    def allows(self, token: int) -> bool:
        return self.matcher.validate_tokens([token]) == 1

    @point("grammar.follow", LimitReached)
    def accept(self, token: int) -> None:
        """Go on by ``token``.

        Raises:
            LimitReached: it is allowed, and too much to follow. The matcher is of no more use.
            ValueError: it is not allowed.
        """
        if not self.matcher.consume_token(token):
            raise self._lost()
        self._taken.append(token)
        self._at += 1
        if self._at >= len(self._forced):
            self._forced, self._at = self._ahead(), 0

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(len(self._taken), self._forced, self._at)

    def rollback(self, place: Checkpoint) -> None:
        """Roll back to ``place``, also with a matcher that a guess has broken."""
        n = len(self._taken) - place.n_taken
        del self._taken[place.n_taken :]
        if self.matcher.is_error():  # and stays so
            self.matcher = self._start.deep_copy()
            self.matcher.consume_tokens(self._taken)
        elif n:
            self.matcher.rollback(n)
        self._forced, self._at = place.forced, place.at

    def _ahead(self) -> tuple[int, ...]:
        if self.matcher.is_stopped():
            return self._end
        return tuple(self.matcher.compute_ff_tokens()) if self._canonical else ()

    def _lost(self) -> Exception:
        """The error of a token that the matcher did not take. llguidance has one code for both causes, so its message
        decides."""
        if "satisfy the grammar" in self.matcher.get_error():
            return ValueError("the output left its structure")
        return LimitReached()
