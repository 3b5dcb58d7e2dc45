"""Experts of quantised checkpoints: kept as they are stored, for whatever the other layers are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import WeightsError
from jserve.model.quant import QTensor
from tests.model.assembly import assemble_all
from tests.weights.quant_float_files import bytes_of, floats4, repeated
from tests.weights.test_weights_quant import (
    CONFIG,
    FORMATS,
    Written,
    assert_equal,
    loaded,
    said,
    wide,
)
from tests.weights.test_weights_quant_logits import served
from tests.weights.weights_kit import Model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
QWEN = CONFIG | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
DEEPSEEK = CONFIG | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
ROUTERS = {"modules_to_not_convert": ["mlp.gate"]}
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "qwen3 awq": (QWEN, "awq", ROUTERS, "int4 g32 zeros"),
    "qwen3 fp8": (QWEN, "fp8 blocks", {}, "e4m3 g8 rounded"),
    "qwen3 fp8 static": (QWEN, "fp8 static", {}, "e4m3 static"),
    "qwen3 ordered": (QWEN, "gptq ordered", {}, "wide"),
    "deepseek": (DEEPSEEK, "fp8 powers of two", {}, "e4m3 g32 rounded"),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES)
def test_experts_keep_their_form(tmp_path: Path, case: str) -> None:
    base, name, more, form = CASES[case]
    model = Written(tmp_path, FORMATS[name], base=base, **more)
    for tp in (1, 2) if name == "awq" else (2,):
        params = loaded(model, tp)
        layer = params["layers"][1]
        assert said(layer["expert_gate_up"]) == form
        assert isinstance(layer["expert_down"], QTensor) == (form != "wide")
        want = assemble_all(model.family.specs(model.arch, tp), model.wide.__getitem__, jnp.float32)
        assert_equal(wide(params), want)
    if case == "deepseek":
        served = {n: said(layer[n]) for n in ("kv_a", "q_a", "q", "o", "shared_down")}
        assert set(served.values()) == {form}, served


GPT_OSS = CONFIG | {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "quantization_config": {"quant_method": "mxfp4"},
}


def gpt_oss(path: Path) -> Model:
    """With experts in mxfp4; ``wide``: what they stand for."""
    model, rng = Model(path, GPT_OSS, np.float32), np.random.default_rng(4)
    model.wide = dict(model.tensors)  # type: ignore[attr-defined]
    for name in [
        n for n in model.tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        E, D, N = model.tensors.pop(name).shape
        codes = rng.integers(0, 16, (E * N, D))
        exponents = rng.integers(115, 123, (E, N, D // 32)).astype(np.uint8)
        blocks = bytes_of(codes).reshape(E, N, D // 32, 16)
        model.tensors |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        scales = repeated(2.0 ** (exponents.reshape(E * N, -1).astype(np.float32) - 127), 32)
        stands = (floats4(codes) * scales).reshape(E, N, D).swapaxes(1, 2)
        model.wide[name] = stands  # type: ignore[attr-defined]
    return model.single()


def test_mxfp4_experts_stay_in_4_bits(tmp_path: Path) -> None:
    model = gpt_oss(tmp_path)
    plain: Any = model.wide  # type: ignore[attr-defined]
    for tp, form in ((1, "e2m1 g32"), (4, "int8 g16")):
        params = loaded(model, tp)
        assert said(params["layers"][0]["expert_gate_up"]) == "e2m1 g32"
        assert said(params["layers"][0]["expert_down"]) == form
        assert not isinstance(params["layers"][0]["qkv"], QTensor)
        want = assemble_all(model.family.specs(model.arch, tp), plain.__getitem__, jnp.float32)
        assert_equal(wide(params), want)
        assert_equal(loaded(model, tp, "none"), want)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    model.tensors[name][1, 2, 0] = 255
    with pytest.raises(WeightsError, match="finite"):
        loaded(model.single())
    del model.tensors[name]
    with pytest.raises(WeightsError, match="down_proj_scales"):
        loaded(model.single())


LOGITS: dict[str, float] = {"qwen3 awq": 1e-5, "qwen3 fp8": 0.13, "deepseek": 0.25, "gpt-oss": 1e-5}
"""Case -> the bound of the mean error as a part of the mean logit. With activations in e4m3 it is 0.1 and 0.2."""


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", LOGITS)
def test_logits_are_those_of_the_widened_experts(tmp_path: Path, case: str) -> None:
    if case == "gpt-oss":
        model: Any = gpt_oss(tmp_path)
    else:
        base, name, more, _ = CASES[case]
        model = Written(tmp_path, FORMATS[name], base=base, **more)
    want, got = (served(model, 2, asked) for asked in ("none", "auto"))
    off = np.abs(got - want).mean() / np.abs(want).mean()
    assert off < LOGITS[case]
