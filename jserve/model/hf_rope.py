"""Reads the rope of a Hugging Face config.json, in all spellings: ``rope_theta`` and ``rope_scaling`` of older files,
``rope_parameters`` of newer ones, one for all layers or one for each type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jserve.model.arch import Rope, RopeScaling
from jserve.model.hf_values import (
    REQUIRED,
    Config,
    boolean,
    integer,
    number,
    refuse,
    without_effect,
)
from jserve.model.rope import KINDS


def rope(
    config: Config,
    *,
    default_theta: float = 10000.0,
    layer_type: str = "",
    H: int = 0,
    default_partial: float = 1.0,
    pairs: bool = False,
    yarn_is_longrope: bool = False,
) -> Rope:
    """The rope from either spelling; transformers gives ``rope_scaling`` precedence.

    Args:
        layer_type: the layers it is of, where config.json may have one for each type.
        H: head size of a family that turns a part of it; 0: all of it turns.
        default_partial: that part, where config.json is silent.
        pairs: as ``Rope.pairs``.
        yarn_is_longrope: a family whose older files say ``su`` or ``yarn`` and mean longrope.

    Raises:
        ConfigError: an unknown type, a missing or non-finite number, or a dictionary per
        layer type where there are no types.
    """
    without_effect(config, *_TOP)
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    raw = config.get(key) or {}
    if not isinstance(raw, Mapping):
        refuse(key, f"must be a mapping, not {raw!r}")
    if any(isinstance(v, Mapping) for v in raw.values()):
        if not isinstance(raw.get(layer_type), Mapping):
            refuse(key, "per layer type is not supported")
        raw = raw[layer_type]
    owner = raw if raw.get("rope_theta") is not None else config
    theta = number(owner, "rope_theta", default_theta)
    if theta <= 1.0:
        refuse("rope_theta", f"must be above 1, not {theta}")
    kind = raw.get("rope_type", raw.get("type", "default"))
    if yarn_is_longrope and kind in ("su", "yarn"):
        kind = "longrope"
    found = Rope(theta=theta, rotary=_rotary(config, raw, H, default_partial), pairs=pairs)
    _check_keys(raw, key, kind)
    if kind == "default":
        return found
    return replace(found, scaling=_scaling(config, raw, key, kind, found.rotary or H))


def _rotary(config: Config, raw: Config, H: int, default: float) -> int:
    """Dimensions that turn, 0 for all."""
    key = "partial_rotary_factor"
    if not H:
        if raw.get(key, 1.0) != 1.0:
            refuse(key, f"{raw[key]!r} is not supported")
        return 0
    part = number(raw if raw.get(key) is not None else config, key, default)
    turned = int(H * part)
    if part > 1 or turned < 2 or turned % 2:
        refuse(key, f"{part:g} of {H} dimensions is no even number from 2 to {H}")
    return 0 if turned == H else turned


def _scaling(config: Config, raw: Config, key: str, kind: Any, turned: int) -> RopeScaling:
    if kind == "longrope":
        return _longrope(config, raw, key, turned)
    original = _original(config, raw, kind)
    stretch = integer(config, "max_position_embeddings") / original
    return RopeScaling(
        kind=kind,
        factor=number(raw, "factor", stretch if kind == "yarn" else REQUIRED, low=1.0),
        original_max_position=original,
        truncate=boolean(raw, "truncate", True),
        **_llama3_numbers(raw) if kind == "llama3" else {},
        **_yarn_numbers(raw) if kind == "yarn" else {},
    )


def _check_keys(raw: Config, key: str, kind: Any) -> None:
    if kind not in ("default", *KINDS):
        refuse(key, f"type {kind!r} is not supported, only default, {', '.join(KINDS)}")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"} | _KEYS[kind]
    for name in raw:
        if name not in known and raw[name] is not None:
            refuse(f"{key}.{name}", f"has no meaning for rope type {kind}")


_KEYS = {
    "default": {"original_max_position_embeddings"},
    "linear": set[str](),
    "dynamic": {"original_max_position_embeddings"},
    "llama3": {"original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",
    },
    "longrope": {
        "original_max_position_embeddings",
        "short_factor",
        "long_factor",
        "attention_factor",
    },
}


def _longrope(config: Config, raw: Config, key: str, turned: int) -> RopeScaling:
    """The short factors, and the length up to which they hold; ``rope.for_requests`` says where the long ones
    do."""
    if not turned:
        refuse(key, "type longrope is not supported in this family")
    short, long = (
        _factors(raw, key, name, turned // 2) for name in ("short_factor", "long_factor")
    )
    original = integer(config if config.get(_ORIGINAL) is not None else raw, _ORIGINAL)
    stated = integer(config, "max_position_embeddings")
    stretch = stated / original
    factor = number(raw, "factor", stretch) if raw.get("factor") is not None else stretch
    return RopeScaling(
        kind="longrope",
        factor=max(1.0, factor),
        original_max_position=original,
        attention_factor=number(raw, "attention_factor", 1.0)
        if raw.get("attention_factor")
        else None,
        factors=short,
        long_factors=long,
        longest=stated,
    )


def _factors(raw: Config, key: str, name: str, n: int) -> tuple[float, ...]:
    given = raw.get(name)
    if not isinstance(given, list | tuple) or len(given) != n or not all(map(_positive, given)):
        refuse(f"{key}.{name}", f"must list {n} positive numbers")
    return tuple(float(x) for x in given)


def _positive(x: Any) -> bool:
    number = isinstance(x, int | float) and not isinstance(x, bool)
    return number and math.isfinite(x) and x > 0


_ORIGINAL = "original_max_position_embeddings"
_TOP = ("rope_scaling", "rope_parameters", "rope_theta", _ORIGINAL)
"""Keys of ropes, of which one spelling leaves some unread."""


def _original(config: Config, raw: Config, kind: str) -> int:
    name = "original_max_position_embeddings"
    if kind in ("llama3", "yarn"):
        for owner in (config, raw):
            if owner.get(name) is not None:
                return integer(owner, name)
    return integer(config, "max_position_embeddings")


def _llama3_numbers(raw: Config) -> dict[str, float]:
    low, high = number(raw, "low_freq_factor", REQUIRED), number(raw, "high_freq_factor", REQUIRED)
    if high < low:
        refuse("high_freq_factor", f"{high} must not be below low_freq_factor {low}")
    return {"low_freq_factor": low, "high_freq_factor": high}


def _yarn_numbers(raw: Config) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        name: number(raw, name, 0.0, low=0.0) if raw.get(name) is not None else None
        for name in ("attention_factor", "mscale", "mscale_all_dim")
    }
    numbers["beta_fast"] = number(raw, "beta_fast", 32.0) if raw.get("beta_fast") else 32.0
    numbers["beta_slow"] = number(raw, "beta_slow", 1.0) if raw.get("beta_slow") else 1.0
    return numbers
