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


_GEMMA: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 256000,
    "head_dim": 256,
    "max_position_embeddings": 8192,
}
_GEMMA3: dict[str, Any] = {
    **_GEMMA,
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
}
_LLAMA4: dict[str, Any] = {
    **_sizes(5120, 8192, 48, 40),
    "architectures": ["Llama4ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 202048,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size_mlp": 16384,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8192,
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
    "gemma-2b": {**_GEMMA, **_sizes(2048, 16384, 18, 8), "num_key_value_heads": 1},
    "gemma-2-9b": {
        **_GEMMA,
        **_sizes(3584, 14336, 42, 16),
        "architectures": ["Gemma2ForCausalLM"],
        "num_key_value_heads": 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
    },
    "gemma-3-1b": {
        **_GEMMA3,
        **_sizes(1152, 6912, 26, 4),
        "vocab_size": 262144,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
    },
    "gemma-3-4b": {
        **_GEMMA3,
        **_sizes(2560, 10240, 34, 8),
        "num_key_value_heads": 4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma-3-27b": {
        **_GEMMA3,
        **_sizes(5376, 21504, 62, 32),
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi-4-mini": {
        **_sizes(3072, 8192, 32, 24),
        "architectures": ["Phi3ForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 200064,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.75,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
    },
    "olmo-2-7b": {
        **_sizes(4096, 11008, 32, 32),
        "architectures": ["Olmo2ForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 100352,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
    },
    "granite-3.3-8b": {
        **_sizes(4096, 12800, 40, 32),
        "architectures": ["GraniteForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 49159,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000000.0,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.0078125,
        "residual_multiplier": 0.22,
        "logits_scaling": 16.0,
        "tie_word_embeddings": True,
    },
    "command-r7b": {
        **_sizes(4096, 14336, 32, 32),
        "architectures": ["Cohere2ForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 256000,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 50000.0,
        "logit_scale": 0.25,
        "sliding_window": 4096,
    },
    "smollm3-3b": {
        **_sizes(2048, 11008, 36, 16),
        "architectures": ["SmolLM3ForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 128256,
        "num_key_value_heads": 4,
        "max_position_embeddings": 65536,
        "rope_theta": 5000000.0,
    },
    "exaone-4-32b": {
        **_sizes(5120, 27392, 64, 40),
        "architectures": ["Exaone4ForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 102400,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_scaling": _llama_rope(16.0),
        "sliding_window": 4096,
    },
    "glm-4-9b": {
        **_sizes(4096, 13696, 40, 32),
        "architectures": ["Glm4ForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 151552,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
    },
    "qwen1.5-moe-a2.7b": {
        **_QWEN,
        **_sizes(2048, 5632, 24, 16),
        "architectures": ["Qwen2MoeForCausalLM"],
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "llama-4-scout": {
        **_LLAMA4,
        "max_position_embeddings": 10485760,
        "num_local_experts": 16,
        "interleave_moe_layer_step": 1,
        "rope_scaling": {**_llama_rope(16.0), "high_freq_factor": 1.0},
    },
    "llama-4-maverick": {
        **_LLAMA4,
        "max_position_embeddings": 1048576,
        "num_local_experts": 128,
        "interleave_moe_layer_step": 2,
        "use_qk_norm": False,
    },
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
