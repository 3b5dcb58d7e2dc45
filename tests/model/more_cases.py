"""Tiny models to compare with transformers beside those of ``test_parity``: the switches that are left."""

from __future__ import annotations

from typing import Any

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
}
MLA = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 9,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
}
MIXED = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-untied": (
        "GemmaForCausalLM",
        {"head_dim": 8, "tie_word_embeddings": False, "rms_norm_eps": 1e-2},
    ),
    "gemma2-uncapped": (
        "Gemma2ForCausalLM",
        {
            **MIXED,
            "seed": 4,
            "num_hidden_layers": 3,
            "head_dim": 8,
            "sliding_window": 7,
            "num_key_value_heads": 1,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "gemma3-biases": (
        "Gemma3ForCausalLM",
        {
            **MIXED,
            "seed": 1,
            "num_hidden_layers": 3,
            "head_dim": 8,
            "sliding_window": 7,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-2,
            "num_key_value_heads": 4,
        },
    ),
    "gemma3-of-a-multimodal-one": (
        "Gemma3ForConditionalGeneration",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 9,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 30,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "phi3-theta": (
        "Phi3ForCausalLM",
        {
            "rms_norm_eps": 1e-2,
            "tie_word_embeddings": True,
            "num_key_value_heads": 8,
            "rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 1.0},
            "pad_token_id": None,
        },
    ),
    "olmo2-biases": (
        "Olmo2ForCausalLM",
        {
            "seed": 9,
            "attention_bias": True,
            "rms_norm_eps": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        },
    ),
    "granite-tied": (
        "GraniteForCausalLM",
        {
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-2,
            "logits_scaling": 0.8,
            "attention_multiplier": 0.4,
            "rope_parameters": YARN,
        },
    ),
    "cohere2-scaled": (
        "Cohere2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 10,
            "layer_norm_eps": 1e-2,
            "logit_scale": 0.8,
            "num_key_value_heads": 8,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
        },
    ),
    "smollm3-listed": (
        "SmolLM3ForCausalLM",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 1],
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-2,
            "rope_parameters": YARN,
            "pad_token_id": None,
        },
    ),
    "exaone4-scaled": (
        "Exaone4ForCausalLM",
        {
            **MIXED,
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "head_dim": 16,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {**LLAMA3, "rope_theta": 300.0},
        },
    ),
    "glm4-tied": (
        "Glm4ForCausalLM",
        {
            "head_dim": 16,
            "rms_norm_eps": 1e-2,
            "tie_word_embeddings": True,
            "num_key_value_heads": 8,
            "rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.25},
            "pad_token_id": None,
        },
    ),
    "mixtral-tied": (
        "MixtralForCausalLM",
        {
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-2,
            "num_local_experts": 7,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "qwen2-moe-tied": (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 5,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-2,
            "rope_parameters": YARN,
        },
    ),
    "qwen3-moe-sparse": (
        "Qwen3MoeForCausalLM",
        {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-2,
            "head_dim": 8,
            "rope_parameters": YARN,
        },
    ),
    "olmoe-plain": (
        "OlmoeForCausalLM",
        {
            "num_experts": 7,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
            "num_key_value_heads": 8,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.0},
            "pad_token_id": None,
        },
    ),
    "granite-moe-tied": (
        "GraniteMoeForCausalLM",
        {
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-2,
            "attention_multiplier": 0.3,
            "num_local_experts": 5,
            "num_experts_per_tok": 1,
            "rope_parameters": YARN,
        },
    ),
    "granite-moe-shared-biases": (
        "GraniteMoeSharedForCausalLM",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-2,
            "attention_multiplier": 0.3,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        },
    ),
    "gpt-oss-listed": (
        "GptOssForCausalLM",
        {
            **MIXED,
            "num_hidden_layers": 3,
            "head_dim": 8,
            "attention_bias": False,
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "rms_norm_eps": 1e-2,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
            "pad_token_id": None,
        },
    ),
    "deepseek-v3-scaled": (
        "DeepseekV3ForCausalLM",
        {
            **MLA,
            "q_lora_rank": None,
            "first_k_dense_replace": 2,
            "routed_scaling_factor": 0.7,
            "tie_word_embeddings": True,
            "n_group": 3,
            "topk_group": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "llama4-plain": (
        "Llama4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 0, 1],
            "layer_types": [
                *("chunked_attention", "full_attention"),
                *("full_attention", "chunked_attention"),
            ],
            "num_local_experts": 4,
            "intermediate_size_mlp": 80,
            "attention_chunk_size": 7,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "llama4-of-a-multimodal-one": (
        "Llama4ForConditionalGeneration",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size_mlp": 80,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 10,
            "floor_scale": 7,
            "attn_scale": 0.5,
        },
    ),
}
"""Of each family one more, for the switches that ``CASES`` leave at their defaults or move together."""
