"""Reads a Hugging Face config.json into an ``Arch``; unknown keys are refused by name.

It owns the checks and the spellings (old ``rope_theta`` + ``rope_scaling``, new ``rope_parameters``). A family file
reads its own keys and calls ``decoder_arch`` with what they say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from jserve.errors import ConfigError
from jserve.model.arch import (
    Arch,
    Attention,
    DecoderLayer,
    Mlp,
    Norm,
    Rope,
    RopeScaling,
)
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
"""Keys that change the computation, with the values (besides null) that do not. One that a family has not
read has to have such a value."""


class ConfigReader(Mapping[str, Any]):
    """A config.json that knows which of its keys were read."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


SILU = {"silu": "silu", "swish": "silu"}
"""Values of ``hidden_act`` -> ``Mlp.activation``; the first one holds where the key is missing."""


def decoder_arch(
    config: Config,
    family: str,
    *,
    activations: Mapping[str, str] = SILU,
    activation_key: str = "hidden_act",
    eps: str = "rms_norm_eps",
    default_eps: float = 1e-6,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    default_tied: bool = False,
    windows: Sequence[int] = (),
    ropes: Sequence[Rope | None] = (),
    **fields: Any,
) -> Arch:
    """The ``Arch`` of a decoder whose layers have the same heads and the same MLP.

    Args:
        config: what a family has read of it before, it answers for; see ``NEUTRAL``.
        activations: what ``activation_key`` may say, see ``SILU``.
        eps: the key of the norm's epsilon, which is ``default_eps`` where that is missing.
        default_kv_heads, default_head_dim, default_tied: what a missing key means.
        windows: of each layer; empty: all layers are full.
        ropes: of each layer; empty: the one of ``rope``.
        fields: others of ``Arch``, ``DecoderLayer``, ``Attention``, ``Mlp`` and ``Norm``, by name.

    Raises:
        ConfigError: a key is missing, of the wrong type, or asks for something unsupported;
        ``field`` names it.
    """
    first, *_ = activations
    asked = config.get(activation_key) or first
    if asked not in activations:
        refuse(activation_key, f"{asked!r} is not supported, only {', '.join(activations)}")
    L, N = integer(config, "num_hidden_layers"), integer(config, "num_attention_heads")
    D = integer(config, "hidden_size")
    K = integer(config, "num_key_value_heads", default_kv_heads or N)
    if N % K:
        refuse("num_key_value_heads", f"{K} does not divide num_attention_heads {N}")
    H = _head_dim(config, D, N, default_head_dim)
    ropes = ropes or (rope(config),) * L
    attn = Attention(N=N, K=K, H=H, **_own(fields, Attention))
    layer = DecoderLayer(
        attn=attn,
        ffn=Mlp(
            F=integer(config, "intermediate_size"),
            activation=activations[asked],
            **_own(fields, Mlp),
        ),
        **_own(fields, DecoderLayer),
    )
    found = Arch(
        family=family,
        D=D,
        V=integer(config, "vocab_size"),
        max_position=_context(config, next((r.scaling for r in ropes if r), None)),
        layers=tuple(
            replace(layer, attn=replace(attn, window=window, rope=rope))
            for window, rope in zip(windows or (0,) * L, ropes, strict=True)
        ),
        norm=Norm(eps=number(config, eps, default_eps), **_own(fields, Norm)),
        tied=boolean(config, "tie_word_embeddings", default_tied),
        kv_scales=kv_scales(config),
        **fields,
    )
    _check_neutral(config)
    return found


def _own(fields: dict[str, Any], of: type) -> dict[str, Any]:
    """Those of ``fields`` that belong to a part of ``Arch``, taken out."""
    return {name: fields.pop(name) for name in list(fields) if name in of.__dataclass_fields__}


def _check_neutral(config: Config) -> None:
    known = config.read if isinstance(config, ConfigReader) else set[str]()
    for key, neutral in NEUTRAL.items():
        if key not in known and config.get(key) is not None and config[key] not in neutral:
            refuse(key, f"{config[key]!r} is not supported")


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
    if scaling.kind == "longrope":
        return min(stated, scaling.original_max_position)
    original = scaling.original_max_position if scaling.kind == "yarn" else stated
    return max(stated, int(original * scaling.factor))


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
    if kind not in KINDS:
        refuse(key, f"type {kind!r} is not supported, only default, {', '.join(KINDS)}")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"} | _KEYS[kind]
    for name in raw:
        if name not in known:
            refuse(f"{key}.{name}", f"has no meaning for rope type {kind}")
    if kind == "longrope":
        return _longrope(config, raw, key, turned)
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
    "longrope": {
        "original_max_position_embeddings",
        "short_factor",
        "long_factor",
        "attention_factor",
        "short_mscale",
        "long_mscale",
    },
}


def _longrope(config: Config, raw: Config, key: str, turned: int) -> RopeScaling:
    """The short factors, and the length up to which they hold. The long ones are checked and not kept: a
    sequence that grew beyond the original length would need its KV computed anew."""
    if not turned:
        refuse(key, "type longrope is not supported in this family")
    for name in ("short_factor", "long_factor"):
        given = raw.get(name)
        fits = isinstance(given, list | tuple) and len(given) == turned // 2
        if not fits or not all(_positive(x) for x in given):
            refuse(f"{key}.{name}", f"must list {turned // 2} positive numbers")
    original = integer(config if config.get(_ORIGINAL) is not None else raw, _ORIGINAL)
    stretch = integer(config, "max_position_embeddings") / original
    factor = number(raw, "factor", stretch) if raw.get("factor") is not None else stretch
    return RopeScaling(
        kind="longrope",
        factor=max(1.0, factor),
        original_max_position=original,
        attention_factor=number(raw, "attention_factor", 1.0)
        if raw.get("attention_factor")
        else None,
        short_factor=tuple(float(x) for x in raw["short_factor"]),
    )


def _positive(x: Any) -> bool:
    number = isinstance(x, int | float) and not isinstance(x, bool)
    return number and math.isfinite(x) and x > 0


_ORIGINAL = "original_max_position_embeddings"


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
    """Whether ``quantization_config`` quantises the KV cache, and nothing else: then each layer has a
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


FULL, SLIDING = "full_attention", "sliding_attention"


def full_attention(config: Config) -> None:
    """Refuse windows, for families that have none."""
    if config.get("sliding_window"):
        refuse("sliding_window", f"{config['sliding_window']!r} is not supported in this family")
    if any(kind != FULL for kind in config.get("layer_types") or ()):
        refuse("layer_types", f"other than {FULL} are not supported in this family")


def layer_types(config: Config, default: Callable[[int], bool]) -> list[str]:
    """FULL or SLIDING for each layer: ``layer_types``, or SLIDING where ``default`` says so of a layer's
    number."""
    L, types = integer(config, "num_hidden_layers"), config.get("layer_types")
    if types is None:
        return [SLIDING if default(i) else FULL for i in range(L)]
    if not isinstance(types, list | tuple) or len(types) != L:
        refuse("layer_types", f"must list {L} layers")
    for kind in types:
        if kind not in (FULL, SLIDING):
            refuse("layer_types", f"{kind!r} is not supported")
    return list(types)


def windows(types: Sequence[str], window: int) -> tuple[int, ...]:
    """Window of each layer of these types."""
    if SLIDING in types and not window:
        refuse("sliding_window", f"is off but layer_types has {SLIDING}")
    return tuple(window if kind == SLIDING else 0 for kind in types)


def upper_windows(config: Config) -> tuple[int, ...]:
    """Window of each layer as Qwen states it: ``use_sliding_window`` switches it on,
    ``layer_types`` says where, else the layers from ``max_window_layers`` on. () if all layers
    are full."""
    window, first = 0, integer(config, "num_hidden_layers")
    if boolean(config, "use_sliding_window", False):
        missing = "sliding_window" not in config
        window = integer(config, "sliding_window", 4096 if missing else 0, low=0)
        first = integer(config, "max_window_layers", 28, low=0) if window else first
    return windows(layer_types(config, lambda i: i >= first), window)


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


def optional_number(config: Config, key: str, default: float) -> float:
    """A finite positive number; missing gives ``default``, null 0."""
    if key in config and config[key] is None:
        return 0.0
    return number(config, key, default, low=0.0)


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
