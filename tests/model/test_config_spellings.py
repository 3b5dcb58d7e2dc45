"""Older spellings of the keys of config.json mean what those that transformers writes today mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jserve.model.families import family_for
from tests.model.more_cases import MORE
from tests.model.test_parity import CASES

ALL = CASES | MORE
COUNTS = ("num_experts", "num_local_experts")
NO_OLDER = ("gpt-oss-listed",)
"""A rope without scaling can only be said in ``rope_parameters``: GPT-OSS is yarn where a file is silent."""


def stated(case: str) -> dict[str, Any]:
    """The config.json that transformers writes."""
    from tests.model import hf  # every worker collects this file, few run it

    architecture, switches = ALL[case]
    switches = {k: v for k, v in switches.items() if k != "seed"}
    config = hf.config_of(architecture, **hf.SIZES | switches).to_dict()
    return {**config, "architectures": [architecture]}


def older_rope(config: dict[str, Any]) -> dict[str, Any]:
    """``rope_theta``, ``rope_scaling`` and what stood beside them in place of ``rope_parameters``."""
    raw, config = config["rope_parameters"], {**config}
    del config["rope_parameters"]
    if "sliding_attention" in raw:
        config["rope_local_base_freq"] = raw["sliding_attention"]["rope_theta"]
        raw = raw["full_attention"]
    top = {k: raw[k] for k in ("rope_theta", "partial_rotary_factor") if k in raw}
    scaling = {k: v for k, v in raw.items() if k not in top}
    kind = scaling.pop("rope_type", "default")
    return {
        **config,
        **top,
        "rope_scaling": None if kind == "default" else scaling | {"type": kind},
    }


def other_count(config: dict[str, Any]) -> dict[str, Any]:
    """Each of ``COUNTS`` for the other."""
    swap = dict(zip(COUNTS, reversed(COUNTS), strict=True))
    return {swap.get(k, k): v for k, v in config.items()}


def respelled(config: dict[str, Any], how: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """``config`` with its text part as ``how`` spells it."""
    if "text_config" in config:
        return {**config, "text_config": how(config["text_config"])}
    return how(config)


def same(config: dict[str, Any], how: Callable[..., dict[str, Any]]) -> None:
    other = respelled(config, how)
    assert other != config
    family = family_for(config)
    assert family.arch(other) == family.arch(config)


@pytest.mark.parametrize("case", [c for c in ALL if c not in NO_OLDER])
def test_an_older_rope_is_the_same(case: str) -> None:
    same(stated(case), older_rope)


@pytest.mark.parametrize("case", [c for c, (_, x) in ALL.items() if any(k in x for k in COUNTS)])
def test_either_count_of_experts_is_the_same(case: str) -> None:
    same(stated(case), other_count)
