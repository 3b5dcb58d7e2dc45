"""Declares request fields and validates a JSON object against them.

It owns the kinds of fields and the promise that each, and each member of an object inside one (``declared``), is
applied, refused by name, or listed as ignored. The declarations also make ``/openapi.json`` and the table of
``/v1/support``; a body says all there is to say of its endpoint's fields::

    temperature: float | None = sampled("temperature")   applied; its range is SamplingParams'
    stop: Any = shaped(STOP)                              applied; checked by hand, STOP describes it
    suffix: Any = refused("")                             refused, except the values that ask nothing
    store: bool | None = ignored(False)                   no effect; listed unless it asks nothing
    user: str | None = label()                            no effect by its nature, never listed
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from jserve.api.request.declared import (
    LABEL,
    REQUIRED,
    Holds,
    Schema,
    asks,
    held,
    ignored_member,
    members,
    refused_member,
    unapplied,
)
from jserve.errors import BadRequest, Unsupported
from jserve.sampling import RANGES

MAX_LISTED = 20


class Fields(BaseModel):
    """Base of all bodies and of the objects in them: exact types, unknown names are kept."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


B = TypeVar("B", bound=Fields)


def shaped(schema: Schema, *, required: bool = False) -> Any:
    """An applied field that is checked by hand; ``schema`` says to readers what it takes."""
    return Field(default=None, json_schema_extra=schema | ({REQUIRED: True} if required else {}))


def sampled(name: str, *, high: float | None = None, required: bool = False) -> Any:
    """An applied number with the range that ``SamplingParams`` has for ``name``."""
    allowed = RANGES[name]
    low = "exclusiveMinimum" if allowed.low_open else "minimum"
    top = allowed.high if high is None else high
    whole = int if allowed.whole else float
    return shaped({low: whole(allowed.low), "maximum": whole(top)}, required=required)


def label() -> Any:
    """A field that says nothing about the answer."""
    return Field(default=None, json_schema_extra=LABEL)


def ignored(*neutral: Any) -> Any:
    """A field without effect, listed as ignored unless its value is ``neutral`` or null."""
    return Field(default=None, json_schema_extra=ignored_member(*neutral))


def refused(*neutral: Any) -> Any:
    """A known field that cannot be honoured; ``neutral`` values ask for nothing and pass."""
    return Field(default=None, json_schema_extra=refused_member(*neutral))


def declaration(field: FieldInfo) -> Mapping[str, Any]:
    """The schema that a field was declared with."""
    extra = field.json_schema_extra
    return extra if isinstance(extra, Mapping) else {}


def holds(field: FieldInfo) -> Holds:
    """The kind that a field was declared as."""
    return held(declaration(field))


def inner_body(field: FieldInfo) -> type[Fields] | None:
    """The kind of object that a field holds, where it is one with fields of its own."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Fields)), None)


def members_of(field: FieldInfo, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(path, declaration) of every member that the objects inside a field may have."""
    inner = inner_body(field)
    if inner is None:
        yield from members(declaration(field), name)
        return
    for member, its_field in inner.model_fields.items():
        yield f"{name}.{member}", declaration(its_field)
        yield from members_of(its_field, f"{name}.{member}")


def validate(kind: type[B], raw: Mapping[str, Any], *, strict: bool = False) -> B:
    """``raw`` as a ``kind`` of body: types checked, known fields that are not honoured refused.

    Values with more to them than a type are checked where they are read; their bounds follow
    before anything is sent to the engine (``SamplingParams``, ``admission.check``).

    Args:
        strict: also refuse fields that would have no effect.

    Raises:
        BadRequest: a field of the wrong type, or one that is required and missing, named.
        Unsupported: a known field that is not honoured, named; with ``strict``, any other.
    """
    try:
        body = kind.model_validate(raw)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False, include_context=False)[0]
        name = _path(first["loc"])
        raise BadRequest(f"{name}: {first['msg']}", field=name) from None
    except RecursionError:
        raise BadRequest("the body is nested too deep", code="invalid_json") from None
    for name, does in _unapplied(body):
        # vLLM once took guided_*; to drop one silently would drop a constraint.
        if does is Holds.REFUSED or name.startswith("guided_"):
            name = _printable(name)
            instead = _instead(name, kind)
            raise Unsupported(f"{name} is not supported by this server{instead}", field=name)
    without_effect = ignored_fields(body) if strict else ()
    if without_effect:
        name = without_effect[0]
        raise Unsupported(f"{name} has no effect on this server", field=name)
    for name, field in kind.model_fields.items():
        if declaration(field).get(REQUIRED) and getattr(body, name) is None:
            raise BadRequest(f"{name} is required", field=name)
    return body


def _instead(name: str, kind: type[Fields]) -> str:
    """Advice what to send instead of vLLM's old fields for structures, where ``kind`` has their successor."""
    if not name.startswith("guided_") or "structured_outputs" not in kind.model_fields:
        return ""
    member = name.removeprefix("guided_")
    if member not in ("json", "regex", "choice", "grammar"):
        return "; structured_outputs takes its place"
    return f'; send "structured_outputs": {{"{member}": ...}}'


def _path(loc: tuple[Any, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.lstrip(".") or "body"


def ignored_fields(body: Fields) -> tuple[str, ...]:
    """Names of the fields and members set in ``body`` that had no effect: printable, 20 at most, of
    the members of a list's items the first one of each name."""
    first: dict[str, str] = {}
    for name, does in _unapplied(body):
        if does is Holds.IGNORED:
            first.setdefault(re.sub(r"\[[0-9]+\]", "[]", name), _printable(name))
        if len(first) == MAX_LISTED:
            break
    return tuple(first.values())


def _printable(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.\-\[\]]", "?", name[:64])


def _unapplied(body: Fields, at: str = "") -> Iterator[tuple[str, Holds]]:
    """(path, what it does) of all in ``body`` that asks for something and is not applied."""
    for name, value in (body.model_extra or {}).items():
        if value is not None:
            yield at + name, Holds.IGNORED
    given = body.model_fields_set  # what else is declared asks for nothing
    for name, field in type(body).model_fields.items():
        if name not in given:
            continue
        value, does = getattr(body, name), holds(field)
        if isinstance(value, Fields):
            yield from _unapplied(value, f"{at}{name}.")
        elif does is Holds.APPLIED:
            yield from unapplied(value, declaration(field), at + name)
        elif does is not Holds.LABEL and asks(value, declaration(field)):
            yield at + name, does
