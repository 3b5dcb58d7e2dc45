"""Parses a whole answer: reasoning first, then content and tool calls."""

from __future__ import annotations

from jserve.text.chat.parsers.calls import CallParser
from jserve.text.chat.parsers.delta import ParsedDelta
from jserve.text.chat.parsers.reasoning import State, ThoughtParser


class AnswerParser:
    """Text in, ``ParsedDelta`` out; any cut of a text gives the same pieces, concatenated.

    Args:
        thought: None where all text is the answer.
        calls: reads the answer.
    """

    def __init__(self, thought: ThoughtParser | None, calls: CallParser) -> None:
        self._thought, self._calls = thought, calls

    @property
    def thinking(self) -> bool:
        """True while the text so far ends inside a thought."""
        return self._thought is not None and self._thought.state is State.THOUGHT

    def feed(self, text: str) -> ParsedDelta:
        if self._thought is None:
            return self._calls.feed(text)
        return self._both(*self._thought.feed(text))

    def close(self) -> ParsedDelta:
        """Parses the text that was held back, at the end."""
        parsed = self._both(*self._thought.close()) if self._thought is not None else ParsedDelta()
        parsed.add(self._calls.close())
        return parsed

    def _both(self, reasoning: str, answer: str) -> ParsedDelta:
        parsed = self._calls.feed(answer) if answer else ParsedDelta()
        parsed.reasoning = reasoning
        return parsed
