"""Parses one tool call written as a JSON object, character by character.

The arguments are passed on as they are written, while they are written, once the name is known::

    {"name": "get_weather", "arguments": {"city": "Paris"}}
              ^ begin                     ^^^^^^^^^^^^^^^^^ argue
"""

from __future__ import annotations

import json

from jserve.text.chat.parsers.delta import ParsedDelta

ARGUMENT_KEYS = ("arguments", "parameters")


class ValueEnd:
    """Finds the end of one JSON value; ``push`` is True on its last character (or, for a bare word
    or number, on the character after it)."""

    def __init__(self) -> None:
        self.bare = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._begun = False

    def push(self, char: str) -> bool:
        if self._in_string:
            return self._string(char)
        if not self._begun:
            self._begun = True
            self.bare = char not in '{["'
        if self.bare:
            return char in ",}] \t\r\n"
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False

    def _string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            return self._depth == 0
        return False


class ObjectCall:
    """Reads one object and adds call ``index`` to ``parsed``.

    Attributes:
        begun: the name is known and was added.
        done: the object is complete. A complete object without a name is no call: ``bad``.
        bad: this is no call; nothing was added unless ``begun``.
        raw: all characters read.
    """

    def __init__(self, index: int, name_key: str = "name") -> None:
        self.index = index
        self._name_key = name_key
        self.begun = self.done = self.bad = False
        self.raw = ""
        self._wants = "{"
        self._key = self._text = ""
        self._arguments = ""
        self._argued = False
        self._value: ValueEnd | None = None

    def push(self, char: str, parsed: ParsedDelta) -> None:
        """One more character. Not to be called once ``done`` or ``bad``."""
        self.raw += char
        if self._value is not None:
            self._in_value(char, parsed)
        elif not char.isspace():
            self._between(char, parsed)

    def _between(self, char: str, parsed: ParsedDelta) -> None:
        """A character outside of keys and values."""
        if char == "}" and self._wants in ("key", "key?", ","):
            if self._wants == "key":
                self.bad = True
            else:
                self._end(parsed)
        elif self._wants == "{" and char == "{":
            self._wants = "key?"
        elif self._wants in ("key", "key?") and char == '"':
            self._start('"', "")
        elif self._wants == ":" and char == ":":
            self._wants = "value"
        elif self._wants == "," and char == ",":
            self._wants = "key"
        elif self._wants == "value" and char not in ",:}]":
            self._start(char, self._key)
            self._pass_on(char, parsed)
        else:
            self.bad = True

    def _start(self, char: str, key: str) -> None:
        self._value, self._text = ValueEnd(), char
        self._value.push(char)
        self._key = key

    def _in_value(self, char: str, parsed: ParsedDelta) -> None:
        assert self._value is not None
        ends, bare = self._value.push(char), self._value.bare
        if not (ends and bare):
            self._text += char
            self._pass_on(char, parsed)
        if not ends:
            return
        self._value = None
        self._finish_value(parsed)
        if bare and not self.bad and not char.isspace():
            self._between(char, parsed)

    def _pass_on(self, char: str, parsed: ParsedDelta) -> None:
        """Arguments that are an object go on at once; any other value waits for its end."""
        if self._wants == "value" and self._key in ARGUMENT_KEYS and self._text[0] == "{":
            self._argue(char, parsed)

    def _argue(self, text: str, parsed: ParsedDelta) -> None:
        self._argued = True
        if self.begun:
            parsed.add_arguments(self.index, text)
        else:
            self._arguments += text

    def _finish_value(self, parsed: ParsedDelta) -> None:
        if self._wants in ("key", "key?"):
            self._key, self._wants = self._loaded(), ":"
            return
        self._wants = ","
        if self._key == self._name_key and not self.begun:
            self._name(parsed)
        elif self._key in ARGUMENT_KEYS and self._text[0] != "{":
            value = self._loaded() if self._text[0] == '"' else self._text
            self._argue("{}" if value == "null" else value, parsed)

    def _name(self, parsed: ParsedDelta) -> None:
        name = self._loaded() if self._text[0] == '"' else ""
        if not name:
            self.bad = True
            return
        self.begun = True
        parsed.begin(self.index, name)
        if self._arguments:
            parsed.add_arguments(self.index, self._arguments)

    def _loaded(self) -> str:
        """The string that was read; "" for a broken one."""
        try:
            return json.loads(self._text, strict=False)
        except ValueError:
            return ""

    def _end(self, parsed: ParsedDelta) -> None:
        self.done, self.bad = True, not self.begun
        if self.begun and not self._argued:
            parsed.add_arguments(self.index, "{}")
