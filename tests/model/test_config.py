"""config.json is honoured or refused by name, one test per key."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import pytest

from jserve.errors import ConfigError
from jserve.model.arch import Arch, RopeScaling
from jserve.model.families import family_for, register_family
from jserve.model.rope import for_context, for_requests, short_context
from tests.model.published import GPT_OSS, SCOUT, V2_LITE, V3

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 500000.0,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
GEMMA2, GEMMA3, GRANITE, COHERE2, SMOLLM3, EXAONE4, GLM4, PHI3 = (
    {
        **{k: v for k, v in LLAMA.items() if k != "rope_theta"},
        "architectures": [f"{name}ForCausalLM"],
    }
    for name in ("Gemma2", "Gemma3", "Granite", "Cohere2", "SmolLM3", "Exaone4", "Glm4", "Phi3")
)
ORIGINAL = "original_max_position_embeddings"
LONG = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, ORIGINAL: 64}
YARN = {"type": "yarn", ORIGINAL: 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def arch(config: dict[str, Any], **changes: Any) -> Any:
    config = {**config, **changes}
    return family_for(config).arch(config)


KV_ONLY = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
}


def scheme(**changes: Any) -> dict[str, Any]:
    found = {**KV_ONLY["kv_cache_scheme"], **changes}
    return {"quantization_config": {**KV_ONLY, "kv_cache_scheme": found}}


REFUSED = [
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
    (
        LLAMA,
        {"quantization_config": KV_ONLY | {"kv_cache_scheme": 8}},
        "quantization_config.kv_cache_scheme",
    ),
    (LLAMA, scheme(num_bits=4), "quantization_config.kv_cache_scheme.num_bits"),
    (LLAMA, scheme(type="int"), "quantization_config.kv_cache_scheme.type"),
    (LLAMA, scheme(strategy="channel"), "quantization_config.kv_cache_scheme.strategy"),
    (LLAMA, scheme(dynamic=True), "quantization_config.kv_cache_scheme.dynamic"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    (LLAMA, {"num_attention_heads": 0}, "num_attention_heads"),
    (LLAMA, {"num_attention_heads": True}, "num_attention_heads"),
    (LLAMA, {"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size"),
    (LLAMA, {"hidden_size": None}, "hidden_size"),
    (LLAMA, {"hidden_size": "64"}, "hidden_size"),
    (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads"),
    (LLAMA, {"num_key_value_heads": -2}, "num_key_value_heads"),
    (LLAMA, {"head_dim": 7}, "head_dim"),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers"),
    (LLAMA, {"intermediate_size": 1.5}, "intermediate_size"),
    (LLAMA, {"vocab_size": 0}, "vocab_size"),
    (LLAMA, {"max_position_embeddings": None}, "max_position_embeddings"),
    (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    (LLAMA, {"rope_theta": float("nan")}, "rope_theta"),
    (LLAMA, {"rope_theta": float("inf")}, "rope_theta"),
    (LLAMA, {"rope_theta": 0}, "rope_theta"),
    (LLAMA, {"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta"),
    (LLAMA, {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling"),
    (LLAMA, {"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters"),
    (LLAMA, {"rope_scaling": "linear"}, "rope_scaling"),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, "factor"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "factor"),
    (
        LLAMA,
        {"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 3}},
        "rope_scaling.beta_fast",
    ),
    (LLAMA, {"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor"),
    (LLAMA, {"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, "high_freq_factor"),
    (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}}, "truncate"),
    (LLAMA, {"rope_scaling": {**YARN, "factor": 0.5}}, "factor"),
    (
        LLAMA,
        {"rope_scaling": {"type": "default", "mrope_section": [2]}},
        "rope_scaling.mrope_section",
    ),
    (LLAMA, {"use_qk_norm": True}, "use_qk_norm"),
    (LLAMA, {"swiglu_limit": 7.0}, "swiglu_limit"),
    (LLAMA, {"norm_topk_prob": True}, "norm_topk_prob"),
    (LLAMA, {"moe_layer_freq": 2}, "moe_layer_freq"),
    (LLAMA, {"rope_local_base_freq": 1e4}, "rope_local_base_freq"),
    (LLAMA, {"is_causal": False}, "is_causal"),
    (LLAMA, {"a_key_of_tomorrow": "on"}, "a_key_of_tomorrow"),
    (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": "x"}}, "mscale"),
    (LLAMA, {"attention_bias": "yes"}, "attention_bias"),
    (LLAMA, {"mlp_bias": 1}, "mlp_bias"),
    (LLAMA, {"tie_word_embeddings": 1}, "tie_word_embeddings"),
    (LLAMA, {"num_experts": 8}, "num_experts"),
    (LLAMA, {"num_local_experts": 8}, "num_local_experts"),
    (LLAMA, {"kv_lora_rank": 512}, "kv_lora_rank"),
    (LLAMA, {"clip_qkv": 8.0}, "clip_qkv"),
    (LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    (LLAMA, {"attention_chunk_size": 8192}, "attention_chunk_size"),
    (LLAMA, {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    (LLAMA, {"residual_multiplier": 0.2}, "residual_multiplier"),
    (LLAMA, {"is_encoder_decoder": True}, "is_encoder_decoder"),
    (LLAMA, {"vision_config": {}}, "vision_config"),
    (LLAMA, {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    (LLAMA, {"sliding_window": 64}, "sliding_window"),
    (LLAMA, {"architectures": ["GPT2LMHeadModel"]}, "architectures"),
    (LLAMA, {"architectures": None}, "architectures"),
    (QWEN2, {"layer_types": ["full_attention"]}, "layer_types"),
    (QWEN2, {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    (QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
    (QWEN2, {"use_sliding_window": True, "sliding_window": -1}, "sliding_window"),
    (QWEN2, {"use_sliding_window": "no"}, "use_sliding_window"),
    (QWEN3, {"attention_bias": 3}, "attention_bias"),
    (MISTRAL, {"sliding_window": 4.5}, "sliding_window"),
    (MISTRAL, {"layer_types": ["full_attention"] * 2}, "layer_types"),
    (GEMMA2, {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
    (GEMMA2, {"hidden_activation": "silu"}, "hidden_activation"),
    (GEMMA2, {"logit_scale": 0.5}, "logit_scale"),
    (GEMMA3, {"rope_local_base_freq": 0}, "rope_local_base_freq"),
    (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern"),
    (GRANITE, {"residual_multiplier": "x"}, "residual_multiplier"),
    (COHERE2, {"head_dim": 16}, "head_dim"),
    (COHERE2, {"layer_types": ["chunked_attention"] * 2}, "layer_types"),
    (SMOLLM3, {"no_rope_layers": [1]}, "no_rope_layers"),
    (SMOLLM3, {"no_rope_layers": [1, 2]}, "no_rope_layers"),
    (EXAONE4, {"sliding_window_pattern": "LLLG"}, "layer_types"),
    (GLM4, {"partial_rotary_factor": 0.39}, "partial_rotary_factor"),
    (GLM4, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    (PHI3, {"rope_scaling": {**LONG, "short_factor": [1.0]}}, "rope_scaling.short_factor"),
    (PHI3, {"rope_scaling": {**LONG, "long_factor": [1.0, 0.0, 1, 1]}}, "rope_scaling.long_factor"),
    (PHI3, {"rope_scaling": {**LONG, "short_factor": None}}, "rope_scaling.short_factor"),
    (PHI3, {"rope_scaling": LONG, "original_max_position_embeddings": 0}, ORIGINAL),
]


@pytest.mark.parametrize(
    ("config", "change", "field"), REFUSED, ids=[f"{f}-{i}" for i, (_, _, f) in enumerate(REFUSED)]
)
def test_refused_by_name(config: dict[str, Any], change: dict[str, Any], field: str) -> None:
    arch(config)
    assert refused(config, change) == field


def refused(config: dict[str, Any], change: dict[str, Any]) -> str | None:
    """The key that the error of a changed config.json names, in its message too."""
    with pytest.raises(ConfigError) as e:
        arch(config, **change)
    assert str(e.value.field).rpartition(".")[2] in e.value.message
    return e.value.field


def test_scales_of_8_bit_kv_are_read() -> None:
    assert arch(LLAMA, quantization_config=KV_ONLY) == replace(arch(LLAMA), kv_scales="tensor")


@pytest.mark.parametrize(
    ("scheme", "strategy"),
    [
        ({"num_bits": 8, "type": "float", "strategy": "attn_head"}, "attn_head"),
        ({"num_bits": 8, "type": "float"}, "tensor"),
        ("static", "tensor"),
    ],
)
def test_schemes_of_8_bit_kv(scheme: Any, strategy: str) -> None:
    given = {"quant_method": "fp8", "kv_cache_scheme": scheme}
    assert arch(LLAMA, quantization_config=given).kv_scales == strategy


def test_harmless_keys_pass() -> None:
    quiet = {
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "pretraining_tp": 1,
        "quantization_config": None,
        "partial_rotary_factor": 1.0,
        "auto_map": {"AutoModel": "evil.py"},
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "_attn_implementation": "flash_attention_2",
        "use_qk_norm": False,
        "swiglu_limit": None,
        "norm_topk_prob": False,
        "moe_layer_freq": 1,
        "temperature": 0.6,
        "a_key_of_tomorrow": False,
    }
    assert arch(LLAMA, **quiet) == arch(LLAMA)


def test_yarn_without_a_factor_stretches_to_the_context_that_is_stated() -> None:
    """A factor of null and none at all; what transformers makes of null."""
    stated = arch(LLAMA, rope_scaling={**YARN, "factor": 2.0})
    assert arch(LLAMA, rope_scaling={**YARN, "factor": None}) == stated
    assert arch(LLAMA, rope_scaling=YARN) == stated
    assert stated.max_position == 128


def test_all_unknown_keys_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"first 1, second 'x': not known .* remove it"):
        arch(LLAMA, first=1, second="x", third=False)


def test_both_spellings_of_rope_mean_the_same() -> None:
    old = arch(LLAMA, rope_theta=5e5, rope_scaling={**LLAMA3, "type": "llama3"})
    new = arch(
        {k: v for k, v in LLAMA.items() if k != "rope_theta"},
        rope_parameters={**LLAMA3, "rope_theta": 5e5},
    )
    assert old == new
    assert old.ropes[0].scaling == RopeScaling(
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=64,
    )


def test_scaling_stretches_the_context() -> None:
    def context(**rope: Any) -> int:
        return arch(LLAMA, rope_scaling=rope or None).max_position

    assert context() == 128
    assert context(type="linear", factor=2.0) == 256
    assert context(type="dynamic", factor=4.0) == 512
    assert context(type="yarn", factor=4.0, original_max_position_embeddings=64) == 256
    assert context(**LLAMA3) == 128


def seen(a: Arch) -> list[int]:
    return [layer.attn.window for layer in a.layers]


def test_families_read_their_own_switches() -> None:
    a = arch(LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    first = a.layers[0]
    assert (first.attn.qkv_bias, first.attn.o_bias, first.ffn.mlp_bias) == (True, True, True)
    assert (a.tied, a.H) == (True, 8)
    a = arch(QWEN2, use_sliding_window=True, sliding_window=9, max_window_layers=1)
    first = a.layers[0].attn
    assert (first.qkv_bias, first.o_bias, seen(a)) == (True, False, [0, 9])
    assert seen(arch(QWEN2, sliding_window=9, max_window_layers=0)) == [0, 0]
    a = arch(QWEN3, head_dim=16)
    assert (a.layers[1].attn.qk_norm, a.H, a.layers[1].attn.qkv_bias) == ("head", 16, False)
    assert seen(arch(MISTRAL)) == [4096, 4096]
    assert seen(arch(MISTRAL, sliding_window=None)) == [0, 0]


def test_layers_differ_where_a_family_says_so() -> None:
    def turns(a: Arch) -> list[bool]:
        return [layer.attn.rope is not None for layer in a.layers]

    a = arch(GEMMA2, num_hidden_layers=4, sliding_window=9)
    assert (seen(a), a.norm.plus_one, a.tied) == ([9, 0, 9, 0], True, True)
    assert (a.layers[0].attn.soft_cap, a.logit_soft_cap) == (50.0, 30.0)
    a = arch(GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (a.layers[0].attn.soft_cap, a.logit_soft_cap) == (0.0, 0.0)
    a = arch(GEMMA3, num_hidden_layers=12, rope_scaling={"rope_type": "linear", "factor": 8.0})
    full, local = a.layers[5].attn, a.layers[4].attn
    assert seen(a) == ([4096] * 5 + [0]) * 2
    assert (full.rope.theta, full.rope.scaling.factor) == (1e6, 8.0)
    assert (local.rope.theta, local.rope.scaling) == (1e4, None)
    a = arch(COHERE2, num_hidden_layers=8)
    assert (seen(a), turns(a)) == (([4096] * 3 + [0]) * 2, ([True] * 3 + [False]) * 2)
    a = arch(SMOLLM3, num_hidden_layers=4)
    assert (seen(a), turns(a)) == ([0] * 4, [True, True, True, False])
    a = arch(EXAONE4, num_hidden_layers=4, sliding_window_pattern="LLLG", sliding_window=None)
    assert (seen(a), turns(a)) == ([0] * 4, [True] * 4)
    assert arch(GLM4).ropes[0].rotary == 64


def test_longrope_has_other_factors_where_a_longer_context_is_asked_for() -> None:
    """Keys of older and of newer files."""
    a = arch(PHI3, rope_scaling=LONG, max_position_embeddings=4096)
    assert (a.max_position, a.ropes[0].scaling.factors) == (64, (1.0,) * 4)
    assert for_context(a, 0) is for_context(a, 64) is a
    beyond = for_context(a, 65)
    assert (beyond.max_position, beyond.ropes[0].scaling.factors) == (4096, (2.0,) * 4)
    assert for_context(beyond, 4096) is beyond
    assert for_requests(a, 64) is a
    both = for_requests(a, 65)
    assert (both.max_position, both.ropes[0].scaling.by_row) == (4096, True)
    assert for_requests(both, 4096) is both
    assert [short_context(each) for each in (a, beyond, both)] == [0, 0, 64]
    plain = arch(LLAMA)
    assert for_context(plain, 1 << 20) is for_requests(plain, 1 << 20) is plain
    new = {**LONG, "rope_type": "longrope", "rope_theta": 1e4}
    assert arch(PHI3, rope_parameters=new, max_position_embeddings=4096) == a
    assert a.ropes[0].scaling.factor == 64.0


def test_register_family() -> None:
    family = family_for(LLAMA)
    register_family(replace(family, name="mine", architectures=("MineForCausalLM",)))
    assert family_for({**LLAMA, "architectures": ["MineForCausalLM"]}).name == "mine"
    assert family_for(LLAMA) is family


def test_what_published_files_say_is_read() -> None:
    lite, v3, oss, scout = (arch(config) for config in (V2_LITE, V3, GPT_OSS, SCOUT))
    kept = [found.kv_layers[0].arrays for found in (lite, v3)]
    assert [[(x.heads, x.width) for x in arrays] for arrays in kept] == [[(0, 576)]] * 2
    assert lite.layers[0].attn.scale == pytest.approx(192**-0.5 * (0.0707 * log(40) + 1) ** 2)
    assert [lite.max_position, v3.max_position, oss.max_position] == [163840, 163840, 131072]
    assert [x.attn.window for x in oss.layers[:3]] == [128, 0, 128]
    assert all(x.attn.sink_logits and x.attn.qkv_bias for x in oss.layers)
    assert [x.attn.chunk for x in scout.layers[:5]] == [8192, 8192, 8192, 0, 8192]
    assert [x.attn.qk_norm for x in scout.layers[2:4]] == ["turned", ""]
    assert scout.layers[3].attn.temperature is not None


NEW = [
    (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob"),
    (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method"),
    (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func"),
    (V2_LITE, {"moe_layer_freq": 2}, "moe_layer_freq"),
    (V2_LITE, {"mlp_bias": True}, "mlp_bias"),
    (V2_LITE, {"v_head_dim": None}, "v_head_dim"),
    (V2_LITE, {"topk_method": "group_limited_greedy", "n_group": 5}, "n_group"),
    (V3, {"scoring_func": "softmax"}, "scoring_func"),
    (V3, {"topk_method": "greedy"}, "topk_method"),
    (V3, {"n_group": 7}, "n_group"),
    (V3, {"rope_interleave": 1}, "rope_interleave"),
    (V2_LITE, {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    (GPT_OSS, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    (GPT_OSS, {"sliding_window": None}, "sliding_window"),
    (GPT_OSS, {"swiglu_limit": 0}, "swiglu_limit"),
    (GPT_OSS, {"hidden_act": "gelu"}, "hidden_act"),
    (GPT_OSS, {"num_experts_per_tok": 33}, "num_experts_per_tok"),
    (SCOUT, {"moe_layers": [48]}, "moe_layers"),
    (SCOUT, {"layer_types": ["sliding_attention"] * 48}, "layer_types"),
    (SCOUT, {"attention_chunk_size": 0}, "attention_chunk_size"),
    (SCOUT, {"floor_scale": 0.5}, "floor_scale"),
    (SCOUT, {"vision_config": {}}, "vision_config"),
]


@pytest.mark.parametrize(
    ("config", "change", "field"), NEW, ids=[f"{f}-{i}" for i, (_, _, f) in enumerate(NEW)]
)
def test_what_published_files_do_not_say_is_refused_by_name(
    config: dict[str, Any], change: dict[str, Any], field: str
) -> None:
    arch(config)
    assert refused(config, change) == field
