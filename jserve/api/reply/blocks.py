"""Builds an answer as a sequence of blocks: reasoning, text and tool calls.

It owns the row and when a block begins and ends; a whole answer is the row at its end, a stream is the steps that
led there. ::

    said   thought "so"   text "He" "llo"   call f {"a" ":1}"   text "!"
    row    [ THOUGHT    ][ TEXT          ][ CALL              ][ TEXT ]   one open at a time
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from jserve.api.reply.choice_parser import ChoiceParser
from jserve.text.chat.parsers.delta import CallPiece, ParsedDelta


class Kind(StrEnum):
    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True, kw_only=True)
class Block:
    """One block; ``text`` of a call are its arguments."""

    kind: Kind
    index: int
    text: str = ""
    name: str = ""
    call_id: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(12))


@dataclass(frozen=True, slots=True)
class Begin:
    block: Block


@dataclass(frozen=True, slots=True)
class Grow:
    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class End:
    block: Block


Step = Begin | Grow | End


class AnswerBlocks:
    """The row of one choice.

    Args:
        parser: gives ids to calls.
        thoughts: False leaves thoughts out.
    """

    def __init__(self, parser: ChoiceParser, *, thoughts: bool = True) -> None:
        self.row: list[Block] = []
        self._parser = parser
        self._thoughts = thoughts
        self._open: Block | None = None

    def add(self, parsed: ParsedDelta) -> Iterator[Step]:
        """The steps that ``parsed`` makes; to be run through."""
        if parsed.reasoning and self._thoughts:
            yield from self._grow(Kind.THOUGHT, parsed.reasoning)
        for part in parsed.parts:
            if isinstance(part, str):
                yield from self._grow(Kind.TEXT, part)
            else:
                yield from self._call(part)

    def close(self) -> Iterator[Step]:
        """The end of the answer."""
        if self._open is not None:
            yield End(self._open)
            self._open = None

    def _call(self, piece: CallPiece) -> Iterator[Step]:
        if piece.name is not None:
            yield from self._begin(Kind.CALL, name=piece.name, call_id=self._parser.call_id())
        if piece.arguments:
            yield from self._grow(Kind.CALL, piece.arguments)

    def _grow(self, kind: Kind, text: str) -> Iterator[Step]:
        block = self._open
        if block is None or block.kind is not kind:
            yield from self._begin(kind)
            block = self.row[-1]
        block.text += text
        yield Grow(block, text)

    def _begin(self, kind: Kind, *, name: str = "", call_id: str = "") -> Iterator[Step]:
        yield from self.close()
        self._open = Block(kind=kind, index=len(self.row), name=name, call_id=call_id)
        self.row.append(self._open)
        yield Begin(self._open)
