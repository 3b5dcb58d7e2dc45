"""Published EAGLE-3 and Medusa checkpoints: every layout loads, every fault is named in one line."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jserve.errors import ConfigError, WeightsError
from jserve.model.families import family_for
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.speculation.drafters.load import find_drafter
from jserve.weights.source import resolve
from tests.weights.weights_kit import BF16, LLAMA, pack

TARGET_CONFIG = {**LLAMA, "num_hidden_layers": 6}
TARGET = family_for(TARGET_CONFIG).arch(TARGET_CONFIG)
D, V, F, N, K, H, VD = 32, 64, 48, 8, 2, 8, 40

EAGLE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": D,
    "intermediate_size": F,
    "max_position_embeddings": 128,
    "model_type": "llama",
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": V,
    "draft_vocab_size": VD,
}
MEDUSA: dict[str, Any] = {
    "medusa_num_heads": 3,
    "medusa_num_layers": 1,
    "base_model_name_or_path": "target",
}
VLLM_MEDUSA: dict[str, Any] = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": D,
    "vocab_size": V,
    "num_heads": 3,
    "num_hidden_layers": 2,
    "truncated_vocab_size": V,
    "medusa_fc_bias": False,
}
# Rows of the draft vocabulary, ascending: every token but those that 3 divides, then some.
TOKENS = np.sort(np.array([t for t in range(V) if t % 3][:VD]))


def rand(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    return rng.standard_normal(shape).astype(np.float32).astype(BF16)


def eagle_tensors(layer: str = "midlayer") -> dict[str, np.ndarray]:
    """As SafeAILab/EAGLE saves the head, with another name of its layer if asked for."""
    attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    shapes = {
        "fc.weight": (D, 3 * D),
        f"{layer}.input_layernorm.weight": (D,),
        f"{layer}.hidden_norm.weight": (D,),
        f"{layer}.post_attention_layernorm.weight": (D,),
        f"{attn}.q_proj.weight": (N * H, 2 * D),
        f"{attn}.k_proj.weight": (K * H, 2 * D),
        f"{attn}.v_proj.weight": (K * H, 2 * D),
        f"{attn}.o_proj.weight": (D, N * H),
        f"{mlp}.gate_proj.weight": (F, D),
        f"{mlp}.up_proj.weight": (F, D),
        f"{mlp}.down_proj.weight": (D, F),
        "norm.weight": (D,),
        "lm_head.weight": (VD, D),
    }
    tensors = {name: rand(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    known = np.isin(np.arange(V), TOKENS)
    return tensors | {"d2t": (TOKENS - np.arange(VD)).astype(np.int64), "t2d": known}


def medusa_tensors(
    prefix: str = "", heads: int = 3, lm_heads: bool = True
) -> dict[str, np.ndarray]:
    tensors = {}
    for i in range(heads):
        tensors[f"{prefix}{i}.0.linear.weight"] = rand(D, D, seed=i)
        tensors[f"{prefix}{i}.0.linear.bias"] = rand(D, seed=i)
        if lm_heads:
            tensors[f"{prefix}{i}.1.weight"] = rand(V, D, seed=i)
    return tensors


def vllm_tensors() -> dict[str, np.ndarray]:
    tensors = {f"lm_heads.{i}.weight": rand(V, D, seed=i) for i in range(3)}
    for i in range(3):
        for b in range(2):
            tensors[f"blocks.{i}.layers.{b}.weight"] = rand(D, D, seed=10 * i + b)
    return tensors


def write(path: Path, config: Any, tensors: Any, name: str = "model.safetensors") -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / name).write_bytes(pack(tensors))
    return path


def read(path: Path, method: str, tp: int = 1, **how: Any) -> Any:
    source = resolve(str(path), load_format=how.pop("load_format", "auto"))
    found = find_drafter(method, source, TARGET).over(tp, how.pop("wished", 0))
    return found.drafter, found.loaded(make_mesh(tp), ShardRules(), BF16, **how)


def equal(a: Any, b: Any) -> bool:
    return np.array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("layer", ["midlayer", "layers.0", "model.layers.0"])
def test_eagle3_tensors_come_to_their_places(tmp_path: Path, layer: str, tp: int) -> None:
    t = eagle_tensors(layer)
    drafter, p = read(write(tmp_path, EAGLE, t), "eagle3", tp)
    assert (drafter.name, drafter.arch.V, drafter.arch.F) == ("eagle3", VD, F)
    assert set(p) == {"fc", "layer", "norm", "unembed", "d2t"}
    assert equal(p["fc"], t["fc.weight"])
    assert equal(p["norm"], t["norm.weight"])
    assert equal(p["unembed"], t["lm_head.weight"])
    assert equal(np.arange(VD) + np.asarray(p["d2t"]), TOKENS)
    named = p["layer"]
    assert equal(named["embed_norm"], t[f"{layer}.input_layernorm.weight"])
    assert equal(named["hidden_norm"], t[f"{layer}.hidden_norm.weight"])
    assert equal(named["mlp_norm"], t[f"{layer}.post_attention_layernorm.weight"])
    assert equal(named["o"], t[f"{layer}.self_attn.o_proj.weight"])
    assert equal(named["gate_up"][0], t[f"{layer}.mlp.gate_proj.weight"])
    assert equal(named["gate_up"][1], t[f"{layer}.mlp.up_proj.weight"])
    assert equal(named["down"], t[f"{layer}.mlp.down_proj.weight"])
    qkv = np.asarray(named["qkv"])
    groups = max(K, tp)
    q = qkv[:, :-2].reshape(N * H, 2 * D)
    assert equal(q, t[f"{layer}.self_attn.q_proj.weight"])
    for at, name in ((-2, "k_proj"), (-1, "v_proj")):
        rows = t[f"{layer}.self_attn.{name}.weight"].reshape(K, H, 2 * D)
        assert equal(qkv[:, at], np.repeat(rows, groups // K, axis=0))


def taps(tmp_path: Path, config: Any) -> tuple[int, ...]:
    return read(write(tmp_path, config, eagle_tensors()), "eagle3")[0].taps


IDS = "eagle_aux_hidden_state_layer_ids"


def test_layer_ids_mean_what_their_trainers_mean(tmp_path: Path) -> None:
    """Drafter.taps counts layers by what enters them; six layers."""
    assert taps(tmp_path, EAGLE) == (2, 3, 3)
    assert taps(tmp_path, {**EAGLE, "eagle_config": {IDS: [0, 2, 5]}}) == (1, 3, 6)
    assert taps(tmp_path, {**EAGLE, IDS: [0, 2, 6]}) == (0, 2, 6)


def test_a_head_without_draft_vocabulary_or_lm_head_uses_the_targets(tmp_path: Path) -> None:
    config = {k: v for k, v in EAGLE.items() if k != "draft_vocab_size"}
    t = {k: v for k, v in eagle_tensors().items() if k not in ("d2t", "t2d", "lm_head.weight")}
    drafter, p = read(write(tmp_path, config, t), "eagle3")
    assert drafter.arch.V == V
    assert set(p) == {"fc", "layer", "norm"}


def test_a_tied_head_with_an_embedding_unembeds_with_it(tmp_path: Path) -> None:
    t = {k: v for k, v in eagle_tensors().items() if k not in ("d2t", "t2d", "lm_head.weight")}
    t["embed_tokens.weight"] = rand(V, D)
    config = {**EAGLE, "draft_vocab_size": V, "tie_word_embeddings": True}
    _, p = read(write(tmp_path, config, t), "eagle3")
    assert equal(p["embed"], t["embed_tokens.weight"])
    assert equal(p["unembed"], t["embed_tokens.weight"])


def speculators(**changed: Any) -> dict[str, Any]:
    """config.json as the speculators library nests it."""
    own = ("draft_vocab_size", "architectures")
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": VD,
        "norm_before_residual": True,
        IDS: [1, 3, 5],
        "transformer_layer_config": {k: v for k, v in EAGLE.items() if k not in own},
        **changed,
    }


def test_speculators_nest_the_config_and_bring_an_embedding(tmp_path: Path) -> None:
    t = eagle_tensors("layers.0") | {"embed_tokens.weight": rand(V, D)}
    drafter, p = read(write(tmp_path, speculators(), t), "eagle3")
    assert drafter.observe.__self__.norm_before_residual
    assert drafter.taps == (1, 3, 5)
    assert equal(p["embed"], t["embed_tokens.weight"])


@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads."])
def test_medusa_tensors_come_to_their_places(tmp_path: Path, prefix: str) -> None:
    t = medusa_tensors(prefix)
    path = write(tmp_path, MEDUSA, t, "medusa_lm_head.safetensors")
    drafter, p = read(path, "medusa", tp=2)
    assert (drafter.name, drafter.n_max, len(p["heads"])) == ("medusa", 3, 3)
    for i, head in enumerate(p["heads"]):
        assert equal(head["blocks"][0]["linear"], t[f"{prefix}{i}.0.linear.weight"])
        assert equal(head["blocks"][0]["bias"], t[f"{prefix}{i}.0.linear.bias"])
        assert equal(head["unembed"], t[f"{prefix}{i}.1.weight"])


def test_medusa_heads_of_version_2_share_the_lm_head(tmp_path: Path) -> None:
    _, p = read(write(tmp_path, MEDUSA, medusa_tensors(lm_heads=False)), "medusa")
    assert all(set(head) == {"blocks"} for head in p["heads"])


def test_all_medusa_heads_of_the_file_are_taken(tmp_path: Path) -> None:
    """Published config.json state two heads where the file holds five."""
    config = {**MEDUSA, "medusa_num_heads": 2}
    drafter, p = read(write(tmp_path, config, medusa_tensors(heads=5)), "medusa")
    assert drafter.n_max == len(p["heads"]) == 5


def test_medusa_as_vllm_lays_it_out(tmp_path: Path) -> None:
    t = vllm_tensors()
    _, p = read(write(tmp_path, VLLM_MEDUSA, t), "medusa")
    for i, head in enumerate(p["heads"]):
        assert equal(head["unembed"], t[f"lm_heads.{i}.weight"])
        for b, block in enumerate(head["blocks"]):
            assert set(block) == {"linear"}
            assert equal(block["linear"], t[f"blocks.{i}.layers.{b}.weight"])


def test_the_original_lm_head_of_vllm_is_the_targets(tmp_path: Path) -> None:
    t = {
        k: v
        for k, v in vllm_tensors().items()
        if k not in ("lm_heads.1.weight", "lm_heads.2.weight")
    }
    _, p = read(write(tmp_path, {**VLLM_MEDUSA, "original_lm_head": True}, t), "medusa")
    assert all(set(head) == {"blocks"} for head in p["heads"])


@pytest.mark.parametrize(("method", "config"), [("eagle3", EAGLE), ("medusa", MEDUSA)])
def test_dummy_weights_need_no_file(tmp_path: Path, method: str, config: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, p = read(tmp_path, method, load_format="dummy")
    assert "fc" in p or len(p["heads"]) == 3


def put(name: str, x: np.ndarray) -> Any:
    return lambda t: t.update({name: x})


def drop(name: str) -> Any:
    return lambda t: t.pop(name)


Q = "midlayer.self_attn.q_proj.weight"
TENSOR_FAULTS = {
    "missing": ("eagle3", drop(Q), Q, "missing"),
    "shape": ("eagle3", put(Q, rand(N * H, D)), Q, "shape"),
    "two taps": ("eagle3", put("fc.weight", rand(D, 4 * D)), "fc.weight", "shape"),
    "unknown": (
        "eagle3",
        put("midlayer.self_attn.q_norm.weight", rand(H)),
        "midlayer.self_attn.q_norm.weight",
        "this format has no such tensor",
    ),
    "bias": (
        "eagle3",
        put("midlayer.self_attn.q_proj.bias", rand(N * H)),
        "midlayer.self_attn.q_proj.bias",
        "this format has no such tensor",
    ),
    "no lm_head": ("eagle3", drop("lm_head.weight"), None, "lm_head"),
    "no d2t": ("eagle3", drop("d2t"), "d2t", "missing"),
    "d2t shape": ("eagle3", put("d2t", np.zeros(VD + 1, np.int64)), "d2t", "shape"),
    "d2t floats": ("eagle3", put("d2t", np.zeros(VD, np.float32)), "d2t", "must be int32 or int64"),
    "d2t outside": (
        "eagle3",
        put("d2t", np.full(VD, V, np.int64)),
        "d2t",
        "draft token 0 is token 64 of 64",
    ),
    "d2t below": ("eagle3", put("d2t", np.full(VD, -1, np.int64)), "d2t", "token -1 of 64"),
    "d2t twice": ("eagle3", put("d2t", -(np.arange(VD) % 2)), "d2t", "same token"),
    "t2d": ("eagle3", put("t2d", np.ones(V, bool)), "t2d", "does not agree"),
    "t2d shape": ("eagle3", put("t2d", np.ones(V - 1, bool)), "t2d", "shape"),
    "NaN": ("eagle3", put("norm.weight", np.full(D, np.nan, BF16)), "norm.weight", "NaN"),
    "medusa missing": ("medusa", drop("1.0.linear.bias"), "1.0.linear.bias", "missing"),
    "medusa lm_head": ("medusa", drop("2.1.weight"), "2.1.weight", "missing"),
    "medusa shape": ("medusa", put("0.1.weight", rand(V + 1, D)), "0.1.weight", "shape"),
    "medusa unknown": ("medusa", put("token_map", rand(V)), "token_map", "no such tensor"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_wrong_tensors_are_named(tmp_path: Path, fault: str) -> None:
    method, change, name, why = TENSOR_FAULTS[fault]
    config, t = (EAGLE, eagle_tensors()) if method == "eagle3" else (MEDUSA, medusa_tensors())
    change(t)
    with pytest.raises((WeightsError, ConfigError)) as caught:
        read(write(tmp_path, config, t), method)
    message = caught.value.message
    assert why in message
    assert "\n" not in message
    if name is not None:
        assert f"model.safetensors: tensor {name}:" in message
        assert caught.value.field == f"{tmp_path / 'model.safetensors'}:{name}"


CONFIG_FAULTS = {
    "layers": ("eagle3", {"num_hidden_layers": 2}, "num_hidden_layers"),
    "vocabulary": ("eagle3", {"vocab_size": 128}, "vocab_size"),
    "no draft vocabulary": ("eagle3", {"draft_vocab_size": 0}, "draft_vocab_size"),
    "other target": ("eagle3", {"target_hidden_size": 64}, "target_hidden_size"),
    "biases": ("eagle3", {"attention_bias": True}, "attention_bias"),
    "norm before fc": ("eagle3", {"norm_before_fc": True}, "norm_before_fc"),
    "window": ("eagle3", {"sliding_window": 16}, "sliding_window"),
    "activation": ("eagle3", {"hidden_act": "gelu"}, "hidden_act"),
    "one feature": (
        "eagle3",
        {"eagle_config": {"use_aux_hidden_state": False}},
        "use_aux_hidden_state",
    ),
    "four layers": ("eagle3", {IDS: [1, 2, 3, 4]}, IDS),
    "layer too high": ("eagle3", {"eagle_config": {IDS: [1, 2, 6]}}, IDS),
    "layer no number": ("eagle3", {IDS: [1, 2, True]}, IDS),
    "tied": ("eagle3", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    "quantised": ("eagle3", {"quantization_config": {"bits": 4}}, "quantization_config"),
    "speculators of another kind": (
        "eagle3",
        speculators(speculators_model_type="mlp"),
        "speculators_model_type",
    ),
    "speculators of some version": (
        "eagle3",
        speculators(norm_before_residual=None),
        "norm_before_residual",
    ),
    "speculators without layer": (
        "eagle3",
        speculators(transformer_layer_config=None),
        "transformer_layer_config",
    ),
    "medusa width": ("medusa", {"hidden_size": 64}, "hidden_size"),
    "medusa vocabulary": ("medusa", {"vocab_size": 65}, "vocab_size"),
    "medusa truncated": ("medusa", {"truncated_vocab_size": 32}, "truncated_vocab_size"),
    "medusa count": ("medusa", {"medusa_num_heads": None}, "num_heads"),
    "medusa scale": ("medusa", {"logit_scale": 0.5}, "logit_scale"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_what_config_json_asks_in_vain_is_named(tmp_path: Path, fault: str) -> None:
    method, changed, key = CONFIG_FAULTS[fault]
    config, t = (EAGLE, eagle_tensors()) if method == "eagle3" else (MEDUSA, medusa_tensors())
    with pytest.raises(ConfigError, match=key) as caught:
        read(write(tmp_path, {**config, **changed}, t), method)
    assert caught.value.field == key
    assert "\n" not in caught.value.message


def test_older_eagle_heads_are_refused_by_name(tmp_path: Path) -> None:
    t = {k.replace("midlayer", "layers.0"): v for k, v in eagle_tensors().items()}
    t["fc.weight"] = rand(D, 2 * D)
    with pytest.raises(ConfigError, match="EAGLE-1 or EAGLE-2"):
        read(write(tmp_path, EAGLE, t), "eagle3")


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "pytorch_model.bin"])
def test_pickles_are_never_loaded(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MEDUSA))
    (tmp_path / name).write_bytes(pickle.dumps({"x": 1}))
    with pytest.raises(WeightsError, match=f"only pickled weights \\({name}\\)") as caught:
        read(tmp_path, "medusa")
    assert caught.value.field == str(tmp_path / name)
    assert "safetensors" in caught.value.message
