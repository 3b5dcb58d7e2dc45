"""Translates structural tags, as xgrammar, vLLM and SGLang name them, into one Lark grammar.

A format is written together with its ``tail``, the texts of which one ends it, because text that may be anything
ends where its tail is found first::

    tag "<a>" any_text "</a>"         "<a>" until          until[lazy]: TEXT "</a>"
    triggered_tags "<f" ...           (lead rest)* TEXT    lead[lazy]: TEXT "<f"

| type                                       | is                                               |
|--------------------------------------------|--------------------------------------------------|
| const_string, json_schema, regex, grammar  | itself                                           |
| any_text                                   | TEXT, at the end of its tag or of the answer     |
| sequence, or, optional, star, plus, repeat | the operator                                     |
| tag, tags_with_separator                   | begin, content, end                              |
| triggered_tags, dispatch                   | TEXT until a trigger, then what it announces     |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from jserve.grammar.spec import MAX_TAGS, bad, embedded, lark_of, unanchored
from jserve.sampling import StructuredOutputs

NAME = "structural_tag"
Tail = tuple[str, ...] | None
"""The end of a format: one of these texts, or with None the end of the answer."""
ENDED: Tail = ()
"""Something else follows, so the format must end by itself."""
MAX_REPEATS = 1024


def format_grammar(value: dict[str, Any], spec: StructuredOutputs) -> str:
    """The Lark grammar of the tag ``value``, an object with the member ``format``.

    Raises:
        BadRequest: a format of an unknown type or of the wrong shape; its path is named.
    """
    return _Writer(spec).grammar(value.get("format"))


class _Writer:
    """One grammar: the rules so far, and the format types with their writers."""

    def __init__(self, spec: StructuredOutputs) -> None:
        self._spec = spec
        self._rules: list[str] = []
        self._writers: dict[str, Callable[[dict[str, Any], str, Tail], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._optional,
            "star": self._star,
            "plus": self._plus,
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "dispatch": self._dispatch,
        }

    def grammar(self, value: Any) -> str:
        start = self._write(value, "format", None)
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _write(self, value: Any, at: str, tail: Tail) -> str:
        """``value`` and its tail, as an expression."""
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            raise bad(NAME, f"{at} must be an object with a type")
        writer = self._writers.get(kind)
        if writer is None:
            raise bad(NAME, f"{at} is of type {kind[:64]!r}, which is not supported")
        return writer(value, at, tail)

    # What ends by itself.

    def _const_string(self, value: dict[str, Any], at: str, tail: Tail) -> str:
        return _joined(_quoted(_member(value, "value", str, at)), _ends(tail))

    def _json_schema(self, value: dict[str, Any], at: str, tail: Tail) -> str:
        schema = _member(value, "json_schema", dict | bool, at)
        style = value.get("style", "json")
        if style != "json":
            raise bad(NAME, f"{at}.style {str(style)[:64]!r} is not supported, only 'json' is")
        if value.get("any_order"):
            raise bad(NAME, f"{at}.any_order is not supported")
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        return _joined(self._rule(embedded(schema, self._spec)), _ends(tail))

    def _regex(self, value: dict[str, Any], at: str, tail: Tail) -> str:
        pattern = unanchored(_member(value, "pattern", str, at))
        if value.get("excludes"):
            raise bad(NAME, f"{at}.excludes is not supported")
        return _joined(_regex(pattern) if pattern else '""', _ends(tail))

    def _grammar(self, value: dict[str, Any], at: str, tail: Tail) -> str:
        text = lark_of(_member(value, "grammar", str, at))
        lines = [line for line in text.splitlines() if not line.startswith("%llguidance")]
        nested = "\n".join(lines)
        return _joined(self._rule(f"%lark {{\n{nested}\n}}"), _ends(tail))

    # Text that may be anything.

    def _any_text(self, value: dict[str, Any], at: str, tail: Tail) -> str:
        text = self._text(value, at)
        if tail == ENDED:
            raise bad(NAME, f"{at} (any_text) must come last, or last inside a tag")
        return text if tail is None else self._until(text, tail)

    def _text(self, value: dict[str, Any], at: str) -> str:
        """The name of a terminal for text without any of the format's ``excludes``."""
        excludes = _texts(value.get("excludes") or [], f"{at}.excludes")
        without = [f" & ~/(.|\\n)*{_literal(word)}(.|\\n)*/" for word in excludes]
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: /(.|\\n)*/{''.join(without)}")
        return name

    def _until(self, text: str, ends: Iterable[str]) -> str:
        """``text`` up to the first of ``ends``, which is part of it."""
        found = " | ".join(_quoted(end) for end in ends)
        return self._rule(f"{text} ({found})", "[lazy]")

    # Operators.

    def _sequence(self, value: dict[str, Any], at: str, tail: Tail) -> str:
        elements = _listed(value, "elements", at)
        last = len(elements) - 1
        parts = [
            self._write(element, f"{at}.elements[{i}]", tail if i == last else ENDED)
            for i, element in enumerate(elements)
        ]
        return _joined(*parts)

    def _or(self, value: dict[str, Any], at: str, tail: Tail) -> str:
        elements = _listed(value, "elements", at)
        return _either(self._write(e, f"{at}.elements[{i}]", tail) for i, e in enumerate(elements))

    def _content(self, value: dict[str, Any], at: str) -> str:
        return f"({self._write(value.get('content'), f'{at}.content', ENDED)})"

    def _optional(self, value: dict[str, Any], at: str, tail: Tail) -> str:
        return _joined(self._content(value, at) + "?", _ends(tail))

    def _star(self, value: dict[str, Any], at: str, tail: Tail) -> str:
        return _joined(self._content(value, at) + "*", _ends(tail))

    def _plus(self, value: dict[str, Any], at: str, tail: Tail) -> str:
        return _joined(self._content(value, at) + "+", _ends(tail))

    def _repeat(self, value: dict[str, Any], at: str, tail: Tail) -> str:
        low, high = (_member(value, name, int, at) for name in ("min", "max"))
        ordered = 0 <= low <= MAX_REPEATS and (high == -1 or low <= high <= MAX_REPEATS)
        if not ordered:
            raise bad(NAME, f"{at} must have 0 <= min <= max <= {MAX_REPEATS}, or max -1")
        most = "" if high == -1 else str(high)
        return _joined(f"{self._content(value, at)}{{{low},{most}}}", _ends(tail))

    # Tags.

    def _tag(self, value: dict[str, Any], at: str, tail: Tail, cut: str = "") -> str:
        """A tag whose ``begin`` was written as far as ``cut``."""
        begin, ends = _member(value, "begin", str, at), _end_texts(value, at)
        rest = [_quoted(begin[len(cut) :])] if begin[len(cut) :] else []
        if not ends:
            return _joined(*rest, self._write(value.get("content"), f"{at}.content", tail))
        content = self._write(value.get("content"), f"{at}.content", ends)
        return _joined(*rest, content, _ends(tail))

    def _tags(self, value: dict[str, Any], at: str) -> list[tuple[dict[str, Any], str]]:
        """The tags of a format with their paths."""
        tags = _listed(value, "tags", at)
        if len(tags) > MAX_TAGS:
            raise bad(NAME, f"{at}.tags may hold at most {MAX_TAGS}")
        for i, tag in enumerate(tags):
            if not isinstance(tag, dict) or tag.get("type", "tag") != "tag":
                raise bad(NAME, f"{at}.tags[{i}] must be a tag")
        return [(tag, f"{at}.tags[{i}]") for i, tag in enumerate(tags)]

    def _triggered_tags(self, value: dict[str, Any], at: str, tail: Tail) -> str:
        triggers = _texts(value.get("triggers"), f"{at}.triggers")
        if not triggers:
            raise bad(NAME, f"{at}.triggers must not be empty")
        tags = self._tags(value, at)
        cases: dict[str, list[tuple[dict[str, Any], str]]] = {t: [] for t in triggers}
        for tag, where in tags:
            begin = _member(tag, "begin", str, where)
            found = [t for t in triggers if begin.startswith(t)]
            if len(found) != 1:
                raise bad(NAME, f"{where}.begin must start with exactly one of the triggers")
            cases[found[0]].append((tag, where))

        def after(trigger: str) -> str:
            return _either(self._tag(tag, where, ENDED, trigger) for tag, where in cases[trigger])

        pairs = [(trigger, after(trigger)) for trigger in triggers if cases[trigger]]
        first = ""
        if value.get("at_least_one"):
            first = _either(self._tag(tag, where, ENDED) for tag, where in tags)
        once = bool(value.get("stop_after_first"))
        return self._announced(pairs, value, at, tail, first=first, once=once)

    def _dispatch(self, value: dict[str, Any], at: str, tail: Tail) -> str:
        pairs = []
        for i, rule in enumerate(_listed(value, "rules", at)):
            where = f"{at}.rules[{i}]"
            if not isinstance(rule, list) or len(rule) != 2 or not _is_text(rule[0]):
                raise bad(NAME, f"{where} must be a non-empty text and a format")
            pairs.append((rule[0], self._write(rule[1], f"{where}[1]", ENDED)))
        return self._announced(pairs, value, at, tail, once=value.get("loop") is False)

    def _announced(
        self,
        pairs: list[tuple[str, str]],
        value: dict[str, Any],
        at: str,
        tail: Tail,
        *,
        first: str = "",
        once: bool,
    ) -> str:
        """Text in which each of some texts announces an expression.

        Args:
            pairs: (the text, the expression behind it).
            first: what is at the beginning, before any text.
            once: nothing follows the first expression.
        """
        if first and once:
            return _joined(first, _ends(tail))
        if tail == ENDED:
            kind = str(value.get("type"))
            raise bad(NAME, f"{at} ({kind}) must come last, or last inside a tag")
        text = self._text(value, at)
        cases = [_joined(self._until(text, (start,)), then) for start, then in pairs]
        free = text if tail is None else self._until(text, tail)
        if once:
            return _either([free, *(_joined(case, _ends(tail)) for case in cases)])
        return _joined(first, f"{_either(cases)}*", free)

    def _tags_with_separator(self, value: dict[str, Any], at: str, tail: Tail) -> str:
        tags = [self._tag(tag, where, ENDED) for tag, where in self._tags(value, at)]
        one = self._rule(_either(tags))
        separator = _member(value, "separator", str, at)
        more = "" if value.get("stop_after_first") else f"({_joined(_quoted(separator), one)})*"
        expression = f"({_joined(one, more)})"
        if not value.get("at_least_one"):
            expression += "?"
        return _joined(expression, _ends(tail))

    def _rule(self, expression: str, attributes: str = "") -> str:
        """The name of a new rule for ``expression``."""
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part) or '""'


def _either(parts: Iterable[str]) -> str:
    return f"({' | '.join(parts)})"


def _ends(tail: Tail) -> str:
    return _either(map(_quoted, tail)) if tail else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _literal(text: str) -> str:
    """A regular expression for exactly ``text``, as it is written between slashes."""
    return _between_slashes(re.escape(text))


def _regex(pattern: str) -> str:
    return f"/{_between_slashes(pattern)}/"


def _between_slashes(pattern: str) -> str:
    escaped = re.sub(r"\\\n|\n", r"\\n", pattern)
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", escaped, flags=re.DOTALL)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _member(value: dict[str, Any], name: str, kind: Any, at: str) -> Any:
    found = value.get(name)
    wrong = not isinstance(found, kind) or (kind is int and isinstance(found, bool))
    if wrong:
        if isinstance(found, dict) and isinstance(found.get("type"), str):
            kind_of = found["type"][:64]
            raise bad(NAME, f"{at}.{name} is of type {kind_of!r}, which is not supported")
        raise bad(NAME, f"{at}.{name} is missing or of the wrong type")
    return found


def _listed(value: dict[str, Any], name: str, at: str) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list) or not found:
        raise bad(NAME, f"{at}.{name} must be a list, and not empty")
    return found


def _texts(value: Any, at: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(map(_is_text, value)):
        raise bad(NAME, f"{at} must be a list of non-empty texts")
    return tuple(value)


def _end_texts(value: dict[str, Any], at: str) -> tuple[str, ...]:
    """The texts of which one ends a tag; none where it ends with its content."""
    found = value.get("end")
    if isinstance(found, list):
        return _texts(found, f"{at}.end")
    end = _member(value, "end", str, at)
    return (end,) if end else ()
