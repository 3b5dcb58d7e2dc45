"""Medusa checkpoints as their trainers publish them, read into the drafter they describe.

It owns the layouts. Head i, residual block b of n::

    FasterDecoding/Medusa   medusa_lm_head.safetensors    {i}.{b}.linear.weight  .bias   {i}.{n}.weight
    the same, in a model    medusa_head. or medusa_heads. before each name
    vLLM                    blocks.{i}.layers.{b}.weight, .bias if medusa_fc_bias   lm_heads.{i}.weight

Heads without an lm_head (FasterDecoding's version 2, vLLM's ``original_lm_head``) use the target's.
Some published config.json state fewer heads than the file holds; all heads of the file are taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jserve.model.arch import Arch
from jserve.model.hf_values import boolean, integer, refuse
from jserve.speculation.drafters.head_files import Head, HeadFiles, must_be, renamed
from jserve.speculation.drafters.medusa import medusa

_PREFIXES = ("medusa_heads.", "medusa_head.", "")
_LINEAR = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_LM_HEAD = re.compile(r"(\d+)\.\d+\.weight")


def read_medusa(files: HeadFiles, target: Arch) -> Head:
    """The drafter that a Medusa directory describes.

    Raises:
        ConfigError: config.json asks for what the heads cannot do, or does not fit the target.
        WeightsError: a weight file is broken.
    """
    config, names = files.config, files.names()
    _check(config, target)
    n_blocks = _count(config, "medusa_num_layers", "num_hidden_layers", 1)
    vllm = any(name.startswith("blocks.") for name in names)
    first = "lm_heads.0.weight" if vllm else f"{_prefix(names)}0.{n_blocks}.weight"
    original = boolean(config, "original_lm_head", False)
    drafter = medusa(
        target,
        n_heads=max(_count(config, "medusa_num_heads", "num_heads"), _in_file(names)),
        n_blocks=n_blocks,
        own_unembed=not original and (files.dummy or first in names),
        bias=not vllm or "blocks.0.layers.0.bias" in names,
        prefix="" if vllm else _prefix(names),
    )
    unread = ("lm_head.weight", "lm_heads.0.weight") if original else ()
    if vllm:
        return Head(replace(drafter, specs=lambda tp: renamed(drafter.specs(tp), _in_vllm)), unread)
    return Head(drafter, unread)


def _check(config: Mapping[str, Any], target: Arch) -> None:
    must_be(config, "hidden_size", target.D)
    must_be(config, "vocab_size", target.V)
    must_be(config, "truncated_vocab_size", target.V)
    if config.get("logit_scale") not in (None, 1, 1.0):
        refuse("logit_scale", f"{config['logit_scale']!r} is not supported")


def _count(config: Mapping[str, Any], key: str, vllm: str, *default: int) -> int:
    return integer(config, vllm if config.get(key) is None else key, *default)


def _prefix(names: set[str]) -> str:
    return next(p for p in _PREFIXES if not p or any(name.startswith(p) for name in names))


def _in_file(names: set[str]) -> int:
    """Heads that the file holds."""
    heads = (re.match(r"(?:medusa_heads?\.|blocks\.)?(\d+)\.", name) for name in names)
    return max((int(head[1]) + 1 for head in heads if head), default=0)


def _in_vllm(name: str) -> str:
    linear, lm_head = _LINEAR.fullmatch(name), _LM_HEAD.fullmatch(name)
    if linear:
        return f"blocks.{linear[1]}.layers.{linear[2]}.{linear[3]}"
    assert lm_head is not None, name
    return f"lm_heads.{lm_head[1]}.weight"
