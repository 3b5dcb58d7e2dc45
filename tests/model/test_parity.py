"""Logits and greedy tokens of every family against transformers, from paged KV, one step at a
time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jserve.model.families import family_for
from jserve.model.rope import for_context
from tests.model.driver import Driver
from tests.model.more_cases import LLAMA3, MLA, MORE, YARN

LONGROPE = {
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.3, 1.7],
        "long_factor": [2.0, 3.0, 5.0, 9.0],
    },
    "pad_token_id": None,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa4": ("LlamaForCausalLM", {}),
    "llama-tied-gqa1": (
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    ),
    "llama3-biases-gqa8": (
        "LlamaForCausalLM",
        {
            "rope_parameters": LLAMA3,
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 1,
        },
    ),
    "llama-linear": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}},
    ),
    "llama-dynamic": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            "max_position_embeddings": 48,
        },
    ),
    "llama-yarn": ("LlamaForCausalLM", {"rope_parameters": YARN, "head_dim": 16}),
    "qwen2-gqa4": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-window-yarn": (
        "Qwen2ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 1,
            "rope_parameters": {**YARN, "beta_fast": 16.0, "mscale": 0.7, "mscale_all_dim": 0.5},
        },
    ),
    "qwen3-gqa8": ("Qwen3ForCausalLM", {"num_key_value_heads": 1, "head_dim": 16}),
    "qwen3-bias-window": (
        "Qwen3ForCausalLM",
        {
            "attention_bias": True,
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 17}),
    "mistral-head-dim": (
        "MistralForCausalLM",
        {"sliding_window": None, "head_dim": 16, "num_key_value_heads": 4},
    ),
    "gemma": ("GemmaForCausalLM", {"head_dim": 16, "attention_bias": True}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 11,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "seed": 9,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 9,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 30,
            "final_logit_softcapping": 6.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "phi3-window-partial": (
        "Phi3ForCausalLM",
        {
            "sliding_window": 13,
            "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
            "pad_token_id": None,
        },
    ),
    "phi3-longrope": ("Phi3ForCausalLM", {"original_max_position_embeddings": 128, **LONGROPE}),
    "phi3-longrope-beyond": (
        "Phi3ForCausalLM",
        {"original_max_position_embeddings": 32, **LONGROPE},
    ),
    "olmo2": ("Olmo2ForCausalLM", {"rms_norm_eps": 1e-3, "seed": 1}),
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 2.0,
            "logits_scaling": 2.5,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "logit_scale": 0.4,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {
            "num_hidden_layers": 3,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 12,
            "attention_bias": True,
            "mlp_bias": True,
            "pad_token_id": None,
        },
    ),
    "exaone4": (
        "Exaone4ForCausalLM",
        {"num_hidden_layers": 3, "sliding_window": 8, "sliding_window_pattern": 3},
    ),
    "exaone4-full": (
        "Exaone4ForCausalLM",
        {
            "seed": 1,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 2,
            "tie_word_embeddings": True,
        },
    ),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 16, "pad_token_id": None}),
    "glm4-whole": (
        "Glm4ForCausalLM",
        {
            "head_dim": 8,
            "attention_bias": False,
            "rope_parameters": {"rope_theta": 700.0, "partial_rotary_factor": 1.0},
            "pad_token_id": None,
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {
            "seed": 1,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "moe_layers": [0, 3],
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size_mlp": 80,
            "no_rope_layers": [1, 0, 1, 1],
            "attention_chunk_size": 10,
            "floor_scale": 7,
            "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0},
            "attn_scale": 0.5,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-2,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2ForCausalLM",
        {
            **MLA,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.6, "rope_theta": 300.0},
        },
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {
            **MLA,
            "q_lora_rank": 20,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
        },
    ),
    "deepseek-v2-greedy": (
        "DeepseekV2ForCausalLM",
        {**MLA, "q_lora_rank": 20, "first_k_dense_replace": 0, "n_shared_experts": 1},
    ),
    "deepseek-v2-dense": (
        "DeepseekV2ForCausalLM",
        {**MLA, "q_lora_rank": None, "first_k_dense_replace": 3, "mlp_bias": True},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 9,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.8,
            "rope_parameters": {**YARN, "truncate": False, "rope_theta": 700.0},
            "pad_token_id": None,
        },
    ),
    "deepseek-v3-halves": (
        "DeepseekV3ForCausalLM",
        {
            **MLA,
            "q_lora_rank": 20,
            "rope_interleave": False,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {"sliding_window": 17, "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 3},
    ),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
        },
    ),
    "qwen2-moe-plain": (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "attention_bias": True,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 11,
        },
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "clip_qkv": 0.7,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
            "pad_token_id": None,
        },
    ),
    "granite-moe": (
        "GraniteMoeForCausalLM",
        {
            "embedding_multiplier": 2.0,
            "logits_scaling": 2.5,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "attention_bias": True,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
        },
    ),
    "granite-moe-shared": (
        "GraniteMoeSharedForCausalLM",
        {
            "embedding_multiplier": 2.0,
            "logits_scaling": 2.5,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 48,
            "seed": 3,
        },
    ),
}
ON_REF = ("llama-gqa4", "qwen3-bias-window", "deepseek-v2")
NIGHTLY = (
    "llama-linear",
    "llama-dynamic",
    "qwen2-gqa4",
    "qwen3-gqa8",
    "gemma",
    "phi3-window-partial",
    "exaone4-full",
    "glm4-whole",
    "qwen2-moe-plain",
    "granite-moe",
)
"""Of parts that other cases, or ``test_rope``, have too."""
ALWAYS = ("gemma2", "gpt-oss")
"""Scores that are capped and sink logits that join a softmax, which few other cases have."""
RUNS = [
    *(
        pytest.param(c, "xla", marks=pytest.mark.slow if c in NIGHTLY else ())
        for c in CASES
        if c not in ALWAYS
    ),
    *((case, "ref") for case in ON_REF),
]


PROMPT = 39
"""Tokens of the prompt."""
ERROR = 1e-4
"""The largest of a logit."""


def check(case: str, attn: str, n: int) -> None:
    from tests.model import hf  # every worker collects this file, one runs it

    architecture, switches = (CASES | MORE)[case]
    model, config = hf.tiny(architecture, **switches)
    family = family_for(config)
    arch = for_context(family.arch(config), PROMPT + n)
    driver = Driver(family, arch, hf.weights(model), attn=attn)
    prompt = np.random.default_rng(1).integers(0, 128, PROMPT).tolist()
    want_logits, want = hf.greedy(model, prompt, n)
    got_logits, got = driver.greedy(prompt, n)
    assert np.abs(got_logits - want_logits).max() < ERROR
    assert got == want
    assert len(set(want)) > 7, "the model repeats itself, which would hide errors"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("case", "attn"), RUNS)
def test_same_logits_and_tokens_as_transformers(case: str, attn: str) -> None:
    check(case, attn, 64)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALWAYS)
def test_capped_scores_and_sink_logits_as_in_transformers(case: str) -> None:
    check(case, "xla", 64)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_the_switches_that_are_left(case: str) -> None:
    check(case, "xla", 48)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c not in ON_REF])
def test_same_logits_and_tokens_on_the_reference(case: str) -> None:
    check(case, "ref", 64)
