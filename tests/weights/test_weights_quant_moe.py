"""Experts of quantised checkpoints: kept as they are stored, for whatever the other layers are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import WeightsError
from jserve.model.hand import Row
from jserve.model.quant import QTensor
from jserve.model.shard import partitions
from jserve.model.view import Bucket
from jserve.weights.quant.scheme import quantised, scheme_of
from tests.model.assembly import assemble_all
from tests.model.driver import Driver
from tests.weights.quant_float_files import bytes_of, floats4, repeated
from tests.weights.test_weights_quant import (
    CONFIG,
    FORMATS,
    RULES,
    Written,
    assert_equal,
    loaded,
    said,
    wide,
)
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


@pytest.mark.slow
def test_logits_are_those_of_the_widened_experts(tmp_path: Path) -> None:
    tp = 2
    model, bucket = Written(tmp_path, FORMATS["awq"], base=QWEN, **ROUTERS), Bucket(D=2, P=24, F=1)
    logits, tokens = [], [int(t) for t in np.random.default_rng(0).integers(0, 64, 20)]
    for asked in ("none", "auto"):
        driver = Driver(model.family, model.arch, model.wide.__getitem__, tp=tp)
        driver.params = loaded(model, tp, asked)
        scheme = scheme_of(model.config, jnp.float32, asked)
        specs = quantised(model.family, scheme).specs(model.arch, tp)
        driver.param_specs = partitions(specs, RULES)
        logits.append(driver.step(bucket, prefill=[Row([1, 2, 3], 0, tokens)])[2:22])
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4 * np.abs(logits[0]).max())


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
