"""Parses tool calls in a model's text: Hermes (also Qwen and jserve-mini), Llama 3, Mistral.

::

    hermes   text <tool_call> {"name": ..., "arguments": {...}} </tool_call> <tool_call> ...
    llama3   {"name": ..., "parameters": {...}}; {...}       or   text <|python_tag|> {...}
    mistral  text [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
             text [TOOL_CALLS] name [ARGS] {...} [TOOL_CALLS] name [ARGS] {...}

What looks like a call and turns out to be none is content, to the letter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from jserve.text.chat.parsers.call_json import ObjectCall, ValueEnd
from jserve.text.chat.parsers.delta import ParsedDelta, Until


class CallParser(Protocol):
    """``feed`` text, then ``close`` once."""

    def feed(self, text: str) -> ParsedDelta: ...

    def close(self) -> ParsedDelta: ...


State = Callable[[str, ParsedDelta], str]
"""Takes text, adds to ``parsed``, returns the text it leaves for the next state."""


class CallMachine(ABC):
    """States that hand on the rest of the text, and the content between calls."""

    _name_key = "name"
    """Of a call that is an object, the key of its tool's name."""

    def __init__(self, *markers: str) -> None:
        self.n_calls = 0
        self._until = Until(*markers)
        self._space = ""
        self._told = False
        """True where there was content since the last call."""
        self._state: State = self._text
        self._call: ObjectCall | None = None
        self._lead = ""

    def feed(self, text: str) -> ParsedDelta:
        parsed = ParsedDelta()
        while text:
            text = self._state(text, parsed)
        return parsed

    def close(self) -> ParsedDelta:
        parsed = ParsedDelta()
        if self._call is not None and not self._call.begun:
            self._emit_text(self._lead + self._call.raw, parsed)
        self._emit_text(self._until.flush(), parsed)
        if not self.n_calls:
            parsed.add_text(self._space)
        return parsed

    def _took(self) -> None:
        """A call began: white space around it is no content."""
        self.n_calls, self._space, self._told = self.n_calls + 1, "", False

    def _emit_text(self, text: str, parsed: ParsedDelta) -> None:
        """Content; white space waits, for around calls it is none."""
        text = self._space + text
        bare = text.rstrip()
        self._space = text[len(bare) :]
        if self.n_calls and bare and not self._told:
            bare = bare.lstrip()
        self._told = self._told or bool(bare)
        parsed.add_text(bare)

    def _text(self, text: str, parsed: ParsedDelta) -> str:
        shown, rest = self._until.feed(text)
        self._emit_text(shown, parsed)
        if rest is None:
            return ""
        self._after_marker()
        return rest

    def _after_marker(self) -> None:
        self._expect(self._until.found)

    def _expect(self, lead: str) -> None:
        """An object is to come; ``lead`` is the text before it, in case it is no call."""
        self._call, self._lead = ObjectCall(self.n_calls, self._name_key), lead
        self._state = self._object

    def _object(self, text: str, parsed: ParsedDelta) -> str:
        call = self._call
        assert call is not None
        for at, char in enumerate(text, 1):
            call.push(char, parsed)
            if call.begun and self.n_calls == call.index:
                self._took()
            if call.bad or call.done:
                self._call = None
                if call.bad and not call.begun:
                    self._emit_text(self._lead + call.raw, parsed)
                    self._state = self._text
                else:
                    self._state = self._after_object
                return text[at:]
        return ""

    @abstractmethod
    def _after_object(self, text: str, parsed: ParsedDelta) -> str:
        """The state behind an object that was a call."""


class HermesCalls(CallMachine):
    """``<tool_call>`` around each object; text between object and closing tag is dropped."""

    def __init__(self) -> None:
        super().__init__("<tool_call>")
        self._closing = Until("</tool_call>")

    def _after_object(self, text: str, parsed: ParsedDelta) -> str:
        _, rest = self._closing.feed(text)
        if rest is None:
            return ""
        self._state = self._text
        return rest


class LlamaCalls(CallMachine):
    """Objects from the first character on, or behind ``<|python_tag|>``, parted by semicolons."""

    def __init__(self) -> None:
        super().__init__("<|python_tag|>")
        self._state = self._start

    def _start(self, text: str, parsed: ParsedDelta) -> str:
        bare = text.lstrip()
        self._space += text[: len(text) - len(bare)]
        if not bare:
            return ""
        self._state = self._text
        if bare[0] == "{":
            lead, self._space = self._space, ""
            self._expect(lead)
        return bare

    def _after_object(self, text: str, parsed: ParsedDelta) -> str:
        bare = text.lstrip()
        if not bare:
            return ""
        if bare[0] == ";":
            self._expect(";")
            return bare[1:]
        self._state = self._text
        return bare


class MistralCalls(CallMachine):
    """An array behind ``[TOOL_CALLS]``, or a name and its arguments behind each."""

    def __init__(self) -> None:
        super().__init__("[TOOL_CALLS]")
        self._name = ""
        self._value: ValueEnd | None = None

    def close(self) -> ParsedDelta:
        parsed = ParsedDelta()
        if self._state in (self._head, self._named):
            self._emit_text(self._lead + self._name, parsed)
        parsed.add(super().close())
        return parsed

    def _after_marker(self) -> None:
        self._lead, self._name, self._state = self._until.found, "", self._head

    def _head(self, text: str, parsed: ParsedDelta) -> str:
        bare = text.lstrip()
        self._lead += text[: len(text) - len(bare)]
        if not bare:
            return ""
        if bare[0] != "[":
            self._state = self._named
            return bare
        self._expect(self._lead + "[")
        return bare[1:]

    def _named(self, text: str, parsed: ParsedDelta) -> str:
        for at, char in enumerate(text, 1):
            if char == "{" and _plain_name(self._name):
                parsed.begin(self.n_calls, _plain_name(self._name))
                self._took()
                self._value, self._state = ValueEnd(), self._arguments
                return text[at - 1 :]
            self._name += char
            if char in '{}"\n' or len(self._name) > 256:
                self._emit_text(self._lead + self._name, parsed)
                self._state = self._text
                return text[at:]
        return ""

    def _arguments(self, text: str, parsed: ParsedDelta) -> str:
        assert self._value is not None
        for at, char in enumerate(text, 1):
            parsed.add_arguments(self.n_calls - 1, char)
            if self._value.push(char):
                self._state = self._text
                return text[at:]
        return ""

    def _after_object(self, text: str, parsed: ParsedDelta) -> str:
        bare = text.lstrip()
        if not bare:
            return ""
        if bare[0] == ",":
            self._expect(",")
            return bare[1:]
        self._state = self._text
        return bare[1:] if bare[0] == "]" else bare


def _plain_name(head: str) -> str:
    """The name in ``name``, ``name[ARGS]`` or ``name[CALL_ID]id[ARGS]``."""
    return head.split("[", 1)[0].strip()
