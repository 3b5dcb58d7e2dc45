"""Changes of weights by low-rank factors (LoRA), added to the weights that an engine has.

It owns ``AdapterDelta``, from arrays of a trainer or a directory of PEFT, and how factors of checkpoint tensors become
dense changes of parameters, of which fused ones hold several tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jserve.errors import ConfigError, WeightsError
from jserve.model.param_spec import ParamSpec
from jserve.weights.handed import from_names
from jserve.weights.hf import read_json
from jserve.weights.place import named

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "lora_bias": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None,),
}
"""Keys of an adapter's config with the values that are honoured; any other value is refused."""
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class AdapterDelta:
    """A source of ``update_weights`` that adds ``scale * b @ a`` to each weight it names; all others stay.

    Args:
        factors: checkpoint name of a weight [out, in] -> (a [r, in], b [out, r]), of numpy or jax.
        scale: of all; -scale takes the change away again, but for what rounding to the weights' type lost.
    """

    factors: Mapping[str, tuple[Any, Any]]
    scale: float = 1.0

    @classmethod
    def from_directory(cls, directory: str | Path) -> AdapterDelta:
        """The LoRA adapter that PEFT saved in ``directory``.

        Raises:
            ConfigError, WeightsError: a file is missing or broken, an adapter of another kind, a factor without its
                partner; ``field`` is the key or the file and tensor.
        """
        from safetensors import SafetensorError
        from safetensors.flax import load_file

        config, path = read_json(Path(directory) / CONFIG), Path(directory) / TENSORS
        for key, honoured in PLAIN.items():
            if key in config and config[key] not in honoured:
                raise ConfigError(f"{CONFIG}: {key} {config[key]!r} is not honoured", field=key)
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path}: {error}", field=str(path)) from None
        factors = {}
        for name in tensors:
            stem = name.removesuffix(A).removesuffix(B)
            if stem == name or stem + A not in tensors or stem + B not in tensors:
                raise WeightsError(f"{path}: {name} is no factor of two", field=f"{path}:{name}")
            weight = f"{stem.removeprefix(PREFIX)}.weight"
            factors[weight] = (tensors[stem + A], tensors[stem + B])
        return cls(factors, _scale(config))


def _scale(config: Mapping[str, Any]) -> float:
    r, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(r, int) or r < 1 or not isinstance(alpha, int | float):
        raise ConfigError(f"{CONFIG}: r and lora_alpha must be numbers", field="r")
    return alpha / (math.sqrt(r) if config.get("use_rslora") else r)


def changes(delta: AdapterDelta, specs: Any) -> dict[str, np.ndarray]:
    """Path in ``specs`` (of one device) -> float32 change of that parameter, of those that ``delta`` touches.

    Raises:
        WeightsError: factors that do not multiply or are not finite, or as ``from_names``.
    """
    dense = {name: _product(name, factors, delta.scale) for name, factors in delta.factors.items()}
    wanted = {part.name: part.shape for part in _beside({*dense}, specs)}
    return from_names(
        (dense | {n: np.zeros(s, np.float32) for n, s in wanted.items()}).items(), specs
    )


def _product(name: str, factors: Any, scale: float) -> np.ndarray:
    try:
        a, b = (np.asarray(x, np.float32) for x in factors)
        return scale * (b @ a)
    except (TypeError, ValueError) as error:
        raise WeightsError(f"params.{name}: {error}", field=f"params.{name}") from None


def _beside(names: set[str], specs: Any) -> list[Any]:
    """Parts of the parameters that ``names`` have a part of, without these."""
    bare = {name.removeprefix("model.") for name in names}

    def touched(spec: ParamSpec) -> list[Any]:
        own = [part for part in spec.parts if part.name.removeprefix("model.") in bare]
        return [part for part in spec.parts if part not in own] if own else []

    return [part for _, spec in named(specs) for part in touched(spec)]
