"""The parsers' result: content, reasoning and tool calls that a piece of text adds.

One rule holds for every parser: its state is a function of the characters so far, never of how they were cut, so
the pieces of any two cuts of one text concatenate to the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CallPiece:
    """A piece of tool call ``index``: its name comes first and once, its arguments add up."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ParsedDelta:
    """The additions of some text to an answer: reasoning, then content and calls in order."""

    reasoning: str = ""
    parts: list[str | CallPiece] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.parts or self.reasoning)

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[CallPiece]:
        return [part for part in self.parts if isinstance(part, CallPiece)]

    def add_text(self, text: str) -> None:
        """More content."""
        if not text:
            return
        if self.parts and isinstance(self.parts[-1], str):
            self.parts[-1] += text
        else:
            self.parts.append(text)

    def begin(self, index: int, name: str) -> None:
        self.parts.append(CallPiece(index, name))

    def add_arguments(self, index: int, text: str) -> None:
        """More arguments of call ``index``."""
        last = self.parts[-1] if self.parts else None
        if isinstance(last, CallPiece) and last.index == index:
            last.arguments += text
        else:
            self.parts.append(CallPiece(index, None, text))

    def add(self, other: ParsedDelta) -> None:
        self.reasoning += other.reasoning
        for piece in other.parts:
            if isinstance(piece, str):
                self.add_text(piece)
                continue
            if piece.name is not None:
                self.begin(piece.index, piece.name)
            if piece.arguments:
                self.add_arguments(piece.index, piece.arguments)


class Until:
    """Text up to the first of some markers. What may be the beginning of one waits; none may begin another."""

    def __init__(self, *markers: str) -> None:
        self.markers = markers
        self.found = ""
        """The marker that was found last."""
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text before the marker, text behind it or None while there is no marker)."""
        text, self._held = self._held + text, ""
        places = [(at, marker) for marker in self.markers if (at := text.find(marker)) >= 0]
        if places:
            at, self.found = min(places)
            return text[:at], text[at + len(self.found) :]
        keep = max(_overlap(text, marker) for marker in self.markers)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``marker``."""
    for n in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:n]):
            return n
    return 0
