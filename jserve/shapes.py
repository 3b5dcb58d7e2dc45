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


_DEEPSEEK: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 201088,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 4,
}


def _deepseek_rope(mscale: float) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": mscale,
        "mscale_all_dim": mscale,
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
    "qwen3-30b-a3b": {
        **_QWEN3,
        **_sizes(2048, 6144, 48, 32),
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "mixtral-8x7b": {
        **_sizes(4096, 14336, 32, 32),
        "architectures": ["MixtralForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 32000,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "olmoe-1b-7b": {
        **_sizes(2048, 1024, 16, 16),
        "architectures": ["OlmoeForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "granite-3.0-1b-a400m": {
        **_sizes(1024, 512, 24, 16),
        "architectures": ["GraniteMoeForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 49155,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "num_local_experts": 32,
        "num_experts_per_tok": 8,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
        "tie_word_embeddings": True,
    },
    "deepseek-v2-lite": {
        **_DEEPSEEK,
        **_sizes(2048, 10944, 27, 16),
        "architectures": ["DeepseekV2ForCausalLM"],
        "vocab_size": 102400,
        "q_lora_rank": None,
        "rope_scaling": _deepseek_rope(0.707),
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
    },
    "deepseek-v3": {
        **_DEEPSEEK,
        **_sizes(7168, 18432, 61, 128),
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129280,
        "q_lora_rank": 1536,
        "rope_scaling": _deepseek_rope(1.0),
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
    },
    "gpt-oss-20b": {**_GPT_OSS, **_sizes(2880, 2880, 24, 64), "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, **_sizes(2880, 2880, 36, 64), "num_local_experts": 128},
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
