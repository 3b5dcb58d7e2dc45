"""Reads a Hugging Face config.json into an ``Arch``; unknown keys are refused by name.

It owns what decoders share; a family file reads its own keys and calls ``decoder_arch`` with what they say. Values
are checked in ``hf_values``, ropes read in ``hf_rope``, keys that nothing has read looked through in ``hf_keys``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from jserve.model.arch import (
    Arch,
    Attention,
    DecoderLayer,
    Mlp,
    Moe,
    Norm,
    Rope,
    RopeScaling,
)
from jserve.model.hf_rope import rope
from jserve.model.hf_values import Config, boolean, integer, number, refuse, without_effect

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
    moes: Sequence[Moe | None] = (),
    decoded: Sequence[str] = (),
    **fields: Any,
) -> Arch:
    """The ``Arch`` of a decoder whose layers have the same heads, and the same MLP where they have one.

    Args:
        activations: what ``activation_key`` may say, see ``SILU``.
        eps: the key of the norm's epsilon, which is ``default_eps`` where that is missing.
        default_kv_heads, default_head_dim, default_tied: what a missing key means.
        windows: of each layer; empty: all layers are full.
        ropes: of each layer; empty: the one of ``rope``.
        moes: experts of each layer, None where it has an MLP; empty: all have one.
        decoded: values of ``quant_method`` whose weights are decoded as they are loaded.
        fields: others of ``Arch``, ``DecoderLayer``, ``Attention``, ``Mlp`` and ``Norm``, by name.

    Raises:
        ConfigError: a key is missing, of the wrong type, or asks for something unsupported;
        ``field`` names it.
    """
    L, N = integer(config, "num_hidden_layers"), integer(config, "num_attention_heads")
    D = integer(config, "hidden_size")
    if (latent := fields.get("latent")) is not None:
        K, H = 1, latent.width
        without_effect(config, "head_dim", "num_key_value_heads")
    else:
        K = integer(config, "num_key_value_heads", default_kv_heads or N)
        if N % K:
            refuse("num_key_value_heads", f"{K} does not divide num_attention_heads {N}")
        H = _head_dim(config, D, N, default_head_dim)
    ropes = ropes or (rope(config),) * L
    attn = Attention(N=N, K=K, H=H, **_own(fields, Attention))
    act = activation(config, activations, activation_key)
    moes, own = moes or (None,) * L, _own(fields, Mlp)
    # Where every layer has experts, ``intermediate_size`` may be missing.
    without_effect(config, "intermediate_size")
    width = integer(config, "intermediate_size") if None in moes else 0
    mlp, of_layer = Mlp(F=width, activation=act, **own), _own(fields, DecoderLayer)
    return Arch(
        family=family,
        D=D,
        V=integer(config, "vocab_size"),
        max_position=_context(config, next((r.scaling for r in ropes if r), None)),
        layers=tuple(
            DecoderLayer(attn=replace(attn, window=window, rope=rope), ffn=moe or mlp, **of_layer)
            for window, rope, moe in zip(windows or (0,) * L, ropes, moes, strict=True)
        ),
        norm=Norm(eps=number(config, eps, default_eps), **_own(fields, Norm)),
        tied=boolean(config, "tie_word_embeddings", default_tied),
        kv_scales=kv_scales(config, decoded),
        **fields,
    )


def activation(config: Config, known: Mapping[str, str] = SILU, key: str = "hidden_act") -> str:
    """``Mlp.activation`` of what ``key`` says; a missing key is the first of ``known``."""
    first, *_ = known
    asked = config.get(key) or first
    if asked not in known:
        refuse(key, f"{asked!r} is not supported, only {', '.join(known)}")
    return known[asked]


def _own(fields: dict[str, Any], of: type) -> dict[str, Any]:
    """Those of ``fields`` that belong to a part of ``Arch``, taken out."""
    return {name: fields.pop(name) for name in list(fields) if name in of.__dataclass_fields__}


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


KV_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "dynamic": False,
}
"""Of 8-bit KV, as compressed-tensors describes it."""
TENSOR, PER_HEAD = "tensor", "attn_head"
"""Its strategies: a scale of all kv heads, or of each."""
STATIC = "static"
"""The same with a scale of all heads, as AutoFP8 describes it."""


DECODED = "mxfp4"
"""A ``quant_method`` whose weights a family decodes as they are loaded."""


def kv_scales(config: Config, decoded: Sequence[str] = ()) -> str:
    """The strategy of the scales of a KV cache of 8 bits that ``quantization_config`` has: ``tensor`` or ``attn_head``,
    then each layer has a ``k_scale`` and a ``v_scale``; empty: none. Quantised weights are the business of
    ``weights.quant``, but those of the methods in ``decoded``, which are a family's own and its only ones."""
    key = "quantization_config"
    given = config.get(key)
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if given is not None and (decoded or method == DECODED) and method not in decoded:
        only = f"only {', '.join(decoded)}" if decoded else "is not supported for this family"
        refuse(key, f"quant_method {method!r}: {only}")
    scheme = given.get("kv_cache_scheme") if isinstance(given, Mapping) else None
    if scheme is None:
        return _modelopt_kv(given, key) if isinstance(given, Mapping) else ""
    return _strategy(scheme, f"{key}.kv_cache_scheme")


def _strategy(scheme: Any, key: str) -> str:
    if scheme == STATIC:
        return TENSOR
    if not isinstance(scheme, Mapping):
        refuse(key, f"{scheme!r} is neither an object nor {STATIC!r}")
    for name, value in KV_SCHEME.items():
        if scheme.get(name, value) != value:
            refuse(f"{key}.{name}", f"must be {value!r}, not {scheme[name]!r}")
    strategy = scheme.get("strategy", TENSOR)
    if strategy not in (TENSOR, PER_HEAD):
        refuse(f"{key}.strategy", f"must be {TENSOR!r} or {PER_HEAD!r}, not {strategy!r}")
    return strategy


def _modelopt_kv(given: Mapping[str, Any], key: str) -> str:
    """``kv_scales`` as modelopt spells it."""
    algo = given.get("kv_cache_quant_algo")
    if algo not in (None, "FP8"):
        refuse(f"{key}.kv_cache_quant_algo", f"{algo!r} is not supported, only 'FP8'")
    return "" if algo is None else TENSOR


FULL, SLIDING = "full_attention", "sliding_attention"


def full_attention(config: Config) -> None:
    """Refuse windows, for families that have none."""
    if config.get("sliding_window"):
        refuse("sliding_window", f"{config['sliding_window']!r} is not supported in this family")
    if any(kind != FULL for kind in config.get("layer_types") or ()):
        refuse("layer_types", f"other than {FULL} are not supported in this family")


def sliding_window(config: Config, default: int = 4096) -> int:
    """``sliding_window``: ``default`` where it is missing, 0 (none) where it is null."""
    missing = "sliding_window" not in config
    return integer(config, "sliding_window", default if missing else 0, low=0)


class Biases(TypedDict):
    """The projections of an attention layer that have a bias."""

    qkv_bias: bool
    o_bias: bool


def attention_bias(config: Config, default: bool = False) -> Biases:
    """The biases that ``attention_bias`` puts on all four projections, as fields of ``Attention``."""
    found = boolean(config, "attention_bias", default)
    return {"qkv_bias": found, "o_bias": found}


class Multipliers(TypedDict):
    """Granite's, as fields of ``Arch`` and of the parts of a layer."""

    embed_scale: float
    scale: float
    residual_scale: float
    logit_scale: float


def multipliers(config: Config) -> Multipliers:
    """The multipliers of Granite; ``attention_multiplier`` is the scale of the scores, 1 where it is missing."""
    return {
        "embed_scale": number(config, "embedding_multiplier", 1.0),
        "scale": number(config, "attention_multiplier", 1.0),
        "residual_scale": number(config, "residual_multiplier", 1.0),
        "logit_scale": 1.0 / number(config, "logits_scaling", 1.0),
    }


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


def layers_with_rope(config: Config) -> list[bool]:
    """For each layer whether it has a rope: ``no_rope_layers`` has 0 where there is none; where that is missing or
    empty, every ``no_rope_layer_interval``-th one has none."""
    L, key = integer(config, "num_hidden_layers"), "no_rope_layers"
    interval, given = integer(config, "no_rope_layer_interval", 4), config.get(key)
    if given is None or given == []:
        return [(i + 1) % interval != 0 for i in range(L)]
    if (
        not isinstance(given, list | tuple)
        or len(given) != L
        or any(x not in (0, 1) for x in given)
    ):
        refuse(key, f"must list 0 or 1 for each of {L} layers")
    return [bool(x) for x in given]


def upper_windows(config: Config) -> tuple[int, ...]:
    """Window of each layer as Qwen states it: ``use_sliding_window`` switches it on,
    ``layer_types`` says where, else the layers from ``max_window_layers`` on. () if all layers
    are full."""
    window, first = 0, integer(config, "num_hidden_layers")
    without_effect(config, "sliding_window", "max_window_layers")
    if boolean(config, "use_sliding_window", False):
        window = sliding_window(config)
        first = integer(config, "max_window_layers", 28, low=0) if window else first
    return windows(layer_types(config, lambda i: i >= first), window)
