"""EAGLE-3 checkpoints as their trainers publish them, read into the drafter they describe.

It owns the layouts and what their config.json keys mean::

    SafeAILab/EAGLE, SpecForge             midlayer.*  fc  norm  lm_head  d2t  t2d
    speculators (config nested)            layers.0.*  the same, and embed_tokens

``d2t[i]`` is what to add to draft token i to get the target's token; ``t2d`` says which tokens of
the target have a draft token. A head without lm_head or embed_tokens uses the target's. Layer ids
under ``eagle_config`` (SpecForge, SGLang) name the layers whose outputs are read; at the top level
(speculators, vLLM) the layers whose inputs are. Without either they are those of SafeAILab/EAGLE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jserve.errors import ConfigError
from jserve.model.arch import Arch
from jserve.model.hf_config import decoder_arch, full_attention
from jserve.model.hf_keys import refuse_other_values
from jserve.model.hf_values import ConfigReader, boolean, integer, refuse
from jserve.speculation.drafters.eagle3 import LAYER, eagle3
from jserve.speculation.drafters.head_files import Head, HeadFiles, must_be, must_be_off, renamed
from jserve.weights.hf import INTEGERS
from jserve.weights.safetensors import broken

_IDS = "eagle_aux_hidden_state_layer_ids"
_OFF = ("attention_bias", "qkv_bias", "mlp_bias", "bias", "norm_before_fc", "parallel_drafting")


def read_eagle3(files: HeadFiles, target: Arch) -> Head:
    """The drafter that an EAGLE-3 directory describes.

    Raises:
        ConfigError: config.json asks for what the head cannot do, or does not fit the target.
        WeightsError: the tensors are not those of an EAGLE-3 head, or d2t and t2d are not sound.
    """
    config, names = _flat(files.config), files.names()
    arch = _arch(config, target)
    _refuse_older(files, target)
    if "d2t" in names:
        _check_map(files, arch.V, target.V)
    own_embed = "embed_tokens.weight" in names
    if arch.tied and not (own_embed or target.tied):
        refuse("tie_word_embeddings", "is true, but the target's embeddings are not tied")
    drafter = eagle3(
        arch,
        target,
        taps=_taps(config, target),
        own_embed=own_embed,
        own_unembed=own_embed if arch.tied else files.dummy or "lm_head.weight" in names,
        mapped="d2t" in names or arch.V != target.V,
        norm_before_residual=boolean(config, "norm_before_residual", False),
    )
    rename = partial(_in_file, "layers.0." if _has(names, "layers.0.") else f"{LAYER}.", arch.tied)
    return Head(replace(drafter, specs=lambda tp: renamed(drafter.specs(tp), rename)), ("t2d",))


def _has(names: set[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def _in_file(layer: str, tied: bool, name: str) -> str:
    """The tensor's name in a file that calls the layer ``layer``."""
    if tied and name == "lm_head.weight":
        return "embed_tokens.weight"
    return name.replace(f"{LAYER}.", layer, 1)


def _flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json of speculators as the others write it: its layer's keys beside its own."""
    kind = config.get("speculators_model_type")
    if kind is None:
        return config
    if kind != "eagle3":
        refuse("speculators_model_type", f"{kind!r} is not supported, only 'eagle3'")
    if config.get("norm_before_residual") is None:
        refuse("norm_before_residual", "is missing; its default differs between versions")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        refuse("transformer_layer_config", f"must be a mapping, not {layer!r}")
    return {"num_hidden_layers": 1, **layer, **config}


def _arch(config: Mapping[str, Any], target: Arch) -> Arch:
    """Of the head; ``V`` is its draft vocabulary."""
    must_be_off(config, *_OFF)
    full_attention(config)
    must_be(config, "vocab_size", target.V)
    must_be(config, "target_hidden_size", target.D)
    if integer(config, "num_hidden_layers") != 1:
        refuse("num_hidden_layers", f"{config['num_hidden_layers']} is not supported, only 1")
    reader = ConfigReader(config)
    arch = decoder_arch(reader, "eagle3")
    refuse_other_values(reader)
    return replace(arch, V=integer(config, "draft_vocab_size", target.V))


def _taps(config: Mapping[str, Any], target: Arch) -> tuple[int, ...]:
    """The layers whose entering residual stream is read."""
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        refuse("eagle_config", f"must be a mapping, not {nested!r}")
    if not boolean(nested, "use_aux_hidden_state", True):
        refuse("use_aux_hidden_state", "false is not supported")
    if config.get(_IDS) is not None:
        return _three(config[_IDS], 0, target)
    if nested.get(_IDS) is not None:
        return _three(nested[_IDS], 1, target)
    return _three([2, target.L // 2, target.L - 3], 0, target)


def _three(ids: Any, shift: int, target: Arch) -> tuple[int, ...]:
    whole = isinstance(ids, list) and all(type(i) is int for i in ids)
    if not whole or len(ids) != 3 or not all(0 <= i + shift <= target.L for i in ids):
        refuse(_IDS, f"{ids!r} are not three layers of the target's {target.L}")
    return tuple(i + shift for i in ids)


def _refuse_older(files: HeadFiles, target: Arch) -> None:
    if files.shape("fc.weight") == (target.D, 2 * target.D):
        raise ConfigError(
            f"{files.directory}: an EAGLE-1 or EAGLE-2 head (fc.weight reads one hidden state);"
            " only EAGLE-3 is supported",
            field="speculative.model",
        )


def _check_map(files: HeadFiles, n_draft: int, V: int) -> None:
    """Every draft token must be another token of the target, and ``t2d`` must agree."""
    assert files.tensors is not None
    tensors, i = files.tensors, np.arange(n_draft, dtype=np.int64)
    tokens = i + tensors.get("d2t", (n_draft,), INTEGERS)
    outside = np.flatnonzero((tokens < 0) | (tokens >= V))
    if outside.size:
        why = f"draft token {outside[0]} is token {tokens[outside[0]]} of {V}"
        raise broken(tensors.path("d2t"), why, "d2t")
    if len(np.unique(tokens)) != n_draft:
        raise broken(tensors.path("d2t"), "two draft tokens are the same token", "d2t")
    if "t2d" in files.names():
        known = np.zeros(V, bool)
        known[tokens] = True
        if not np.array_equal(tensors.get("t2d", (V,), ("bool",)), known):
            raise broken(tensors.path("t2d"), "does not agree with d2t", "t2d")
