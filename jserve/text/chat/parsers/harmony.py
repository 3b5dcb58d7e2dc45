"""Parses the harmony format of GPT-OSS: messages in channels, thoughts and calls among them.

::

    <|channel|>analysis<|message|>a thought<|end|>
    <|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

A message in ``commentary`` that is to nobody is shown to the user. A header that is cut off by the end of the text is
dropped; a text without any header is content. Source: OpenAI's guide to the harmony response format.
"""

from __future__ import annotations

import re

from jserve.text.chat.parsers.delta import ParsedDelta, Until

_HEADS = ("<|channel|>", "<|start|>", "<|message|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=([^\s<]+)")
_TOOLS = "functions."
MOST_HEAD = 512
"""Characters of a message's header; a longer one is content."""


class HarmonyParser:
    """Text in, thoughts, content and calls out.

    Args:
        calls: False: calls are content.
        thoughts: False: thoughts are content.
    """

    def __init__(self, *, calls: bool = True, thoughts: bool = True) -> None:
        self._reads_calls, self._reads_thoughts = calls, thoughts
        self._n_calls = 0
        self._head, self._kind = "", ""
        self._body: Until | None = None
        self._argued = False
        self._n_messages = 0
        self._last = {"content": 0, "thought": 0}
        """Number of the last message of each kind that said something."""

    @property
    def thinking(self) -> bool:
        """True while the text so far ends inside a thought."""
        return self._body is not None and self._kind == "thought"

    def feed(self, text: str) -> ParsedDelta:
        parsed = ParsedDelta()
        while text:
            text = (
                self._in_head(text, parsed) if self._body is None else self._in_body(text, parsed)
            )
        return parsed

    def close(self) -> ParsedDelta:
        """Parses the text that was held back, at the end."""
        parsed = ParsedDelta()
        if self._body is not None:
            self._say(self._body.flush(), parsed)
            self._end_call(parsed)
        elif not _begins_header(self._head) or not self._head.strip().startswith("<|"):
            parsed.add_text(self._head)
        self._head = ""
        return parsed

    def _in_head(self, text: str, parsed: ParsedDelta) -> str:
        for at, char in enumerate(text, 1):
            self._head += char
            if self._head.endswith("<|message|>"):
                self._open(parsed)
                return text[at:]
            if not _begins_header(self._head) or len(self._head) > MOST_HEAD:
                said, self._head = self._head, ""
                self._begin("content")
                self._say(said, parsed)
                return text[at:]
        return ""

    def _open(self, parsed: ParsedDelta) -> None:
        """A message begins."""
        head, self._head = self._head, ""
        channel, to = _CHANNEL.search(head), _TO.search(head)
        name = to[1] if to is not None else ""
        self._begin("content")
        if name.startswith(_TOOLS) and len(name) > len(_TOOLS) and self._reads_calls:
            self._kind, self._argued = "call", False
            parsed.begin(self._n_calls, name.removeprefix(_TOOLS))
            self._n_calls += 1
        elif channel is not None and channel[1] == "analysis" and self._reads_thoughts:
            self._kind = "thought"

    def _begin(self, kind: str) -> None:
        self._kind, self._body = kind, Until(*_ENDS)
        self._n_messages += 1

    def _in_body(self, text: str, parsed: ParsedDelta) -> str:
        assert self._body is not None
        shown, rest = self._body.feed(text)
        self._say(shown, parsed)
        if rest is None:
            return ""
        found = self._body.found
        self._end_call(parsed)
        self._body, self._head = None, found if found in _HEADS else ""
        return rest

    def _say(self, text: str, parsed: ParsedDelta) -> None:
        if not text:
            return
        if self._kind == "call":
            self._argued = self._argued or bool(text.strip())
            parsed.add_arguments(self._n_calls - 1, text)
            return
        self._separate(parsed)
        if self._kind == "thought":
            parsed.reasoning += text
        else:
            parsed.add_text(text)

    def _separate(self, parsed: ParsedDelta) -> None:
        """A line's end between the messages of one kind."""
        last, self._last[self._kind] = self._last[self._kind], self._n_messages
        if last and last != self._n_messages:
            if self._kind == "thought":
                parsed.reasoning += "\n"
            else:
                parsed.add_text("\n")

    def _end_call(self, parsed: ParsedDelta) -> None:
        if self._kind == "call" and not self._argued:
            parsed.add_arguments(self._n_calls - 1, "{}")
            self._argued = True


def _begins_header(text: str) -> bool:
    """True if ``text`` may be the beginning of a header: white space, then one of its tokens."""
    bare = text.lstrip()
    return not bare or any(bare.startswith(x) or x.startswith(bare) for x in _HEADS)
