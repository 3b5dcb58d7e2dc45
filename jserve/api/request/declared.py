"""Declarations of nested request values: their members and the effect of each.

It owns the marks of a schema and the walk over a value beside its schema. A field that is checked by hand is
described by a schema (``fields.shaped``); where that names the members of an object, a member it does not name has
no effect, and the marks say what else has none::

    {"properties": {"role": {...}, "id": LABEL, "audio": refused_member()}}

An object without ``properties`` is open (a JSON schema of a tool); one with
``additionalProperties`` is checked by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

Schema = dict[str, Any]

# Marks of our own in the schemas; ``openapi`` takes the last two out again.
MARK, NEUTRAL, REQUIRED = "x-jserve", "x-neutral", "x-required"


class Holds(StrEnum):
    """The effect of a field or member."""

    APPLIED = "applied"
    LABEL = "label"
    IGNORED = "ignored"
    REFUSED = "refused"


LABEL: Schema = {MARK: Holds.LABEL.value}
"""A member that says nothing about the answer."""


def ignored_member(*neutral: Any) -> Schema:
    """A member without effect, listed as ignored unless its value is ``neutral`` or null."""
    return {MARK: Holds.IGNORED.value, NEUTRAL: [*neutral]}


def refused_member(*neutral: Any) -> Schema:
    """A known member that cannot be honoured; ``neutral`` values ask for nothing and pass."""
    return {MARK: Holds.REFUSED.value, NEUTRAL: [*neutral], "enum": [*neutral, None]}


def held(schema: Mapping[str, Any]) -> Holds:
    """The effect of a field or member declared by ``schema``."""
    return Holds(schema.get(MARK, Holds.APPLIED))


def asks(value: Any, schema: Mapping[str, Any]) -> bool:
    """True if ``value`` asks for something; True and 1 are not one value."""
    neutral = (None, *schema.get(NEUTRAL, ()))
    return not any(value == v and type(value) is type(v) for v in neutral)


def members(schema: Mapping[str, Any], at: str) -> Iterator[tuple[str, Schema]]:
    """(path, declaration) of every member that ``schema`` names, at any depth; a path has ``[]`` for
    the items of a list. A member that several forms of an object have comes once for each."""
    for branch in schema.get("anyOf", ()):
        yield from members(branch, at)
    if "items" in schema:
        yield from members(schema["items"], f"{at}[]")
    for name, member in schema.get("properties", {}).items():
        yield f"{at}.{name}", member
        yield from members(member, f"{at}.{name}")


def unapplied(value: Any, schema: Mapping[str, Any], at: str) -> Iterator[tuple[str, Holds]]:
    """(path, what it does) of every member inside ``value`` that asks for something and is not
    applied. A value of the wrong shape has none: who reads it refuses it."""
    for branch in schema.get("anyOf", ()):
        if _fits(value, branch):
            yield from unapplied(value, branch, at)
            return
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value[: schema.get("maxItems")]):
            yield from unapplied(item, schema["items"], f"{at}[{i}]")
    elif isinstance(value, dict) and "properties" in schema:
        yield from _members(value, schema, at)


def _members(value: dict[str, Any], schema: Mapping[str, Any], at: str) -> Iterator[Any]:
    known: dict[str, Schema] = schema["properties"]
    for name, member in value.items():
        path = f"{at}.{name}"
        if name not in known:
            if member is not None and "additionalProperties" not in schema:
                yield path, Holds.IGNORED
        elif held(known[name]) is Holds.APPLIED:
            yield from unapplied(member, known[name], path)
        elif held(known[name]) is not Holds.LABEL and asks(member, known[name]):
            yield path, held(known[name])


_TYPES = {"object": dict, "array": list, "string": str}


def _fits(value: Any, branch: Mapping[str, Any]) -> bool:
    """True if ``value`` is of the branch's type; for objects, also of the kind its constants say."""
    kind = branch.get("type")
    if not isinstance(kind, str) or not isinstance(value, _TYPES.get(kind, ())):
        return False
    if not isinstance(value, dict):
        return True
    for name, member in branch.get("properties", {}).items():
        wanted = [member["const"]] if "const" in member else member.get("enum")
        if wanted is not None and held(member) is Holds.APPLIED and value.get(name) not in wanted:
            return False
    return True
