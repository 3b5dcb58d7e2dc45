"""Declares an option as a dataclass field with help and range, and converts its value."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from jserve.errors import ConfigError


def opt(default: Any, help: str, **meta: Any) -> Any:
    """A dataclass field that is an option.

    Args:
        default: its type is the option's: str, int, float, bool or a tuple of str.
        help: one line with the unit.
        meta: where they apply, ``min``, ``max``, ``choices``, ``aliases`` (other spellings of choices)
            and ``json`` (types of what the text stands for, which may also be given itself).
    """
    return dataclasses.field(default=default, metadata={"help": help, **meta})


def checked(f: dataclasses.Field[Any], value: Any, name: str = "") -> Any:
    """``value`` as option ``f`` takes it: converted from text where needed, inside its range.

    Raises:
        ConfigError: wrong type, not a choice, or out of range; calls the option ``name``.
    """
    name = name or f.name
    value = _convert(f, value, name)
    value = f.metadata.get("aliases", {}).get(value, value)
    choices, low, high = (f.metadata.get(k) for k in ("choices", "min", "max"))
    if choices is not None and value not in choices:
        raise ConfigError(
            f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}", field=name
        )
    # Negated, so that NaN is refused.
    if low is not None and not value >= low:
        raise ConfigError(f"{name} must be at least {low}, not {value}", field=name)
    if high is not None and not value <= high:
        raise ConfigError(f"{name} must be at most {high}, not {value}", field=name)
    return value


def _convert(f: dataclasses.Field[Any], value: Any, name: str) -> Any:
    kind = type(f.default)
    try:
        if kind is tuple:
            return _texts(value)
        if kind is bool:
            return _boolean(value)
        if kind is str:
            parsed = isinstance(value, f.metadata.get("json", ()))
            return json.dumps(value) if parsed else _text(value)
        if isinstance(value, bool):
            raise ValueError("a boolean")
        if kind is int and float(value) != int(value):
            raise ValueError("not whole")
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name} must be {kind.__name__}, not {value!r}", field=name) from None


def _boolean(value: Any) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() in words:
        return words[str(value).lower()]
    raise ValueError(value)


def _texts(value: Any) -> tuple[str, ...]:
    """The items of a list, or of text with commas. Empty ones are none: a variable that is set to ""
    says what one that is not set says."""
    if not isinstance(value, str | list | tuple):
        raise TypeError(value)
    items = value.split(",") if isinstance(value, str) else map(_text, value)
    return tuple(item for item in items if item)


def _text(value: Any) -> str:
    if value is None or isinstance(value, dict | list | tuple | bool):
        raise TypeError(value)
    return str(value)
