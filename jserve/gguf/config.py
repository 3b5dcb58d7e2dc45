"""The config.json that a Hugging Face directory of a GGUF file's model would have, from its metadata."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from jserve.errors import ConfigError
from jserve.gguf.header import GgufHeader, broken, mapped
from jserve.gguf.names import hf_name
from jserve.gguf.types import QUANTISED

Config = dict[str, Any]
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The numbers of all models with such a tensor, which is checked against them."""
MOST = 1 << 24
"""Of any size of a model."""


class ArchitectureKeys:
    """The keys of one architecture, checked."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header, self.architecture = header, architecture

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def get(self, key: str) -> Any:
        """A number or text; None where it is missing.

        Raises:
            ConfigError: it is an array of different values, one for each layer.
        """
        found = self.header.metadata.get(self.name(key))
        if isinstance(found, np.ndarray):
            found = found.tolist()
        if isinstance(found, list):
            first = found[0] if found else None
            if isinstance(first, list) or any(x != first for x in found):
                refuse(self.name(key), "different values for layers are not supported")
            found = first
        return found

    def number(self, key: str, default: float | None = None) -> Any:
        """A finite number; ``default`` where it is missing.

        Raises:
            ConfigError: it is no number, or missing without a default.
        """
        found = self.get(key)
        found = default if found is None else found
        if isinstance(found, bool) or not isinstance(found, int | float) or not np.isfinite(found):
            refuse(self.name(key), "is missing" if found is None else f"{found!r} is no number")
        return found

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 to ``MOST``; ``default`` where it is missing.

        Raises:
            ConfigError: it is none, or missing without a default.
        """
        found = self.number(key, default)
        if type(found) is not int or not 0 < found <= MOST:
            refuse(self.name(key), f"{found!r} is no size from 1 to {MOST}")
        return found


def refuse(key: str, why: str) -> NoReturn:
    """Raise the ConfigError of a key of the metadata."""
    raise ConfigError(f"GGUF metadata: {key}: {why}", field=key)


def config_of(header: GgufHeader) -> Config:
    """config.json of the model in a GGUF file; its ``quantization_config`` has the type of each quantised matrix.

    Raises:
        ConfigError: an architecture or a value that is not supported; ``field`` is the key.
        WeightsError: the table of the embedding is missing.
    """
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        shown = str(architecture)[:40]
        refuse("general.architecture", f"{shown!r} is not supported, only {', '.join(FAMILIES)}")
    if header.metadata.get("split.count", 1) not in (0, 1):
        refuse("split.count", "files in several parts are not read; merge them with gguf-split")
    keys = ArchitectureKeys(header, architecture)
    if keys.number("expert_count", 0):
        refuse(keys.name("expert_count"), "experts are not supported")
    own = FAMILIES[architecture](keys)
    types = _types(header, architecture)
    found = _decoder(keys) | own
    return found | ({"quantization_config": types} if types else {})


def _decoder(keys: ArchitectureKeys) -> Config:
    D, N = keys.size("embedding_length"), keys.size("attention.head_count")
    H = keys.size("attention.key_length", max(D // N, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.number(key, H) != H:
            refuse(keys.name(key), f"is {keys.number(key)}, heads have {H}")
    tensors = keys.header.tensors
    if "token_embd.weight" not in tensors:
        raise broken(keys.header.path, "is missing", "token_embd.weight")
    return {
        "hidden_size": D,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": _layers(keys),
        "num_attention_heads": N,
        "num_key_value_heads": keys.size("attention.head_count_kv", N),
        "head_dim": H,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": _dtype(keys.header),
        **_rope_scaling(keys),
        **_ends(keys.header),
    }


def _layers(keys: ArchitectureKeys) -> int:
    """Layers of the model: as many as the file has tensors of."""
    n, names = keys.size("block_count"), keys.header.tensors
    found = len({name.split(".")[1] for name in names if name.startswith("blk.")})
    if n != found:
        refuse(keys.name("block_count"), f"is {n}, the file has {found} layers")
    return n


def _dtype(header: GgufHeader) -> str:
    """Of most numbers, bfloat16 where they are quantised."""
    n: dict[str, int] = {}
    for info in header.tensors.values():
        n[info.kind] = n.get(info.kind, 0) + math.prod(info.shape)
    return {"F32": "float32", "F16": "float16"}.get(max(n, key=lambda kind: n[kind]), "bfloat16")


def _ends(header: GgufHeader) -> Config:
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ends = [header.metadata[name] for name in names if name in header.metadata]
    return {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}


def _rope_scaling(keys: ArchitectureKeys) -> Config:
    kind, given = keys.get("rope.scaling.type"), keys.header.tensors.get(ROPE_FACTORS)
    if kind not in (None, "none", "linear", "yarn"):
        refuse(keys.name("rope.scaling.type"), f"{kind!r} is not supported")
    if kind in ("linear", "yarn"):
        scaling: Config = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
        if kind == "yarn":
            original = keys.number("rope.scaling.original_context_length")
            scaling["original_max_position_embeddings"] = original
        return {"rope_scaling": scaling}
    return {} if given is None else {"rope_scaling": _llama3(keys)}


def _llama3(keys: ArchitectureKeys) -> Config:
    """The scaling whose factors the file has.

    Raises:
        WeightsError: they are not Llama 3's.
    """
    info, path = keys.header.tensors[ROPE_FACTORS], keys.header.path
    half = keys.size("attention.key_length", 2 * info.shape[-1]) // 2
    if info.kind != "F32" or info.shape != (half,):
        raise broken(path, f"must be {half} numbers of F32", ROPE_FACTORS)
    data = mapped(path)
    stored = np.frombuffer(data[info.start : info.stop], "<f4").astype(np.float64)
    data.close()
    factor = round(float(stored.max()), 3)
    scaling = {"rope_type": "llama3", "factor": factor, **LLAMA3}
    want = llama3_factors(scaling, 2 * half, keys.number("rope.freq_base", 10000.0))
    if not 1 <= factor < np.inf or not np.allclose(stored, want, rtol=1e-3):
        raise broken(path, "has other factors than those of Llama 3's scaling", ROPE_FACTORS)
    return scaling


def llama3_factors(scaling: Mapping[str, Any], H: int, theta: float) -> np.ndarray:
    """float64[H / 2]: what the frequencies of a head are divided by."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    with np.errstate(all="ignore"):
        wavelength = 2 * np.pi * np.float64(theta) ** (np.arange(0, H, 2) / H)
        turns = scaling["original_max_position_embeddings"] / wavelength
    part = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - part) / max(scaling["factor"], 1.0) + part)


def _types(header: GgufHeader, architecture: str) -> Config:
    """``quantization_config``: the type of each quantised matrix but the table of the embedding."""
    found = {
        hf.removesuffix(".weight"): info.kind
        for name, info in header.tensors.items()
        if info.kind in QUANTISED and (hf := hf_name(name, architecture)) is not None
    }
    found.pop("model.embed_tokens", None)
    return {"quant_method": "gguf", "types": found} if found else {}


def _llama(keys: ArchitectureKeys) -> Config:
    has = {n: f"blk.0.attn_{n}.bias" in keys.header.tensors for n in ("q", "k", "v", "output")}
    if len(set(has.values())) > 1:
        raise broken(keys.header.path, "is there without the other biases", "blk.0.attn_q.bias")
    config = {"architectures": ["LlamaForCausalLM"], "attention_bias": has["q"]}
    if window := keys.number("attention.sliding_window", 0):
        if has["q"]:
            refuse(keys.name("attention.sliding_window"), "is not supported beside biases")
        return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return config


def _qwen(name: str) -> Callable[[ArchitectureKeys], Config]:
    return lambda _: {"architectures": [name]}


def _gemma(keys: ArchitectureKeys) -> Config:
    return {"architectures": ["GemmaForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}


LARGEST_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose scores are scaled by the width of the model over its heads."""


def _windowed_gemma(name: str, **fixed: Any) -> Callable[[ArchitectureKeys], Config]:
    def read(keys: ArchitectureKeys) -> Config:
        D, N = keys.size("embedding_length"), keys.size("attention.head_count")
        largest = keys.size("block_count") == LARGEST_LAYERS[keys.architecture]
        return {
            "architectures": [name],
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": keys.size("attention.sliding_window"),
            "query_pre_attn_scalar": (
                D // N if largest else keys.size("attention.key_length", D // N)
            ),
            "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
            "final_logit_softcapping": keys.get("final_logit_softcapping"),
            **fixed,
        }

    return read


FAMILIES: dict[str, Callable[[ArchitectureKeys], Config]] = {
    "llama": _llama,
    "qwen2": _qwen("Qwen2ForCausalLM"),
    "qwen3": _qwen("Qwen3ForCausalLM"),
    "gemma": _gemma,
    "gemma2": _windowed_gemma("Gemma2ForCausalLM"),
    "gemma3": _windowed_gemma("Gemma3ForCausalLM", rope_local_base_freq=10000.0),
}
"""general.architecture -> what the family's config.json has besides."""
