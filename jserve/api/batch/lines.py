"""Reads batch requests in OpenAI's JSONL and reports lines that cannot run.

It owns the format of a line and the rule that a ``custom_id`` is unique. ::

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

A line without a ``custom_id`` is known by its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from jserve.errors import BadRequest, ConfigError, shown

Json = dict[str, Any]
Name = str | int
"""The name by which an answer finds its line: the custom_id, or the line's number where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line that asks something, as far as it could be read."""

    number: int
    """From 1."""
    custom_id: str | None
    url: str = ""
    body: Json | None = None
    error: BadRequest | None = None
    """The error of a line that cannot be asked; ``field`` names the part at fault."""

    @property
    def name(self) -> Name:
        return self.number if self.custom_id is None else self.custom_id


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of an input file that are not blank. One that has the ``custom_id`` of an earlier line is
    known by its number and has an error: two answers of one name could not be distinguished.

    Raises:
        ConfigError: the file cannot be read.
    """
    first: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield _unique(read_line(number, raw), first)
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}", field="input") from None


def _unique(line: Line, first: dict[str, int]) -> Line:
    """``line``, or the error that it has the ``custom_id`` of a line in ``first``."""
    if line.custom_id is None or first.setdefault(line.custom_id, line.number) == line.number:
        return line
    parsed = f"line {first[line.custom_id]} has the same custom_id {shown(line.custom_id)}"
    return Line(number=line.number, custom_id=None, error=_fault(parsed, "custom_id"))


def read_line(number: int, raw: bytes) -> Line:
    """One line; what is wrong with it is in its ``error``."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as e:
        return Line(number=number, custom_id=None, error=_fault(f"not valid JSON: {e.msg}"))
    if not isinstance(value, dict):
        return Line(number=number, custom_id=None, error=_fault("must be a JSON object"))
    name = value.get("custom_id")
    custom_id = name if isinstance(name, str) and name else None
    try:
        return Line(number=number, custom_id=custom_id, **_asked(value))
    except BadRequest as error:
        return Line(number=number, custom_id=custom_id, error=error)


def _asked(value: Json) -> Json:
    name, url, body = (value.get(part) for part in ("custom_id", "url", "body"))
    if not isinstance(name, str) or not name:
        raise _fault("custom_id must be a string that is not empty", "custom_id")
    if value.get("method") != "POST":
        raise _fault(f"method must be POST, not {shown(value.get('method'))}", "method")
    if not isinstance(url, str) or not url.startswith("/"):
        raise _fault("url must be a path such as /v1/chat/completions", "url")
    if not isinstance(body, dict):
        raise _fault("body must be a JSON object", "body")
    if body.get("stream"):
        raise _fault("a batch cannot be streamed", "body.stream")
    return {"url": url, "body": body}


def _fault(message: str, field: str | None = None) -> BadRequest:
    return BadRequest(message, field=field, code="invalid_line")


def survey(path: Path) -> int:
    """Number of lines that ask something.

    Raises:
        ConfigError: the file cannot be read.
    """
    return sum(1 for _ in read_lines(path))
