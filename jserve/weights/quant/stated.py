"""Finds what older exporters wrote beside config.json: how a checkpoint is quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jserve.errors import ConfigError
from jserve.weights import hf

FIELD = "quantization_config"


def with_quantisation(directory: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``config``; where it has no ``quantization_config``, with that of a file beside it.

    Raises:
        ConfigError: such a file is broken; ``field`` is the file.
    """
    if config.get(FIELD) is not None:
        return config
    for name, read in FILES.items():
        path = directory / name
        if path.is_file():
            return {**config, FIELD: read(path, hf.read_json(path))}
    return config


def _modelopt(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    inner = given.get("quantization")
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{path.name}: has no object quantization ({path})", field=str(path))
    return {**inner, "quant_method": "modelopt"}


def _gptq(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    return {**given, "quant_method": "gptq"}


def _awq(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {"w_bit": "bits", "q_group_size": "group_size"}
    return {renamed.get(key, key): value for key, value in given.items()} | {"quant_method": "awq"}


FILES: dict[str, Callable[[Path, Mapping[str, Any]], dict[str, Any]]] = {
    "hf_quant_config.json": _modelopt,
    "quantize_config.json": _gptq,
    "quant_config.json": _awq,
}
"""File -> its contents as a ``quantization_config``."""
