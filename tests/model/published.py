"""The config.json of one published model of each architecture, key by key, and a tiny model with the same keys.

Written down, not fetched. Token ids and versions are examples, Phi's long factors and the sizes of Granite's model with
a shared expert stand in for the published ones; what describes how images are seen is left out.
"""

from __future__ import annotations

from typing import Any

_BOOKKEEPING: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0",
    "use_cache": True,
}
_SILU: dict[str, Any] = {**_BOOKKEEPING, "hidden_act": "silu"}
_LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def _sizes(
    D: int, F: int, L: int, N: int, K: int, V: int, context: int, eps: float = 1e-6
) -> dict[str, Any]:
    return {
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "vocab_size": V,
        "max_position_embeddings": context,
        "rms_norm_eps": eps,
    }


DEEPSEEK: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
}
V2_LITE: dict[str, Any] = {
    **DEEPSEEK,
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
V3: dict[str, Any] = {
    **DEEPSEEK,
    "architectures": ["DeepseekV3ForCausalLM"],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        "quant_method": "mxfp4",
    },
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 10485760,
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "router_jitter_noise": 0.0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "vocab_size": 202048,
}
LLAMA_3_1_8B: dict[str, Any] = {
    **_SILU,
    **_sizes(4096, 14336, 32, 32, 8, 128256, 131072, 1e-5),
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_scaling": _LLAMA3,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
MISTRAL_7B: dict[str, Any] = {
    **_SILU,
    **_sizes(4096, 14336, 32, 32, 8, 32768, 32768, 1e-5),
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
QWEN2_5_7B: dict[str, Any] = {
    **_SILU,
    **_sizes(3584, 18944, 28, 28, 4, 152064, 32768),
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_window_layers": 28,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
QWEN3_8B: dict[str, Any] = {
    **_SILU,
    **_sizes(4096, 12288, 36, 32, 8, 151936, 40960),
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "max_window_layers": 36,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
GEMMA_2B: dict[str, Any] = {
    **_BOOKKEEPING,
    **_sizes(2048, 16384, 18, 8, 1, 256000, 8192),
    "architectures": ["GemmaForCausalLM"],
    "model_type": "gemma",
    "attention_bias": False,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
    "rope_scaling": None,
    "rope_theta": 10000.0,
}
GEMMA_2_9B: dict[str, Any] = {
    **_BOOKKEEPING,
    **_sizes(3584, 14336, 42, 16, 8, 256000, 8192),
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
}
GEMMA_3_1B: dict[str, Any] = {
    **_BOOKKEEPING,
    **_sizes(1152, 6912, 26, 4, 1, 262144, 32768),
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"model_type": "siglip_vision_model"},
}
PHI_4_MINI: dict[str, Any] = {
    **_SILU,
    **_sizes(3072, 8192, 32, 24, 8, 200064, 131072, 1e-5),
    "_name_or_path": "Phi-4-mini-instruct",
    "architectures": ["Phi3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "model_type": "phi3",
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 199999,
    "partial_rotary_factor": 0.75,
    "resid_pdrop": 0.0,
    "rope_scaling": {
        "long_factor": [1.0 + i for i in range(48)],  # 48 numbers from 1 to 47.8
        "short_factor": [1.0] * 48,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
}
OLMO_2_7B: dict[str, Any] = {
    **_SILU,
    **_sizes(4096, 11008, 32, 32, 32, 100352, 4096),
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "attention_bias": False,
    "pad_token_id": 100277,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
}
GRANITE_3_3_8B: dict[str, Any] = {
    **_SILU,
    **_sizes(4096, 12800, 40, 32, 8, 49159, 131072, 1e-5),
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "logits_scaling": 16.0,
    "mlp_bias": False,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
}
COMMAND_R7B: dict[str, Any] = {
    **{
        k: v for k, v in _sizes(4096, 14336, 32, 32, 8, 256000, 8192).items() if k != "rms_norm_eps"
    },
    **_SILU,
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "attention_bias": False,
    "cache_implementation": "hybrid",
    "head_dim": 128,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.25,
    "order_of_interleaved_layers": "local_attn_first",
    "pad_token_id": 0,
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
}
SMOLLM3_3B: dict[str, Any] = {
    **_SILU,
    **_sizes(2048, 11008, 36, 16, 4, 128256, 65536),
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "attention_bias": False,
    "layer_types": ["full_attention"] * 36,
    "max_window_layers": 28,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "pad_token_id": 128004,
    "pretraining_tp": 2,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
}
EXAONE_4_32B: dict[str, Any] = {
    **_SILU,
    **_sizes(5120, 27392, 64, 40, 8, 102400, 131072, 1e-5),
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    "head_dim": 128,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
    "pad_token_id": 0,
    "rope_scaling": {**_LLAMA3, "factor": 16.0},
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
}
GLM_4_9B: dict[str, Any] = {
    **_SILU,
    **_sizes(4096, 13696, 40, 32, 2, 151552, 32768, 1e-5),
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "attention_bias": True,
    "head_dim": 128,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
MIXTRAL_8X7B: dict[str, Any] = {
    **_SILU,
    **_sizes(4096, 14336, 32, 32, 8, 32000, 32768, 1e-5),
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
QWEN1_5_MOE: dict[str, Any] = {
    **_SILU,
    **_sizes(2048, 5632, 24, 16, 16, 151936, 8192),
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "decoder_sparse_step": 1,
    "max_window_layers": 21,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
QWEN3_30B_A3B: dict[str, Any] = {
    **_SILU,
    **_sizes(2048, 6144, 48, 32, 4, 151936, 40960),
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
OLMOE_1B_7B: dict[str, Any] = {
    **_SILU,
    **_sizes(2048, 1024, 16, 16, 16, 50304, 4096, 1e-5),
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "attention_bias": False,
    "clip_qkv": None,
    "norm_topk_prob": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
}
GRANITE_1B_A400M: dict[str, Any] = {
    **_SILU,
    **_sizes(1024, 512, 24, 16, 8, 49155, 4096),
    "architectures": ["GraniteMoeForCausalLM"],
    "model_type": "granitemoe",
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
    "num_experts_per_tok": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.0,
    "tie_word_embeddings": True,
}
GRANITE_7B_1B_SHARED: dict[str, Any] = {
    **GRANITE_1B_A400M,
    **_sizes(1536, 512, 40, 24, 8, 49152, 4096),
    "architectures": ["GraniteMoeSharedForCausalLM"],
    "model_type": "granitemoeshared",
    "num_experts_per_tok": 6,
    "num_local_experts": 62,
    "shared_intermediate_size": 1024,
}
SCOUT_WHOLE: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "boi_token_index": 200080,
    "eoi_token_index": 200081,
    "image_token_index": 200092,
    "text_config": {
        **SCOUT,
        "_attn_implementation_autoset": True,
        "attention_dropout": 0.0,
        "attn_temperature_tuning": 4,
        "cache_implementation": "hybrid",
        "eos_token_id": [200001, 200007, 200008],
        "for_llm_compressor": False,
        "model_type": "llama4_text",
        "output_router_logits": False,
        "pad_token_id": 200018,
        "router_aux_loss_coef": 0.001,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vision_config": {"model_type": "llama4_vision_model"},
}
SCOUT_WHOLE["text_config"].pop("architectures")

PUBLISHED: dict[str, dict[str, Any]] = {
    config["architectures"][0]: config
    for config in (
        *(LLAMA_3_1_8B, MISTRAL_7B, QWEN2_5_7B, QWEN3_8B, GEMMA_2B, GEMMA_2_9B, GEMMA_3_1B),
        *(GEMMA_3_4B, PHI_4_MINI, OLMO_2_7B, GRANITE_3_3_8B, COMMAND_R7B, SMOLLM3_3B),
        *(EXAONE_4_32B, GLM_4_9B, MIXTRAL_8X7B, QWEN1_5_MOE, QWEN3_30B_A3B, OLMOE_1B_7B),
        *(GRANITE_1B_A400M, GRANITE_7B_1B_SHARED, V2_LITE, V3, GPT_OSS, SCOUT, SCOUT_WHOLE),
    )
}
"""Architecture -> the config.json of a published model. That of Llama 4's text alone is part of a larger one."""


LAYERS = 4
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
_MOST_EXPERTS = 16
"""A multiple of all groups, not below what a token chooses."""


def resized(config: dict[str, Any]) -> dict[str, Any]:
    """A model of four layers and of heads of 16 dimensions with every key of ``config``, for the tokenizer of the
    shipped model."""
    if "text_config" in config:
        return {**config, "text_config": resized(config["text_config"])}
    small = {k: v for k, v in _SMALL.items() if config.get(k)}
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key):
            small[key] = min(config[key], _MOST_EXPERTS)
    for key in ("layer_types", "no_rope_layers"):
        if config.get(key):
            small[key] = config[key][:LAYERS]
    if "head_dim" in config:
        small["head_dim"] = 16
    if "quantization_config" in config:
        small["quantization_config"] = None
    if "short_factor" in (config.get("rope_scaling") or {}):
        turned = int(16 * config["partial_rotary_factor"]) // 2
        factors = {k: config["rope_scaling"][k][:turned] for k in ("short_factor", "long_factor")}
        small["rope_scaling"] = {**config["rope_scaling"], **factors}
    return {**config, **small}
