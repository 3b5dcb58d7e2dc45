"""Renames error fields from internal names to the client's dialect.

Names are exact, or begin with a dot and stand for a part of a path::

    {"stop": "stop_sequences", ".function.": "."}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from jserve.errors import JserveError

E = TypeVar("E", bound=JserveError)


def renamed(error: E, names: Mapping[str, str]) -> E:
    """``error`` with the fields it names, the one at fault and others in its words, under ``names``."""
    field = error.field or ""
    name = dialect_name(field, names)
    words = _reworded(error.message, {**names, field: name})
    if name == field and words == error.message:
        return error
    return type(error)(words, field=name or None, code=error.code, retry_after=error.retry_after)


def dialect_name(field: str, names: Mapping[str, str]) -> str:
    """The dialect's name of ``field``: by its whole path, or by a part of it that begins with a
    dot."""
    if field in names:
        return names[field]
    for old, new in names.items():
        if old.startswith(".") and old in field:
            return field.replace(old, new)
    return field


def _reworded(message: str, names: Mapping[str, str]) -> str:
    """``message`` with whole names replaced. One that is also a word of English ("prompt") is a
    name only where the message begins."""
    longest_first = sorted((n for n in names if n and n[0] != "."), key=len, reverse=True)
    if not longest_first:
        return message
    known = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")

    def new(found: re.Match[str]) -> str:
        word = found[0].isalpha() and found.start() > 0
        return found[0] if word else names[found[0]]

    return known.sub(new, message)
