"""Checked values of ``quantization_config``, and the matching of module names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jserve.errors import ConfigError

FIELD = "quantization_config"
MAX_PATTERN = 200
"""Characters of a regular expression in a checkpoint."""
RISKY = re.compile(r"[+*}?)]\s*[+*{]|\(\?|\\\d|\)[?]")
"""Nested quantifiers, groups with extensions and back references, which can run for ever."""


def refuse(key: str, why: str) -> NoReturn:
    """Raise the ConfigError of a key of ``quantization_config``."""
    field = f"{FIELD}.{key}" if key else FIELD
    raise ConfigError(f"config.json: {field}: {why}", field=field)


def one_of(config: Mapping[str, Any], key: str, *allowed: Any, at: str = "") -> Any:
    """``config[key]``, None where it is missing.

    Raises:
        ConfigError: it is none of ``allowed``.
    """
    value = config.get(key)
    if not any(type(value) is type(a) and value == a for a in allowed):
        names = ", ".join(repr(a) for a in allowed)
        refuse(f"{at}{key}", f"{value!r} is not supported, only {names}")
    return value


def group_size(config: Mapping[str, Any], key: str = "group_size", at: str = "") -> int:
    """Inputs that share a scale; 0 where the value is -1: all of a row."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        refuse(f"{at}{key}", f"must be a positive number or -1, not {value!r}")
    return max(value, 0)


def names(config: Mapping[str, Any], key: str, at: str = "") -> tuple[str, ...]:
    """A list of module names, () where it is missing or null."""
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        refuse(f"{at}{key}", "must be a list of names")
    for name in value:
        if not isinstance(name, str):
            refuse(f"{at}{key}", f"{name!r} is no name")
        check_pattern(name, f"{at}{key}")
    return tuple(value)


def check_pattern(name: str, key: str) -> None:
    """Refuse a regular expression that is too long or could run for ever; it comes from a checkpoint."""
    if not name.startswith("re:"):
        return
    if len(name) > MAX_PATTERN or RISKY.search(name):
        refuse(key, f"{name[:80]!r} is too long, or has nested repeats or groups with extensions")
    try:
        re.compile(name[3:])
    except re.error as error:
        refuse(key, f"{name[:80]!r} is no regular expression: {error}")


def matches(module: str, pattern: str) -> bool:
    """True if ``pattern`` is the name of the module, or ``re:`` and an expression that its beginning matches."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern


def is_linear(module: str) -> bool:
    """True for matrices that activations are multiplied with: all but the table of the embedding."""
    return not module.endswith("embed_tokens")
