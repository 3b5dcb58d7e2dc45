"""Checked values of ``quantization_config``, and the matching of module names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

from jserve.errors import ConfigError

FIELD = "quantization_config"
MAX_PATTERN = 200
"""Characters of a regular expression in a checkpoint."""
RISKY = re.compile(r"[+*}?)]\s*[+*{]|\(\?|\\\d|\)[?]")
"""Nested quantifiers, groups with extensions and back references, which can run for ever."""
REPEAT_WAYS = 64
"""Ways of a repeat on a name: it ends at any of its characters."""
MAX_WAYS = REPEAT_WAYS**3
"""Ways in which a pattern may be tried on a name: milliseconds, where each of them is."""
MAX_WAYS_OF_ALL = 4 * MAX_WAYS
"""Of all patterns of a checkpoint, which each of its modules may be compared with."""
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""A character of a regular expression, escaped or not, or a set of them."""
LAST_REPEAT = re.compile(r"(?<!\\)\.[*+]\$?$")
"""Takes what is left of a name, at once."""


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
    check_patterns(value, f"{at}{key}")
    return tuple(value)


def check_patterns(names: Iterable[str], key: str) -> None:
    """Refuse regular expressions (names with ``re:``) that are too long or could run for ever; they are a
    checkpoint's."""
    total = 0
    for name in names:
        total += _checked_ways(name, key)
        if total > MAX_WAYS_OF_ALL:
            refuse(key, "has too many expressions that a name may match in many ways")


def _checked_ways(name: str, key: str) -> int:
    """In how many ways a pattern may be tried; it is checked before."""
    if not name.startswith("re:"):
        return 0
    if len(name) > MAX_PATTERN or RISKY.search(name):
        refuse(key, f"{name[:80]!r} is too long, or has nested repeats or groups with extensions")
    try:
        re.compile(name[3:])
    except (re.error, OverflowError) as error:
        refuse(key, f"{name[:80]!r} is no regular expression: {error}")
    found = ways(name[3:])
    if found > MAX_WAYS:
        refuse(key, f"{name[:80]!r} has too many repeats and alternatives")
    return found


def ways(pattern: str) -> int:
    """An upper bound of the ways in which a valid expression without nested repeats may be tried on a name.

    What stands in a row multiplies, alternatives add up; a last ``.*`` has one.
    """
    tried = [[0, 1]]  # of each open group: alternatives that are over, and the one that is read
    for token in TOKEN.findall(LAST_REPEAT.sub("", pattern)):
        if token == "(":
            tried.append([0, 1])
        elif token == ")" and len(tried) > 1:
            over = sum(tried.pop())
            tried[-1][1] *= over
        elif token == "|":
            tried[-1] = [sum(tried[-1]), 1]
        elif token in ("*", "+", "{"):
            tried[-1][1] *= REPEAT_WAYS
        elif token == "?":
            tried[-1][1] *= 2
    return sum(map(sum, tried))


@lru_cache(maxsize=1 << 16)
def matches(module: str, pattern: str) -> bool:
    """True if ``pattern`` is the name of the module, or ``re:`` and an expression that its beginning matches."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern


def of_auto_round(config: Mapping[str, Any]) -> bool:
    """True for what auto-round wrote, whatever the format: a scale has the sign of the largest weight of its group."""
    made_by = (config.get("quant_method"), config.get("provider"))
    return "autoround_version" in config or any("auto-round" in str(name) for name in made_by)


def is_linear(module: str) -> bool:
    """True for matrices that activations are multiplied with: all but the table of the embedding."""
    return not module.endswith("embed_tokens")
