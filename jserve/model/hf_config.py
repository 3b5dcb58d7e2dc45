"""Reads a Hugging Face config.json into an ``Arch``; unknown keys are refused by name.

It owns the checks and the spellings (old ``rope_theta`` + ``rope_scaling``, new ``rope_parameters``). A family file
calls ``decoder_arch`` and adds its own switches.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from jserve.errors import ConfigError
from jserve.model.arch import Arch, RopeScaling
from jserve.model.rope import KINDS

Config = Mapping[str, Any]

REQUIRED: Any = object()

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1, 1.0),
    "is_encoder_decoder": (False,),
    "is_decoder": (True, False),
    "add_cross_attention": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "kv_lora_rank": (),
    "q_lora_rank": (),
    "clip_qkv": (),
    "alibi": (False,),
    "attention_chunk_size": (),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "attention_multiplier": (),
    "residual_multiplier": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "use_bidirectional_attention": (False,),
    "parallel_attn": (False,),
    "vision_config": (),
    "text_config": (),
}
"""Keys that change the computation in ways this decoder lacks, with the values (besides null)
that do not."""


def decoder_arch(
    config: Config,
    family: str,
    *,
    activations: Collection[str] = ("silu", "swish"),
    eps: str = "rms_norm_eps",
    **switches: Any,
) -> Arch:
    """The ``Arch`` of a plain decoder; ``switches`` are the family's own fields (biases, windows,
    defaults).

    ``activations`` are what ``hidden_act`` may be, the first one where it is missing; ``eps`` is the key of
    ``Arch.norm_eps``.

    ``default_kv_heads`` and ``default_head_dim`` among them are what a missing key means in this
    family.

    Raises:
        ConfigError: a key is missing, of the wrong type, or asks for something unsupported;
        ``field`` names it.
    """
    for key, neutral in NEUTRAL.items():
        if config.get(key) is not None and config[key] not in neutral:
            refuse(key, f"{config[key]!r} is not supported")
    first, *_ = activations
    if config.get("hidden_act", first) not in activations:
        refuse("hidden_act", f"{config['hidden_act']!r} is not supported, only {first}")
    N = integer(config, "num_attention_heads")
    D = integer(config, "hidden_size")
    K = integer(config, "num_key_value_heads", switches.pop("default_kv_heads", N) or N)
    if N % K:
        refuse("num_key_value_heads", f"{K} does not divide num_attention_heads {N}")
    theta, scaling = rope(config)
    return Arch(
        family=family,
        L=integer(config, "num_hidden_layers"),
        D=D,
        F=integer(config, "intermediate_size"),
        N=N,
        K=K,
        H=_head_dim(config, D, N, switches.pop("default_head_dim", None)),
        V=integer(config, "vocab_size"),
        max_position=_context(config, scaling),
        norm_eps=number(config, eps, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=boolean(config, "tie_word_embeddings", False),
        kv_scales=kv_scales(config),
        **switches,
    )


def _head_dim(config: Config, D: int, N: int, default: int | None) -> int:
    if config.get("head_dim", default) is None and D % N:
        refuse("hidden_size", f"{D} is not a multiple of num_attention_heads {N}")
    H = integer(config, "head_dim", default or D // N)
    if H % 2:
        refuse("head_dim", f"{H} is odd; rotary embedding needs pairs")
    return H


def _context(config: Config, scaling: RopeScaling | None) -> int:
    """Tokens of context: linear and dynamic stretch what config.json states, yarn its original
    length."""
    stated = integer(config, "max_position_embeddings")
    if scaling is None or scaling.kind == "llama3":
        return stated
    original = scaling.original_max_position if scaling.kind == "yarn" else stated
    return max(stated, int(original * scaling.factor))


def rope(config: Config) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from either spelling; transformers gives ``rope_scaling`` precedence.

    Raises:
        ConfigError: an unknown type, a missing or non-finite number, or a dictionary per
        layer type.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    raw = config.get(key) or {}
    if not isinstance(raw, Mapping):
        refuse(key, f"must be a mapping, not {raw!r}")
    if any(isinstance(v, Mapping) for v in raw.values()):
        refuse(key, "per layer type is not supported")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        refuse("partial_rotary_factor", f"{raw['partial_rotary_factor']!r} is not supported")
    owner = raw if raw.get("rope_theta") is not None else config
    theta = number(owner, "rope_theta", 10000.0)
    if theta <= 1.0:
        refuse("rope_theta", f"must be above 1, not {theta}")
    kind = raw.get("rope_type", raw.get("type", "default"))
    return theta, None if kind == "default" else _scaling(config, raw, key, kind)


def _scaling(config: Config, raw: Config, key: str, kind: Any) -> RopeScaling:
    if kind not in KINDS:
        refuse(key, f"type {kind!r} is not supported, only default, {', '.join(KINDS)}")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"} | _KEYS[kind]
    for name in raw:
        if name not in known:
            refuse(f"{key}.{name}", f"has no meaning for rope type {kind}")
    return RopeScaling(
        kind=kind,
        factor=number(raw, "factor", REQUIRED, low=1.0),
        original_max_position=_original(config, raw, kind),
        truncate=boolean(raw, "truncate", True),
        **_llama3_numbers(raw) if kind == "llama3" else {},
        **_yarn_numbers(raw) if kind == "yarn" else {},
    )


_KEYS = {
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
}


def _original(config: Config, raw: Config, kind: str) -> int:
    name = "original_max_position_embeddings"
    if kind in ("llama3", "yarn"):
        for owner in (config, raw):
            if owner.get(name) is not None:
                return integer(owner, name)
    return integer(config, "max_position_embeddings")


def _llama3_numbers(raw: Config) -> dict[str, float]:
    low, high = number(raw, "low_freq_factor", REQUIRED), number(raw, "high_freq_factor", REQUIRED)
    if high <= low:
        refuse("high_freq_factor", f"{high} must be above low_freq_factor {low}")
    return {"low_freq_factor": low, "high_freq_factor": high}


def _yarn_numbers(raw: Config) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        name: number(raw, name, 0.0, low=0.0) if raw.get(name) is not None else None
        for name in ("attention_factor", "mscale", "mscale_all_dim")
    }
    numbers["beta_fast"] = number(raw, "beta_fast", 32.0) if raw.get("beta_fast") else 32.0
    numbers["beta_slow"] = number(raw, "beta_slow", 1.0) if raw.get("beta_slow") else 1.0
    return numbers


KV_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
"""The one scheme of 8-bit KV, as compressed-tensors describes it."""


def kv_scales(config: Config) -> bool:
    """True if ``quantization_config`` quantises the KV cache, and nothing else: then each layer has a
    ``k_scale`` and a ``v_scale``. All other quantisation is refused."""
    key = "quantization_config"
    given = config.get(key)
    if given is None:
        return False
    scheme = given.get("kv_cache_scheme") if isinstance(given, Mapping) else None
    alone = (
        isinstance(scheme, Mapping)
        and given.get("quant_method") == "compressed-tensors"
        and not given.get("config_groups")
    )
    if scheme is None or not alone:
        refuse(key, f"{given!r} is not supported, only scales of 8-bit KV by compressed-tensors")
    for name, value in KV_SCHEME.items():
        if scheme.get(name, value) != value:
            refuse(f"{key}.kv_cache_scheme.{name}", f"must be {value!r}, not {scheme[name]!r}")
    return True


def full_attention(config: Config) -> None:
    """Refuse windows, for families that have none."""
    if config.get("sliding_window"):
        refuse("sliding_window", f"{config['sliding_window']!r} is not supported in this family")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        refuse("layer_types", "other than full_attention are not supported in this family")


def upper_windows(config: Config) -> tuple[int, ...]:
    """Window of each layer as Qwen states it: ``use_sliding_window`` switches it on,
    ``layer_types`` says where, else the layers from ``max_window_layers`` on. () if all layers
    are full."""
    L = integer(config, "num_hidden_layers")
    window = 0
    if boolean(config, "use_sliding_window", False):
        missing = "sliding_window" not in config
        window = integer(config, "sliding_window", 4096 if missing else 0, low=0)
    types = config.get("layer_types")
    if types is None:
        first = integer(config, "max_window_layers", 28, low=0) if window else L
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(L)]
    _check_types(types, L, window)
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in types)
    return windows if any(windows) else ()


def _check_types(types: Any, L: int, window: int) -> None:
    if not isinstance(types, list | tuple) or len(types) != L:
        refuse("layer_types", f"must list {L} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            refuse("layer_types", f"{kind!r} is not supported")
    if "sliding_attention" in types and not window:
        refuse("sliding_window", "is off but layer_types has sliding_attention")


def refuse(key: str, why: str) -> NoReturn:
    """Raise the ConfigError for one key of config.json."""
    raise ConfigError(f"config.json: {key} {why}", field=key)


def integer(config: Config, key: str, default: Any = REQUIRED, low: int = 1) -> int:
    """A whole number at least ``low``; null and missing give ``default``."""
    value = _value(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        refuse(key, f"must be an integer of at least {low}, not {value!r}")
    return value


def number(config: Config, key: str, default: Any = REQUIRED, low: float | None = None) -> float:
    """A finite number, positive or at least ``low``; null and missing give ``default``."""
    value = _value(config, key, default)
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or (value <= 0 if low is None else value < low):
        bound = "above 0" if low is None else f"of at least {low:g}"
        refuse(key, f"must be a finite number {bound}, not {value!r}")
    return float(value)


def boolean(config: Config, key: str, default: bool) -> bool:
    """True or false; null and missing give ``default``."""
    value = _value(config, key, default)
    if not isinstance(value, bool):
        refuse(key, f"must be true or false, not {value!r}")
    return value


def _value(config: Config, key: str, default: Any) -> Any:
    value = config.get(key)
    if value is None and default is REQUIRED:
        refuse(key, "is missing")
    return default if value is None else value
