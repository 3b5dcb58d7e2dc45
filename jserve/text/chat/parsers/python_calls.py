"""Parses tool calls written as Python: Llama 4 and Gemma 3, and the list of calls that others write.

::

    pythonic          [get_weather(city="Paris"), time()]
    llama4_pythonic   the same, with <|python_start|> and <|python_end|> around it or without
    gemma3            the same, or one call a line between ```tool_code and ```

Each of them reads the JSON form of such a call too: ``{"name": ..., "parameters": {...}}``, at the answer's start or
behind a marker. A call is passed on when it is complete, since its arguments have to become JSON.

Sources: Meta's prompt format of Llama 4, Google's guide to function calling with Gemma 3, and vLLM's documentation of
its parsers of these names.
"""

from __future__ import annotations

import ast
import json
import math
from typing import Any

from jserve.text.chat.parsers.calls import CallMachine
from jserve.text.chat.parsers.delta import ParsedDelta, Until

MOST_CALL = 1 << 16
"""Characters of a list of calls; a longer one is content."""
_WORDS = {"true": True, "false": False, "null": None}
"""Names that models borrow from JSON."""


class PythonCalls(CallMachine):
    """A list of calls that begins the answer, or follows a marker.

    Args:
        opening: markers that a list may follow.
        closing: markers behind it, which are no content.
        fence: what opens a block of lines with a call each, up to three backticks; empty: there are none.
    """

    def __init__(
        self, opening: tuple[str, ...] = (), closing: tuple[str, ...] = (), fence: str = ""
    ) -> None:
        fences = (fence,) if fence else ()
        super().__init__(*(opening + closing + fences or ("\0",)))
        self._opening, self._fence = opening, fence
        self._block = Until("```")
        self._raw = ""
        self._reading = _Expression()
        self._state = self._start

    def close(self) -> ParsedDelta:
        parsed = ParsedDelta()
        self._emit_text(self._raw, parsed)
        self._raw = ""
        parsed.add(super().close())
        return parsed

    def _after_marker(self) -> None:
        if self._until.found == self._fence:
            self._raw, self._state = self._fence, self._in_block
        elif self._until.found in self._opening:
            self._raw, self._state = self._until.found, self._start

    def _start(self, text: str, parsed: ParsedDelta) -> str:
        """White space, then a list, an object or neither."""
        bare = text.lstrip()
        self._raw += text[: len(text) - len(bare)]
        if not bare:
            return ""
        if bare[0] == "[":
            self._reading, self._state = _Expression(), self._list
            return bare
        lead, self._raw, self._state = self._raw, "", self._text
        if bare[0] == "{":
            self._expect(lead)
        else:
            self._emit_text(lead, parsed)
        return bare

    def _list(self, text: str, parsed: ParsedDelta) -> str:
        for at, char in enumerate(text, 1):
            self._raw += char
            state = self._reading.push(char)
            if state == "call":
                state = self._take(self._reading.piece, parsed)
            if state == "bad" or len(self._raw) > MOST_CALL:
                self._emit_text(self._raw, parsed)
                state = "end"
            if state == "end":
                self._raw, self._state = "", self._text
                return text[at:]
        return ""

    def _take(self, piece: str, parsed: ParsedDelta) -> str:
        """``bad`` where ``piece`` is no call; else what was read so far is over."""
        found = _calls_in(piece.strip())
        for name, arguments in found:
            self._pass_on(name, arguments, parsed)
        if found:
            self._raw = ""
        return "" if found else "bad"

    def _in_block(self, text: str, parsed: ParsedDelta) -> str:
        shown, rest = self._block.feed(text)
        self._raw += shown
        if rest is None:
            return ""
        lines = self._raw.removeprefix(self._fence).strip()
        calls = _calls_in(lines)
        for name, arguments in calls:
            self._pass_on(name, arguments, parsed)
        if not calls:
            self._emit_text(self._raw + "```", parsed)
        self._raw, self._state = "", self._text
        return rest

    def _pass_on(self, name: str, arguments: str, parsed: ParsedDelta) -> None:
        parsed.begin(self.n_calls, name)
        parsed.add_arguments(self.n_calls, arguments)
        self._took()

    def _after_object(self, text: str, parsed: ParsedDelta) -> str:
        bare = text.lstrip()
        if not bare:
            return ""
        if bare[0] in ";,":
            self._expect(bare[0])
            return bare[1:]
        self._state = self._text
        return bare


class _Expression:
    """Follows ``[name(...), name(...)]`` character by character.

    Attributes:
        piece: the call that was complete last.
    """

    def __init__(self) -> None:
        self.piece = self._text = ""
        self._depth = 0
        self._quote = ""
        self._escaped = self._after = False
        self._begun = False

    def push(self, char: str) -> str:
        """``call`` at the end of one, ``end`` at that of the list, ``bad`` where there is none such; else empty."""
        if not self._begun:
            self._begun = True
            return ""
        if self._after:
            return self._between(char)
        self._text += char
        if self._depth == 0:
            return self._head(char)
        if self._quote:
            self._in_string(char)
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            if self._depth == 0:
                self.piece, self._text, self._after = self._text, "", True
                return "call"
        return ""

    def _head(self, char: str) -> str:
        """In the name of a call."""
        before = self._text[:-1].lstrip()
        if char == "(" and all(part.isidentifier() for part in before.split(".")):
            self._depth = 1
            return ""
        if char.isspace():
            return "bad" if before else ""
        return "" if char.isalnum() or char in "_." else "bad"

    def _between(self, char: str) -> str:
        if char.isspace():
            return ""
        if char == ",":
            self._after = False
            return ""
        return "end" if char == "]" else "bad"

    def _in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""


def _calls_in(text: str) -> list[tuple[str, str]]:
    """(name, arguments as JSON) of calls, one a line or in a list; [] where anything in ``text`` is none."""
    try:
        tree = ast.parse(text.strip())
        nodes = [node.value for node in tree.body if isinstance(node, ast.Expr)]
        if len(nodes) != len(tree.body):
            return []
        flat = [x for node in nodes for x in (node.elts if isinstance(node, ast.List) else [node])]
        return [_call(node) for node in flat]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []


def _call(node: ast.expr) -> tuple[str, str]:
    """Raises ValueError: it is no call with arguments that are all named and literal."""
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        raise ValueError("no call with named arguments")
    values = {str(k.arg): _value(k.value) for k in node.keywords}
    return ast.unparse(node.func), json.dumps(values, ensure_ascii=False)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(k): _value(v) for k, v in zip(keys, values, strict=True)}
    value = ast.literal_eval(node)
    plain = value is None or isinstance(value, str | bool | int | float)
    if not plain or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("no value of JSON")
    return value


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError("a key that is no text")
    return node.value


def pythonic() -> PythonCalls:
    """A list that begins the answer."""
    return PythonCalls()


def llama4() -> PythonCalls:
    """The same with Llama 4's tokens around it."""
    return PythonCalls(("<|python_start|>",), ("<|python_end|>",))


def gemma3() -> PythonCalls:
    """The same, or a fenced block."""
    return PythonCalls(fence="```tool_code")
