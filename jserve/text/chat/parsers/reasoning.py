"""Separates reasoning from the answer by its tags.

It owns the tags and the white space around them, which belongs to neither. ::

    LEAD    white space, then the opening tag (else it was the ANSWER all along)
    THOUGHT until the closing tag; white space at its ends is dropped
    GAP     white space before the answer
    ANSWER  the rest
"""

from __future__ import annotations

from enum import Enum

from jserve.text.chat.parsers.delta import Until


class State(Enum):
    LEAD = "lead"
    THOUGHT = "thought"
    GAP = "gap"
    ANSWER = "answer"


class ThoughtParser:
    """Splits text into (reasoning, answer).

    Args:
        open_tag, close_tag: such as ``<think>`` and ``</think>``.
        state: THOUGHT where the prompt ends inside a thought, ANSWER where there can be none.
    """

    def __init__(self, open_tag: str, close_tag: str, state: State = State.LEAD) -> None:
        self.state = state
        self._open = open_tag
        self._until = Until(close_tag)
        self._lead = ""
        self._space: str | None = None
        """White space of the thought that may be its end; None before its first word."""

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that ``text`` adds."""
        if self.state is State.LEAD:
            text = self._begin(text)
        reasoning = ""
        if self.state is State.THOUGHT:
            shown, rest = self._until.feed(text)
            reasoning = self._trimmed(shown)
            if rest is None:
                return reasoning, ""
            self.state, text = State.GAP, rest
        if self.state is State.GAP:
            text = text.lstrip()
            self.state = State.ANSWER if text else State.GAP
        return reasoning, text if self.state is State.ANSWER else ""

    def close(self) -> tuple[str, str]:
        """Parses the text that was held back, at the end."""
        if self.state is State.LEAD:
            return "", self._lead
        if self.state is State.THOUGHT:
            return self._trimmed(self._until.flush()), ""
        return "", ""

    def _begin(self, text: str) -> str:
        """The text behind the opening tag, or all of it once it is clear that there is none."""
        self._lead += text
        bare = self._lead.lstrip()
        if bare.startswith(self._open):
            self.state = State.THOUGHT
            return bare[len(self._open) :]
        if self._open.startswith(bare):
            return ""
        self.state = State.ANSWER
        return self._lead

    def _trimmed(self, text: str) -> str:
        if self._space is None:
            text = text.lstrip()
            if not text:
                return ""
            self._space = ""
        text = self._space + text
        bare = text.rstrip()
        self._space = text[len(bare) :]
        return bare
