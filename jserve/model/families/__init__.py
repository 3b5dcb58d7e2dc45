"""The registry of model families: architecture name in config.json -> a ``Family``, imported when
asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from jserve.errors import ConfigError
from jserve.model.family import Family

ARCHITECTURES = {
    "Cohere2ForCausalLM": "cohere2",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Exaone4ForCausalLM": "exaone4",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Glm4ForCausalLM": "glm4",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite_moe",
    "GraniteMoeSharedForCausalLM": "granite_moe",
    "LlamaForCausalLM": "llama",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Olmo2ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SmolLM3ForCausalLM": "smollm3",
}
"""Architecture -> the module of this package that has its ``FAMILY``."""
_FAMILIES: dict[str, str | Family] = dict(ARCHITECTURES)


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


def _load(module: str) -> Family:
    return importlib.import_module(f"{__name__}.{module}").FAMILY
