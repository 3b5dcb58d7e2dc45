"""Finds the scheme of a quantised model: of its checkpoint, or of ``--quantization`` on load.

It owns the choice of the format and the account of which modules it covers. Each format reads its own section of the
config and has a reader of its tensors (``jserve.weights.quant.FORMAT``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.model.family import Family
from jserve.model.hf_config import DECODED
from jserve.model.quant import Form
from jserve.model.quant_specs import quantised_specs
from jserve.weights.quant import (
    auto_round,
    awq,
    bnb,
    compressed_config,
    fp8,
    gguf,
    gptq,
    modelopt,
    mxfp4_experts,
)
from jserve.weights.quant.matrix import Modules, Reader
from jserve.weights.quant.on_load import KINDS, on_load
from jserve.weights.quant.values import FIELD, refuse

FORMATS = {
    "auto-round": auto_round.read,
    "awq": awq.read,
    "bitsandbytes": bnb.read,
    "compressed-tensors": compressed_config.read,
    "fbgemm_fp8": fp8.read_fbgemm,
    "fp8": fp8.read,
    "gguf": gguf.read,
    "gptq": gptq.read,
    "intel/auto-round": auto_round.read,
    "modelopt": modelopt.read,
    DECODED: mxfp4_experts.read,
}
"""``quant_method`` -> (its section of config.json, dtype of the model) -> (modules, reader)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The quantised modules of a model, and who reads them."""

    name: str
    """As ``--quantization`` or ``quant_method`` has it."""
    modules: Modules
    reader: Reader | None
    """None: the checkpoint is not quantised; its matrices are when they are loaded."""
    widened: bool = False
    """The checkpoint is quantised, and served as if it were not."""

    def form_of(self, module: str, D: int) -> Form | None:
        """The form in which a module with ``D`` inputs is served; None: it is not quantised."""
        return None if self.widened else self.modules.form_of(module, D)

    @property
    def on_load(self) -> bool:
        """True if matrices are quantised when they are loaded."""
        return self.reader is None


def scheme_of(
    config: Mapping[str, Any], dtype: Any, asked: str = "auto", options: str = ""
) -> Scheme | None:
    """The scheme of a model; None: it is served as ``dtype``.

    Args:
        config: config.json.
        dtype: of the model.
        asked: option ``quantization``: ``auto`` takes the checkpoint's, ``none`` widens a quantised one. Of a quantised
            one its method, or the name of all its forms, says what is there.
        options: option ``quantization_config``: a JSON object, or empty.

    Raises:
        ConfigError: the checkpoint's format is unknown or has what jserve does not read, or the options do not go
            with it; ``field`` is the key or the option.
    """
    found, name = _stated(config, jnp.dtype(dtype).name), jnp.dtype(dtype).name
    given = _options(options)
    if asked in ("auto", "none"):
        if given:
            raise ConfigError("quantization_config needs quantization", field="quantization_config")
        return found and replace(found, widened=asked == "none")
    if found is not None:
        _check_stated(found, asked, given)
        return found
    if asked in FORMATS and asked not in KINDS:
        why = f"the checkpoint is not quantised; on load it can be by {', '.join(KINDS)}"
        raise ConfigError(f"quantization {asked}: {why}", field="quantization")
    return Scheme(name=asked, modules=on_load(asked, name, given), reader=None)


MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
"""Of a layer, whose forms a checkpoint is called by."""


def _check_stated(found: Scheme, asked: str, given: Mapping[str, Any]) -> None:
    """Refuse another quantisation than the checkpoint has, and options for it."""
    layer = [found.modules.form_of(f"model.layers.0.{module}", 4096) for module in MODULES]
    names = {form.name.removesuffix("-static") for form in layer if form is not None}
    if given or (asked != found.name and names != {asked}):
        why = f"the checkpoint is quantised already ({found.name}); leave the option out, or 'none'"
        raise ConfigError(f"quantization {asked}: {why}", field="quantization")


def _options(text: str) -> Mapping[str, Any]:
    try:
        given = json.loads(text) if text else {}
    except ValueError:
        given = None
    if not isinstance(given, Mapping):
        raise ConfigError("quantization_config must be a JSON object", field="quantization_config")
    return given


def _stated(config: Mapping[str, Any], dtype: str) -> Scheme | None:
    given = config.get(FIELD)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        refuse("", f"{given!r} is no object")
    method = given.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        refuse("quant_method", f"{method!r} is not supported, only {', '.join(FORMATS)}")
    found = FORMATS[method](given, dtype)
    if found is None:
        return None
    modules, reader = found
    return Scheme(name=method, modules=modules, reader=reader)


def quantised(family: Family, scheme: Scheme | None) -> Family:
    """``family`` with parameters quantised by ``scheme``."""
    return family if scheme is None else quantised_specs(family, scheme.form_of)
