"""Parses tool calls behind control tokens or words: DeepSeek V3, Phi-4-mini, Cohere Command, GLM-4.

::

    deepseek_v3     text <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name
                    ```json
                    {...}
                    ```<｜tool▁call▁end｜> ... <｜tool▁calls▁end｜>           V3.1: name<｜tool▁sep｜>{...}
    phi4_mini_json  text functools[{"name": ..., "arguments": {...}}, ...]   or <|tool_call|>[...]<|/tool_call|>
    cohere_command  <|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>
                    or <|START_RESPONSE|>text<|END_RESPONSE|>
    glm4            name
                    {...}

Sources: the chat templates that DeepSeek-V3, -V3.1, Phi-4-mini-instruct, c4ai-command-r7b-12-2024 and GLM-4-0414
publish, and for ``functools`` vLLM's documentation of its parser of that name.
"""

from __future__ import annotations

import re

from jserve.text.chat.parsers.call_json import ValueEnd
from jserve.text.chat.parsers.calls import CallMachine
from jserve.text.chat.parsers.delta import ParsedDelta, Until

MOST_HEAD = 512
"""Characters between the token that announces a call and its arguments; more are no call."""
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")


class ArrayCalls(CallMachine):
    """An array of objects behind a marker, which may have its bracket."""

    def _after_marker(self) -> None:
        self._lead = self._until.found
        if self._lead.endswith("["):
            self._expect(self._lead)
        else:
            self._state = self._open

    def close(self) -> ParsedDelta:
        parsed = ParsedDelta()
        if self._state == self._open:
            self._emit_text(self._lead, parsed)
        parsed.add(super().close())
        return parsed

    def _open(self, text: str, parsed: ParsedDelta) -> str:
        bare = text.lstrip()
        self._lead += text[: len(text) - len(bare)]
        if not bare:
            return ""
        if bare[0] == "[":
            self._expect(self._lead + "[")
            return bare[1:]
        self._emit_text(self._lead, parsed)
        self._state = self._text
        return bare

    def _after_object(self, text: str, parsed: ParsedDelta) -> str:
        bare = text.lstrip()
        if not bare:
            return ""
        if bare[0] == ",":
            self._expect(",")
            return bare[1:]
        self._state = self._text
        return bare[1:] if bare[0] == "]" else bare


class PhiCalls(ArrayCalls):
    """``functools[...]``, or an array between ``<|tool_call|>`` and its end."""

    _END = "<|/tool_call|>"

    def __init__(self) -> None:
        super().__init__("functools[", "<|tool_call|>", self._END)

    def _after_marker(self) -> None:
        if self._until.found != self._END:
            super()._after_marker()


class CohereCalls(ArrayCalls):
    """Actions and the answer, each between tokens of its own, which are no content.

    Args:
        calls: False: an action is content, too.
    """

    _ACTION = "<|START_ACTION|>"
    _DROPPED = (
        "<|END_ACTION|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|START_TEXT|>",
        "<|END_TEXT|>",
    )
    _name_key = "tool_name"

    def __init__(self, *, calls: bool = True) -> None:
        super().__init__(*((self._ACTION,) if calls else ()), *self._DROPPED)

    def _after_marker(self) -> None:
        if self._until.found == self._ACTION:
            super()._after_marker()


class _NamedCalls(CallMachine):
    """Calls whose name is outside of their arguments, which are one JSON object."""

    def __init__(self, *markers: str) -> None:
        super().__init__(*markers)
        self._value: ValueEnd | None = None
        self._head = ""

    def close(self) -> ParsedDelta:
        parsed = ParsedDelta()
        if self._head:
            self._emit_text(self._head, parsed)
            self._head = ""
        parsed.add(super().close())
        return parsed

    def _begin_call(self, name: str, parsed: ParsedDelta) -> None:
        """Its arguments come next, from their brace on."""
        parsed.begin(self.n_calls, name)
        self._took()
        self._head, self._value, self._state = "", ValueEnd(), self._arguments

    def _arguments(self, text: str, parsed: ParsedDelta) -> str:
        assert self._value is not None
        for at, char in enumerate(text, 1):
            parsed.add_arguments(self.n_calls - 1, char)
            if self._value.push(char):
                self._state = self._after_object
                return text[at:]
        return ""


class DeepSeekCalls(_NamedCalls):
    """Calls of V3, R1 (a type before the name, a fence around the arguments) and V3.1 (neither)."""

    _CALLS, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    _CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

    def __init__(self) -> None:
        super().__init__(self._CALLS, self._CALL, self._END)
        self._closing = Until(self._CALL_END)

    def _after_marker(self) -> None:
        if self._until.found == self._CALL:
            self._head, self._state = self._CALL, self._named
        # Around the list there is nothing to read: what is no call stays content.

    def _named(self, text: str, parsed: ParsedDelta) -> str:
        for at, char in enumerate(text):
            name = self._name() if char == "{" else ""
            if name:
                self._begin_call(name, parsed)
                return text[at:]
            self._head += char
            if char == "{" or len(self._head) > MOST_HEAD or self._head.endswith(self._CALL_END):
                self._emit_text(self._head, parsed)
                self._head, self._state = "", self._text
                return text[at + 1 :]
        return ""

    def _name(self) -> str:
        """The name in what was read before the arguments; "" where there is none."""
        kind, sep, rest = self._head.removeprefix(self._CALL).partition(self._SEP)
        lines = rest.strip().split("\n")
        name = lines[0].strip() if lines[0] and not lines[0].startswith("```") else kind.strip()
        return name if sep and _NAME.fullmatch(name) else ""

    def _after_object(self, text: str, parsed: ParsedDelta) -> str:
        _, rest = self._closing.feed(text)
        if rest is None:
            return ""
        self._state = self._text
        return rest


class Glm4Calls(_NamedCalls):
    """An answer that is a name alone on its line, and an object under it, as often as there are."""

    def __init__(self) -> None:
        super().__init__("<|assistant|>")
        self._state = self._named

    def _named(self, text: str, parsed: ParsedDelta) -> str:
        for at, char in enumerate(text):
            if char == "{" and self._is_name():
                self._begin_call(self._head.strip(), parsed)
                return text[at:]
            self._head += char
            if not self._may_be_name():
                self._emit_text(self._head, parsed)
                self._head, self._state = "", self._text
                return text[at + 1 :]
        return ""

    def _after_marker(self) -> None:
        self._head, self._state = self._until.found, self._named

    def _bare(self) -> str:
        return self._head.removeprefix("<|assistant|>").lstrip()

    def _is_name(self) -> bool:
        name, line, rest = self._bare().partition("\n")
        return bool(_NAME.fullmatch(name.rstrip()) and line and not rest.strip())

    def _may_be_name(self) -> bool:
        name, line, rest = self._bare().partition("\n")
        whole = _NAME.fullmatch(name.rstrip() if line else name)
        return len(self._head) <= MOST_HEAD and bool(whole or not self._bare()) and not rest.strip()

    def _begin_call(self, name: str, parsed: ParsedDelta) -> None:
        super()._begin_call(name.removeprefix("<|assistant|>").strip(), parsed)

    def _after_object(self, text: str, parsed: ParsedDelta) -> str:
        self._state = self._text
        return text
