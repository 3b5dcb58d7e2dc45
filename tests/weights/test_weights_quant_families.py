"""Quantised checkpoints of families that differ from Llama in what is fused, normed or routed: the logits are those of
transformers with the matrices that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model.quant import QTensor
from jserve.weights.offline.job import quantize
from jserve.weights.offline.wish import Wish
from tests.model import hf
from tests.model.assembly import assemble_all
from tests.model.test_parity import CASES
from tests.weights.test_weights_offline import TEXTS
from tests.weights.test_weights_quant import CONFIG, FORMATS, Written, assert_equal, loaded, wide
from tests.weights.test_weights_quant_logits import TOKENS, near, served
from tests.weights.weights_kit import Model

FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {"architectures": ["Phi3ForCausalLM"], "sliding_window": 9, "pad_token_id": None},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "attention_bias": True, "pad_token_id": None},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": 7,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "intermediate_size": 64,
        "pad_token_id": None,
    },
}
"""One tensor of queries, keys and values and one of gate and up; norms behind, too; experts."""
NAMES = ("awq", "gptq 4 bits", "pack-quantized", "nvfp4", "mxfp4", "fp8 blocks", "fp8")
ROUNDED = ("fp8 blocks", "fp8")
"""Those that round activations, so that logits are only near those of the matrices."""
OFF = 0.3
"""Bound of the mean error with rounded activations, as a part of the mean logit: it is 0.01 to 0.23."""


def checkpoint(path: Path, family: str, name: str) -> Written:
    base = CONFIG | FAMILIES[family] | {"model_type": family}
    more = {"modules_to_not_convert": ["mlp.gate"]} if name == "awq" and family == "olmoe" else {}
    return Written(path, FORMATS[name], base=base, **more)


def by_transformers(model: Written, path: Path) -> np.ndarray:
    """Read from a checkpoint of the plain matrices."""
    plain = Model(path, {k: v for k, v in model.config.items() if k != "quantization_config"})
    plain.tensors = model.wide
    plain.single()
    kind = hf.transformers.AutoModelForCausalLM
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    oracle = kind.from_pretrained(path, dtype=hf.torch.float32, **how).eval()
    with hf.torch.no_grad():
        return oracle(hf.torch.tensor([TOKENS])).logits[0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, name: str) -> None:
    model = checkpoint(tmp_path / "quantised", family, name)
    want = by_transformers(model, tmp_path / "plain")
    near(served(model, 1, "none"), want)
    for tp in (1, 2):
        got = served(model, tp)
        if name in ROUNDED:
            assert 1e-3 < np.abs(got - want).mean() / np.abs(want).mean() < OFF
        else:
            near(got, want)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_stay_in_their_form_and_stand_for_these(
    tmp_path: Path, family: str, name: str
) -> None:
    model = checkpoint(tmp_path, family, name)
    for tp in (1, 2):
        params = loaded(model, tp)
        layer = params["layers"][1]
        experts = [key for key in layer if key.startswith("expert_")]
        for key in experts or ["gate_up"]:
            assert isinstance(layer[key], QTensor), key
        assert isinstance(layer["qkv"], QTensor)
        want = assemble_all(model.family.specs(model.arch, tp), model.wide.__getitem__, jnp.float32)
        assert_equal(wide(params), want)


FUSED = {"qkv_proj": {"q_proj": 128, "k_proj": 32, "v_proj": 32}} | {
    "gate_up_proj": {"gate_proj": 192, "up_proj": 192}
}
"""Tensors of Phi-3 -> those of Llama in them, and their rows."""


def apart(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Phi-3's tensors under Llama's names."""
    found = {}
    for name, x in tensors.items():
        fused = next((key for key in FUSED if key in name), "")
        first = 0
        for part, rows in FUSED.get(fused, {"": 0}).items():
            whole = not fused or len(x) < sum(FUSED[fused].values())
            found[name.replace(fused, part)] = x if whole else x[first : first + rows]
            first += rows
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "float-quantized", "int-quantized"])
def test_fused_matrices_round_activations_as_their_parts_do(tmp_path: Path, name: str) -> None:
    """A Phi-3 without a window is a Llama, whose rounding ``test_weights_quant_logits`` compares with numpy's."""
    base = CONFIG | {"architectures": ["Phi3ForCausalLM"], "pad_token_id": None}
    phi = Written(tmp_path / "phi3", FORMATS[name], base=base)
    llama = Written(tmp_path / "llama", FORMATS[name], base=CONFIG)
    llama.tensors = apart(phi.tensors)
    llama.single()
    for tp in (1, 2):
        np.testing.assert_array_equal(served(phi, tp), served(llama, tp))


OTHERS = (
    *("llama-gqa4", "mistral-window", "qwen2-window-yarn", "qwen3-bias-window", "gemma", "gemma3"),
    *("olmo2", "granite", "cohere2", "smollm3", "exaone4"),
    *("mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v2", "deepseek-v3"),
)
"""Cases of ``test_parity``. Experts of the rest are one tensor in their files, which this format does not have."""
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
WHOLE_GROUPS: dict[str, dict[str, Any]] = {
    "qwen2-moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32},
    "qwen3-moe": {"moe_intermediate_size": 64},
    "deepseek-v2": LATENT,
    "deepseek-v3": LATENT | {"q_lora_rank": 32},
}
"""Sizes that groups of 32 divide."""


def stated(case: str) -> dict[str, Any]:
    """config.json of a case, with the vocabulary of ``TOKENS``."""
    architecture, switches = CASES[case]
    sizes = hf.SIZES | {k: v for k, v in switches.items() if k != "seed"} | {"vocab_size": 64}
    sizes |= WHOLE_GROUPS.get(case, {})
    config = hf.config_of(architecture, **sizes | {"pad_token_id": None}).to_dict()
    return config | {"architectures": [architecture], "dtype": "float32"}


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_logits_of_other_families_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    model = Written(tmp_path / "quantised", FORMATS["pack-quantized"], base=stated(case))
    want = by_transformers(model, tmp_path / "plain")
    for tp in (1, 2):
        near(served(model, tp), want)


DENSE = (
    *("llama-gqa4", "mistral-head-dim", "qwen2-gqa4", "qwen3-gqa8", "gemma", "gemma2", "gemma3"),
    *("phi3-window-partial", "olmo2", "granite", "cohere2", "smollm3", "exaone4", "glm4"),
)
"""Cases of ``test_parity``."""


class Quantised:
    """What ``jserve quantize`` makes of random weights, as ``served`` takes it."""

    def __init__(self, path: Path, case: str, wish: Wish) -> None:
        self.model = Model(path / "model", stated(case), np.float32)
        self.model.tensors = {
            n: x / (5 if x.ndim > 1 else 3) + (x.ndim == 1 and "norm" in n)
            for n, x in self.model.tensors.items()
        }
        self.model.wide = self.model.tensors  # type: ignore[attr-defined]
        self.model.single()
        self.path = path / "out"
        quantize(str(self.model.path), self.path, wish, TEXTS)
        self.config = json.loads((self.path / "config.json").read_text())
        self.family, self.arch, self.wide = self.model.family, self.model.arch, self.model.tensors


@pytest.mark.slow
@pytest.mark.parametrize("case", DENSE)
def test_what_quantize_writes_is_read(tmp_path: Path, case: str) -> None:
    """By GPTQ, which runs the family's layers over texts: its logits are half as far off as by nearest numbers."""
    off = {}
    for method in ("rtn", "gptq"):
        wish = Wish(scheme="int4", method=method, config='{"group_size": 32}')
        made = Quantised(tmp_path / method, case, wish)
        got = served(made)
        near(got, served(made, 1, "none"))
        want = served(made.model)
        off[method] = np.abs(got - want).mean() / np.abs(want).mean()
    assert 0.1 < off["gptq"] < 0.7 * off["rtn"]
