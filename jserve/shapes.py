"""The config.json keys that set the dimensions of well-known models, for planning without files.

No weights are looked for.
"""

from __future__ import annotations

from typing import Any

_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
_QWEN: dict[str, Any] = {"dtype": "bfloat16", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
_QWEN3: dict[str, Any] = {
    **_QWEN,
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}


def _llama_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _sizes(hidden: int, ffn: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        **_LLAMA3,
        **_sizes(2048, 8192, 16, 32),
        "head_dim": 64,
        "rope_scaling": _llama_rope(32.0),
        "tie_word_embeddings": True,
    },
    "llama-3.2-3b": {
        **_LLAMA3,
        **_sizes(3072, 8192, 28, 24),
        "rope_scaling": _llama_rope(32.0),
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA3,
        **_sizes(4096, 14336, 32, 32),
        "rope_scaling": _llama_rope(8.0),
    },
    "llama-3.1-70b": {
        **_LLAMA3,
        **_sizes(8192, 28672, 80, 64),
        "rope_scaling": _llama_rope(8.0),
    },
    "qwen2.5-7b": {
        **_QWEN,
        **_sizes(3584, 18944, 28, 28),
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 152064,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
    "qwen3-0.6b": {**_QWEN3, **_sizes(1024, 3072, 28, 16), "tie_word_embeddings": True},
    "qwen3-8b": {**_QWEN3, **_sizes(4096, 12288, 36, 32)},
    "qwen3-32b": {**_QWEN3, **_sizes(5120, 25600, 64, 64)},
    "mistral-7b": {
        **_sizes(4096, 14336, 32, 32),
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
        "dtype": "bfloat16",
        "vocab_size": 32768,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
}
