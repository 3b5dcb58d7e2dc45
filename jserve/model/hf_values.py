"""Reads values of a Hugging Face config.json: checked, and refused by their key.

It owns ``ConfigReader``, which remembers the keys that were read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from jserve.errors import ConfigError

Config = Mapping[str, Any]

REQUIRED: Any = object()


class ConfigReader(Mapping[str, Any]):
    """A config.json that knows which of its keys were read."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._config[key]

    def peek(self, key: str) -> Any:
        """The value of ``key``, which counts as read no more than before."""
        return self._config[key]

    def or_else(self, **defaults: Any) -> ConfigReader:
        """The same reader where keys that are missing or null have a value."""
        known = {key: value for key, value in self._config.items() if value is not None}
        found = ConfigReader({**self._config, **defaults, **known})
        found.read = self.read
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


def refuse(key: str, why: str) -> NoReturn:
    """Raise the ConfigError for one key of config.json."""
    raise ConfigError(f"config.json: {key} {why}", field=key)


def or_else(config: Config, **defaults: Any) -> Config:
    """``config`` where keys that are missing or null have a value."""
    reader = config if isinstance(config, ConfigReader) else ConfigReader(config)
    return reader.or_else(**defaults)


def without_effect(config: Config, *keys: str) -> None:
    """These say nothing in this family, or beside its other keys: they count as read."""
    for key in keys:
        config.get(key)


def only(config: Config, key: str, *values: Any) -> None:
    """Refuse a value of ``key`` that is none of ``values``; null and missing are the first."""
    asked = config.get(key)
    if asked is not None and asked not in values:
        refuse(key, f"{asked!r} is not supported, only {' or '.join(map(str, values))}")


def integer(config: Config, key: str, default: Any = REQUIRED, low: int = 1) -> int:
    """A whole number at least ``low``; null and missing give ``default``."""
    value = _value(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        refuse(key, f"must be an integer of at least {low}, not {value!r}")
    return value


def number(config: Config, key: str, default: Any = REQUIRED, low: float | None = None) -> float:
    """A finite number, positive or at least ``low``; null and missing give ``default``."""
    value = _value(config, key, default)
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or (value <= 0 if low is None else value < low):
        bound = "above 0" if low is None else f"of at least {low:g}"
        refuse(key, f"must be a finite number {bound}, not {value!r}")
    return float(value)


def optional_number(config: Config, key: str, default: float) -> float:
    """A finite positive number; missing gives ``default``, null 0."""
    if key in config and config[key] is None:
        return 0.0
    return number(config, key, default, low=0.0)


def boolean(config: Config, key: str, default: bool) -> bool:
    """True or false; null and missing give ``default``."""
    value = _value(config, key, default)
    if not isinstance(value, bool):
        refuse(key, f"must be true or false, not {value!r}")
    return value


def _value(config: Config, key: str, default: Any) -> Any:
    value = config.get(key)
    if value is None and default is REQUIRED:
        refuse(key, "is missing")
    return default if value is None else value
