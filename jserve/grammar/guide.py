"""Per-sequence FSM state: token bitmask, forced (jump-forward) tokens, termination.

It owns the walk over a sequence's tokens (``ports.Guide``).

One rule makes drafts, fast-forward and plain steps give the same tokens: **where the text to come
is certain, its token is too** (the tokenizer's own), and the mask allows only that. So a forced
token may be drawn under its mask, drafted, or put in without a model step, all the same::

    drawn      {"      city   ":     ·"    P    ar
    forced            certain=(city, ":)        ...       compute_ff_tokens after each drawn token
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from jserve.errors import InvalidSchema, where
from jserve.faults import point
from jserve.grammar.compiler import CompiledGrammar
from jserve.grammar.rollback import MAX_FORCED, Checkpoint, LimitReached, RollbackMatcher
from jserve.grammar.thought import Phase, Thought
from jserve.ports import Verdict

log = logging.getLogger(__name__)

UNLIMITED = 1 << 30
TOO_COMPLEX = Verdict(
    error="structured_outputs became too complex to follow",
    code=InvalidSchema.code,
    field="structured_outputs",
)


class _Mark(NamedTuple):
    phase: Phase
    n_thought: int
    thought_must: tuple[int, ...]
    place: Checkpoint | None
    mask_W: np.ndarray | None
    fault: Verdict | None
    ended: bool


class MaskKit:
    """The values that all guides of one vocabulary share: widths, end and blank tokens, constant masks."""

    def __init__(
        self,
        n_words: int,
        eos_ids: tuple[int, ...],
        *,
        canonical: bool,
        blank_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.n_words = n_words
        self.eos_ids = eos_ids
        self.blank_ids = blank_ids
        self.canonical = canonical
        """True where forced text has one tokenisation, the tokenizer's own."""
        self.all_W = np.full(n_words, -1, np.int32)
        self.no_end_W = self.all_W.copy()
        for token in eos_ids:
            self.no_end_W[token >> 5] &= ~_bit(token)
        self.none_W = np.zeros(n_words, np.int32)

    def only(self, token: int) -> np.ndarray:
        """int32[W]: the mask that allows one token."""
        words_W = self.none_W.copy()
        words_W[token >> 5] = _bit(token)
        return words_W


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token & 31)).astype(np.int32)


class TokenGuide:
    """``ports.Guide`` of one sequence.

    Args:
        kit: shared by all guides.
        compiled: the grammar of the answer, or None for a thought with a budget only.
        thought: where the sequence starts.
        fast: put in forced tokens without a model step (their log-probabilities are not known).
    """

    def __init__(
        self, kit: MaskKit, compiled: CompiledGrammar | None, thought: Thought, *, fast: bool
    ) -> None:
        self.kit = kit
        self.thought = thought
        self.ended = False
        self.fault: Verdict | None = None
        self.mask_W: np.ndarray | None = None
        """The matcher's mask for the next token; None while it has to be computed."""
        self.grammar: RollbackMatcher | None = None
        self._fast = fast
        if compiled is not None:
            self.grammar = RollbackMatcher(compiled, kit.eos_ids[:1], canonical=kit.canonical)
            self.mask_W = compiled.mask_W
            if thought.phase is Phase.BEFORE and not self._answer_words().any():
                thought.phase = Phase.ANSWER  # the tag is the grammar's own

    @property
    def matcher(self) -> LLMatcher | None:
        return None if self.grammar is None else self.grammar.matcher

    @property
    def needs_mask(self) -> bool:
        """True when the matcher has to be asked before the next row."""
        return self.grammar is not None and self.mask_W is None and not self.ended

    def room(self, in_flight: int) -> int:
        if self.grammar is not None:
            return UNLIMITED if not in_flight and not self.needs_mask else 0
        if self.thought.must:
            return 0 if in_flight else UNLIMITED
        left = self.thought.left
        return UNLIMITED if left is None else max(0, left - in_flight)

    def trim(self, drafts: Seq[int]) -> Seq[int]:
        return drafts[: self._walk(drafts, None)]

    def mask(self, drafts: Seq[int]) -> np.ndarray | None:
        first_W = self._words()
        if not drafts:
            return None if first_W is None else first_W[None]
        rows: list[np.ndarray | None] = [first_W]
        self._walk(drafts, rows)
        rows += [self.kit.none_W] * (1 + len(drafts) - len(rows))
        if all(row is None for row in rows):
            return None
        return np.stack([self.kit.all_W if row is None else row for row in rows])

    def redraw(self, drafts: Seq[int]) -> Seq[int]:
        thought = self.thought
        if self.grammar is None or self.fault is not None or not thought.may_grow:
            return ()
        mark = self._mark()
        found = [self._redraw]
        for token in drafts:
            thought.take(token)
            found.append(self._redraw)
        self._undo(mark)
        return found

    @property
    def _redraw(self) -> int:
        """A place where the thought may begin or go on keeps the model's own draw if it does that; what is
        drawn instead may not."""
        match self.thought.phase:
            case Phase.BEFORE:
                assert self.thought.tags is not None
                return self.thought.tags.open_id
            case Phase.INSIDE:
                return next(iter(self.kit.eos_ids), -1)
        return -1

    @point("grammar.take")
    def take(self, drawn: Seq[int]) -> Verdict:
        return self._follow(drawn, fast=self._fast)

    def resume(self, said: Seq[int]) -> Verdict:
        return self._follow(said, fast=False)

    def _follow(self, ids: Seq[int], *, fast: bool) -> Verdict:
        """Move past ``ids``, and if ``fast`` past what they force."""
        forced: list[int] = []
        try:
            for token in ids:
                self._take(token)
            while fast and self.pending and not self.ended and len(forced) < MAX_FORCED:
                must = self.pending
                forced += must
                for token in must:
                    self._take(token)
        except LimitReached:
            self.fault = TOO_COMPLEX
            return self.fault
        except ValueError as error:
            self.fault = Verdict(error=str(error))
            return self.fault
        free = self.grammar is None and self.thought.phase is Phase.ANSWER
        return Verdict(forced=tuple(forced), ended=self.ended, free=free)

    @property
    def forced(self) -> tuple[int, ...]:
        """Those that may be drafted: an id that ends the output lets nothing follow."""
        return self.pending[: self._walk(self.pending, None)] if self.pending else ()

    @property
    def pending(self) -> tuple[int, ...]:
        """The ids that must come next."""
        return self.thought.must or (self._certain if self._answers else ())

    @property
    def _certain(self) -> tuple[int, ...]:
        return () if self.grammar is None else self.grammar.forced

    @property
    def _answers(self) -> bool:
        return self.thought.phase is Phase.ANSWER

    def _take(self, token: int) -> None:
        if self.ended:
            raise ValueError("the output goes on after its end")
        if not self.thought.take(token) or self.grammar is None:
            return
        if token in self.kit.eos_ids:
            self.ended = True
            if not self.grammar.complete:
                raise ValueError("the output ended before its structure was complete")
            return
        self.mask_W = None
        self.grammar.accept(token)

    def _words(self) -> np.ndarray | None:
        """int32[W]: what may come next; None: anything."""
        if self.fault is not None or self.ended:
            return self.kit.none_W
        must = self.pending
        if must and self.thought.phase is not Phase.BEFORE:
            return self.kit.only(must[0])
        if self.grammar is None:
            return None
        match self.thought.phase:
            case Phase.INSIDE:
                return self.kit.no_end_W
            case Phase.BEFORE:
                assert self.thought.tags is not None
                return self._answer_words() | self.kit.only(self.thought.tags.open_id)
        return self._matcher_words()

    def _answer_words(self) -> np.ndarray:
        """The bitmask of tokens that may begin the answer without a thought."""
        assert self.thought.tags is not None
        certain = self._certain
        answer_W = self.kit.only(certain[0]) if certain else self._matcher_words()
        return answer_W & ~self.kit.only(self.thought.tags.open_id)

    def _matcher_words(self) -> np.ndarray:
        if self.mask_W is None:
            self.compute()
        return self.kit.none_W if self.mask_W is None else self.mask_W

    def compute(self) -> None:
        """Ask the matcher for the next token's mask, here and now. What it fails with is this
        sequence's end."""
        assert self.matcher is not None
        mask_1W = np.zeros((1, self.kit.n_words), np.int32)
        try:
            fill_next_token_bitmask(self.matcher, mask_1W)
        except Exception as error:
            log.error("a mask failed: %s", where(error))
            self.give_up(f"the mask failed with {type(error).__name__}")
            return
        self.put(mask_1W[0])

    def give_up(self, why: str) -> None:
        """There is no mask, for a fault that is not the client's: the sequence ends with its next row."""
        self.fault = Verdict(error=why)
        self.mask_W = self.kit.none_W

    def put(self, mask_W: np.ndarray) -> None:
        """Hand in the mask that the matcher made. A matcher in error forbids everything."""
        assert self.matcher is not None
        if self.matcher.is_error():
            self.fault = TOO_COMPLEX
            mask_W = self.kit.none_W
        self.mask_W = mask_W

    def _walk(self, drafts: Seq[int], rows: list[np.ndarray | None] | None) -> int:
        """Step over ``drafts`` while they are allowed, collecting the mask after each; go back.

        Returns:
            How many are allowed. One that ends the output is not: nothing can follow it; nor is one
            that the matcher fails at, which is for ``take`` to find if it is ever drawn.
        """
        mark, n = self._mark(), 0
        try:
            for token in drafts:
                if not self._may(token):
                    break
                self._take(token)
                n += 1
                if rows is not None:
                    rows.append(self._words())
        except Exception as error:
            log.debug("a guess was dropped: %s", where(error))
        self._undo(mark)
        return n

    def _may(self, token: int) -> bool:
        words_W = self._words_cheap()
        if words_W is not None:
            return bool(words_W[token >> 5] & _bit(token)) and token not in self.kit.eos_ids
        if self.grammar is None:
            return True
        ok = self.grammar.allows(token)
        opens = self.thought.phase is Phase.BEFORE and self._opens(token)
        return (ok or opens) and token not in self.kit.eos_ids

    def _opens(self, token: int) -> bool:
        return self.thought.tags is not None and token == self.thought.tags.open_id

    def _words_cheap(self) -> np.ndarray | None:
        """The mask, where it takes no asking of the matcher."""
        asks = self.grammar is not None and self.thought.phase is not Phase.INSIDE
        return None if asks and not self.pending and self.mask_W is None else self._words()

    def _mark(self) -> _Mark:
        thought, grammar = self.thought, self.grammar
        return _Mark(
            thought.phase,
            thought.n_tokens,
            thought.must,
            None if grammar is None else grammar.checkpoint,
            self.mask_W,
            self.fault,
            self.ended,
        )

    def _undo(self, mark: _Mark) -> None:
        thought = self.thought
        thought.phase, thought.n_tokens, thought.must = mark[:3]
        if self.grammar is not None and mark.place is not None:
            self.grammar.rollback(mark.place)
        self.mask_W, self.fault, self.ended = mark[4:]
