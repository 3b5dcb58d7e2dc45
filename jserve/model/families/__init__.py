"""The registry of model families: architecture name in config.json -> a ``Family``, imported when
asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from jserve.errors import ConfigError
from jserve.model.family import Family

_FAMILIES: dict[str, str | Family] = {
    "LlamaForCausalLM": "jserve.model.families.llama:FAMILY",
    "MistralForCausalLM": "jserve.model.families.mistral:FAMILY",
    "Qwen2ForCausalLM": "jserve.model.families.qwen2:FAMILY",
    "Qwen3ForCausalLM": "jserve.model.families.qwen3:FAMILY",
}


def family_for(config: Mapping[str, Any]) -> Family:
    """The family that serves this config.json.

    Raises:
        ConfigError: ``architectures`` is missing or names none that is registered.
    """
    names = config.get("architectures")
    if not isinstance(names, list | tuple) or not names:
        raise ConfigError("config.json: architectures is missing", field="architectures")
    for name in names:
        entry = _FAMILIES.get(name) if isinstance(name, str) else None
        if entry is not None:
            return entry if isinstance(entry, Family) else _load(entry)
    known = ", ".join(sorted(_FAMILIES))
    raise ConfigError(
        f"config.json: architectures {list(names)} is not supported, only {known};"
        " yours: register_family, in a file that --plugins names",
        field="architectures",
    )


def register_family(family: Family) -> None:
    """Serve ``family.architectures`` with this family from now on; it replaces one of the same
    name."""
    for name in family.architectures:
        _FAMILIES[name] = family


def _load(entry: str) -> Family:
    module, _, attribute = entry.partition(":")
    return getattr(importlib.import_module(module), attribute)
