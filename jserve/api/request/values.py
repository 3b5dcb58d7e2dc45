"""Parses list, map and union fields with explicit bounds.

It owns the shapes of ``prompt``, ``stop``, ``logit_bias`` and id lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from jserve.api.request.naming import renamed
from jserve.api.request.parsed import ModelCard
from jserve.errors import BadRequest, shown
from jserve.request_options import MAX_RETENTIONS, Retention
from jserve.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS

MAX_CHOICES = 128
MAX_STOP_CHARS = 1024
MAX_SALT = 128
MAX_STOPS = 16
MAX_PICKS = 1024
MAX_XARGS = 16
MAX_XARGS_BYTES = 1 << 16

# Schemas of the fields, for readers; the functions below check the values.
STOP = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
        {
            "type": "array",
            "maxItems": MAX_STOPS,
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
        },
        {"type": "null"},
    ]
}
BIAS = {
    "type": ["object", "null"],
    "maxProperties": MAX_LOGIT_BIAS,
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": {"type": "string"}},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_CHOICES,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ]
}
PICKS = {
    "type": ["array", "null"],
    "minItems": 1,
    "maxItems": MAX_PICKS,
    "items": {"type": "integer", "minimum": 0},
}
_XARG = {"type": ["string", "number", "boolean"]}
XARGS = {
    "type": ["object", "null"],
    "maxProperties": MAX_XARGS,
    "propertyNames": {"pattern": "^[A-Za-z0-9_-]{1,64}$"},
    "additionalProperties": {"anyOf": [_XARG, {"type": "array", "items": _XARG}]},
}
CUSTOM = {
    "type": ["object", "null"],
    "maxProperties": MAX_XARGS,
    "propertyNames": {"pattern": "^[A-Za-z0-9_-]{1,64}$"},
    "additionalProperties": {
        "anyOf": [
            {"type": ["number", "boolean"]},
            {"type": "object", "additionalProperties": {"type": "number"}},
        ]
    },
}
RETAIN = {
    "type": ["array", "null"],
    "maxItems": MAX_RETENTIONS,
    "items": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "start": {"type": "integer", "minimum": 0},
            "end": {"type": ["integer", "null"], "minimum": 1},
            "priority": {"type": "integer", "minimum": 0, "maximum": 100},
            "seconds": {"type": "number", "minimum": 0, "maximum": 86400},
        },
    },
}


def prompts_of(value: Any, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    """``prompt`` in any of its four forms: text, texts, token ids, lists of token ids.

    Raises:
        BadRequest: empty, of mixed or wrong type, or an id outside the vocabulary.
    """
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadRequest("prompt must be text or token ids, and not empty", field="prompt")
    if all(isinstance(v, int) for v in value):
        value = [value]
    if len(value) > MAX_CHOICES:
        raise BadRequest(f"prompt may hold at most {MAX_CHOICES} prompts", field="prompt")
    if all(isinstance(v, str) for v in value):
        return tuple(value)
    if not all(isinstance(v, list) for v in value):
        raise BadRequest("prompt must hold either texts or lists of token ids", field="prompt")
    if len(value) == 1:
        return (ids_of(value[0], "prompt", vocab_size),)
    return tuple(ids_of(v, "prompt", vocab_size, f"[{i}]") for i, v in enumerate(value))


def ids_of(value: Any, field: str, vocab_size: int, at: str = "") -> tuple[int, ...]:
    """Token ids of the vocabulary; ``at`` is their place inside ``field``.

    Raises:
        BadRequest: ``value`` is no list of ids; the first one that is none is named.
    """
    if not isinstance(value, list | tuple):
        raise BadRequest(f"{field} must be a list of token ids", field=field)
    if value and set(map(type, value)) == {int} and min(value) >= 0 and max(value) < vocab_size:
        return tuple(value)
    for i, number in enumerate(value):
        if type(number) is not int or not 0 <= number < vocab_size:
            range_ = f"token ids are integers in [0, {vocab_size - 1}]"
            raise BadRequest(f"{field}{at}[{i}] is {_shown(number)}; {range_}", field=field)
    return ()


def _shown(value: object) -> str:
    """A value of the client for a message: numbers as they are."""
    return str(value) if type(value) is int and abs(value) < 1 << 64 else shown(value)


def salt_of(salt: str | None) -> str:
    if salt is None:
        return ""
    if not 0 < len(salt) <= MAX_SALT or any(c in "@/\\\0" for c in salt):
        raise BadRequest(
            f"cache_salt must be 1 to {MAX_SALT} characters, without @ / \\ or NUL",
            field="cache_salt",
        )
    return salt


def name_of(value: str | None, field: str) -> str | None:
    if value is not None and not 0 < len(value) <= MAX_SALT:
        raise BadRequest(f"{field} must be 1 to {MAX_SALT} characters", field=field)
    return value


def retain_of(value: Any) -> tuple[Retention, ...]:
    """``retain``: how long the KV of token ranges of the prompt is worth keeping.

    Raises:
        BadRequest: not a list of ranges, or a range that ``Retention`` refuses.
    """
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_RETENTIONS:
        raise BadRequest(f"retain must be a list of at most {MAX_RETENTIONS}", field="retain")
    known = {"start", "end", "priority", "seconds"}
    for i, hint in enumerate(value):
        if not isinstance(hint, dict) or not hint.keys() <= known:
            raise BadRequest(
                f"retain[{i}] must be an object of {', '.join(sorted(known))}", field=f"retain[{i}]"
            )
    return tuple(_retention(hint, f"retain[{i}]") for i, hint in enumerate(value))


def _retention(hint: dict[str, Any], at: str) -> Retention:
    try:
        return Retention(**hint)
    except BadRequest as e:
        raise renamed(e, {f"retain.{name}": f"{at}.{name}" for name in hint}) from None


def xargs_of(value: Any) -> dict[str, Any]:
    """``vllm_xargs``: what the request asks of step features, by their names.

    Raises:
        BadRequest: not an object from names to strings, numbers, booleans or lists of them, or a larger one
            than 16 names or 64 KiB of JSON.
    """
    field = "vllm_xargs"
    for name, asked in _named(value, field).items():
        items = asked if isinstance(asked, list) else [asked]
        if not {*map(type, items)} <= {str, int, float, bool}:
            kinds = "a string, a number, a boolean or a list of these"
            raise BadRequest(f"{field}.{name} must be {kinds}", field=f"{field}.{name}")
    return value or {}


def check_taps(asked: Mapping[str, Any], card: ModelCard) -> None:
    """Raises BadRequest for activations of a server that keeps them to itself."""
    for name in card.taps:
        if name in asked:
            field = f"vllm_xargs.{name}"
            raise BadRequest(f"{field} gives activations, which needs --allow-taps", field=field)


def custom_of(value: Any, taken: Mapping[str, Any]) -> dict[str, Any]:
    """``custom_params``: the numbers that a request gives logits processors, by their names.

    Args:
        taken: what ``xargs_of`` gave, which has none of these names.

    Raises:
        BadRequest: not an object from names to numbers, true or objects of numbers, a larger one than that of
            ``xargs_of``, or a name that is ``taken``.
    """
    field = "custom_params"
    for name, asked in _named(value, field).items():
        at = f"{field}.{name}"
        numbers = asked.values() if isinstance(asked, dict) else [asked]
        if asked is not True and not {*map(type, numbers)} <= {int, float}:
            raise BadRequest(f"{at} must be true, a number or an object of numbers", field=at)
        if name in taken:
            raise BadRequest(f"{at} is in vllm_xargs too", field=at)
    return value or {}


def _named(value: Any, field: str) -> dict[str, Any]:
    """An object from names of step features, empty for None. Raises BadRequest for anything else and for a larger one
    than ``MAX_XARGS`` names or ``MAX_XARGS_BYTES`` of JSON."""
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_XARGS:
        raise BadRequest(f"{field} must be an object of at most {MAX_XARGS} names", field=field)
    for name in value:
        if not re.fullmatch(XARGS["propertyNames"]["pattern"], name):
            raise BadRequest(
                f"{field} has the name {shown(name)}, which none can have", field=field
            )
    try:
        size = len(orjson.dumps(value))
    except orjson.JSONEncodeError:  # nested too deep
        size = MAX_XARGS_BYTES + 1
    if size > MAX_XARGS_BYTES:
        raise BadRequest(f"{field} may take at most {MAX_XARGS_BYTES} bytes of JSON", field=field)
    return value


def top_of(value: int, field: str) -> int:
    if not 0 <= value <= MAX_LOGPROBS:
        raise BadRequest(f"{field} must be in [0, {MAX_LOGPROBS}]", field=field)
    return value


def stop_of(value: Any) -> tuple[str, ...]:
    words = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(words, list) or any(not isinstance(w, str) for w in words[:64]):
        raise BadRequest("stop must be a string or a list of strings", field="stop")
    if len(words) > MAX_STOPS or any(not 0 < len(w) <= MAX_STOP_CHARS for w in words):
        raise BadRequest(
            f"stop may hold at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters",
            field="stop",
        )
    return tuple(words)


def stop_ids_of(value: list[int] | None, card: ModelCard) -> tuple[int, ...]:
    ids = ids_of(value or (), "stop_token_ids", card.vocab_size)
    if len({*ids, *card.eos_ids}) > MAX_STOP_IDS:
        raise BadRequest(
            f"stop_token_ids and the model's end tokens may be {MAX_STOP_IDS} ids together",
            field="stop_token_ids",
        )
    return ids


def bias_of(value: Any, vocab_size: int) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise BadRequest(
            f"logit_bias must be an object of at most {MAX_LOGIT_BIAS} entries", field="logit_bias"
        )
    found: dict[int, float] = {}
    for key, bias in value.items():
        number = int(key) if re.fullmatch(r"[0-9]{1,9}", key, re.ASCII) else -1
        if not 0 <= number < vocab_size:
            raise BadRequest(
                f"logit_bias has the key {shown(key)}; token ids are integers in [0, {vocab_size - 1}]",
                field="logit_bias",
            )
        found[number] = bias
    return found
