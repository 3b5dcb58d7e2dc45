"""Experts one by one and all together, from every source; what is missing, too many or of another shape."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError, WeightsError
from jserve.model.families import family_for
from jserve.model.mesh import make_mesh
from jserve.model.param_spec import is_spec
from jserve.model.shard import ShardRules, padded
from jserve.weights import layout
from jserve.weights.convert import convert
from jserve.weights.dummy import draw_all
from jserve.weights.loader import adopted, load
from jserve.weights.source import resolve
from tests.model.assembly import assemble_all
from tests.weights.weights_kit import BF16, LLAMA, Model, same

EXPERTS = {
    "num_experts_per_tok": 2,
    "num_experts": 6,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": LLAMA
    | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": LLAMA
    | EXPERTS
    | {"architectures": ["Qwen2MoeForCausalLM"], "mlp_only_layers": [0]},
    "granite_moe": LLAMA
    | {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "olmoe": LLAMA
    | {"architectures": ["OlmoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2},
    "deepseek_v3": LLAMA
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "topk_group": 1,
        "v_head_dim": 8,
    },
}
RULES = ShardRules()
LAST = "model.layers.1.mlp.experts.5.up_proj.weight"


def loaded(model: Model, tp: int = 1, dtype: Any = BF16) -> Any:
    source = resolve(str(model.path))
    return load(model.family, model.arch, source, make_mesh(tp), RULES, dtype)


def assert_equal(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert same(x, y), jax.tree_util.keystr(path)


def respelled(model: Model) -> Model:
    """The same model with its last spelling of each parameter's tensors."""
    specs = jax.tree.leaves(model.family.specs(model.arch, 1), is_leaf=is_spec)
    tensors = dict(model.tensors)
    for spec in specs:
        if not spec.spellings:
            continue
        value = layout.join(spec, model.tensors)
        for part in spec.parts:
            tensors.pop(part.name, None)
        [part] = spec.spellings[-1]
        tensors[part.name] = value.reshape(part.shape)
    assert tensors.keys() != model.tensors.keys()
    model.tensors = tensors
    return model


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tp", [1, 4])
def test_both_spellings_give_the_parameters_of_a_plain_assembly(
    tmp_path: Path, name: str, tp: int
) -> None:
    model = Model(tmp_path / "m", CONFIGS[name])
    specs = model.family.specs(model.arch, tp)
    want = assemble_all(specs, model.tensors.__getitem__, BF16)
    assert want["layers"][1]["router"].dtype == jnp.float32
    assert_equal(loaded(model.single(), tp), want)
    assert_equal(loaded(respelled(model).single(), tp), want)


def test_weights_that_predict_tokens_ahead_are_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The layer behind DeepSeek-V3's last one, experts of its own included: left out, and nothing else changes."""
    model = Model(tmp_path / "m", CONFIGS["deepseek_v3"] | {"num_nextn_predict_layers": 1})
    want = loaded(model.single())
    last = {n: x for n, x in model.tensors.items() if n.startswith("model.layers.1.")}
    ahead = {n.replace("layers.1", "layers.2"): x for n, x in last.items()}
    ahead["model.layers.2.eh_proj.weight"] = np.ones((32, 64), BF16)
    model.tensors |= ahead
    with caplog.at_level(logging.INFO, "jserve"):
        assert_equal(loaded(model.single()), want)
    [said] = [r.getMessage() for r in caplog.records if "layers.2" in r.getMessage()]
    assert f"{len(ahead)} unused tensors: model.layers.2." in said


DEEPSEEK: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("Mixtral", {"num_local_experts": 6}),
        (
            "Qwen3Moe",
            {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        ),
        ("GraniteMoeShared", {"num_local_experts": 6, "shared_intermediate_size": 16}),
        ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": None}),
        ("DeepseekV2", DEEPSEEK),
        ("DeepseekV3", DEEPSEEK | {"n_group": 3, "topk_group": 2}),
    ],
)
def test_transformers_writes_what_is_read_in_both_spellings(
    tmp_path: Path, architecture: str, sizes: dict[str, Any]
) -> None:
    from tests.model import hf

    model, config = hf.tiny(f"{architecture}ForCausalLM", **sizes)
    trees = []
    for original in (True, False):
        path = tmp_path / str(original)
        model.save_pretrained(path, save_original_format=original)
        source = resolve(str(path))
        assert source.config["architectures"] == config["architectures"]
        family = family_for(source.config)
        arch = family.arch(source.config)
        trees.append(load(family, arch, source, make_mesh(1), RULES, jnp.float32))
    assert_equal(*trees)
    down = dict(model.state_dict())
    [name] = [
        n for n in down if n.startswith("model.layers.1.") and n.endswith("experts.down_proj")
    ]
    assert same(trees[0]["layers"][1]["expert_down"], down[name].numpy())


def test_orbax_gives_the_same_experts(tmp_path: Path) -> None:
    model = Model(tmp_path / "m", CONFIGS["qwen2_moe"]).single()
    source = convert(str(model.path), tmp_path / "orbax")
    mesh = make_mesh(2)
    assert_equal(load(model.family, model.arch, source, mesh, RULES, BF16), loaded(model, 2))


def on_groups(model: Model, source: Any, spare: int, ep: int = 2, tp: int = 2) -> Any:
    """The parameters with experts over ``ep`` groups of devices."""
    mesh = make_mesh(tp, ep=ep)
    rules = ShardRules.of_mesh(mesh.shape, spare)
    return load(model.family, model.arch, source, mesh, rules, BF16)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("spare", [0, 2])
def test_experts_over_devices_come_from_every_source(tmp_path: Path, name: str, spare: int) -> None:
    """One by one, all together, from Orbax and from a live tree; spare slots repeat the first experts."""
    model = Model(tmp_path / "m", CONFIGS[name])
    sizes = {"ep": 2, "tp": 2}
    specs = padded(model.family.specs(model.arch, 4), ShardRules.of_mesh(sizes, spare), sizes)
    want = assemble_all(specs, model.tensors.__getitem__, BF16)
    assert want["layers"][1]["expert_down"].shape[0] == 6 + spare
    got = on_groups(model, resolve(str(model.single().path)), spare)
    assert_equal(got, want)
    assert got["layers"][1]["expert_down"].sharding.shard_shape((8, 64, 24))[0] == 4
    assert_equal(on_groups(model, convert(str(model.path), tmp_path / "orbax"), spare), want)
    mesh = make_mesh(2, ep=2)
    given = (loaded(model), mesh, ShardRules.of_mesh(mesh.shape, spare), BF16)
    assert_equal(adopted(model.family, model.arch, *given), want)
    assert_equal(on_groups(model, resolve(str(respelled(model).single().path)), spare), want)


def test_a_device_reads_the_tensors_of_its_own_experts(tmp_path: Path) -> None:
    model = Model(tmp_path / "m", CONFIGS["qwen2_moe"])
    sizes = {"ep": 2, "tp": 1}
    specs = padded(model.family.specs(model.arch, 2), ShardRules.of_mesh(sizes, 2), sizes)
    down, found = specs["layers"][1]["expert_down"], []
    for first in (0, 4):
        index = (slice(first, first + 4), slice(None), slice(None))
        names = [piece.part.name for piece in layout.pieces(down, index)]
        found.append([int(name.split(".experts.")[1].split(".")[0]) for name in names])
    assert found == [[0, 1, 2, 3], [4, 5, 0, 1]]


def test_spare_slots_of_dummy_experts_are_copies(tmp_path: Path) -> None:
    model = Model(tmp_path / "m", CONFIGS["granite_moe"])
    source = resolve(str(model.path), "", "dummy")
    got, one = (
        on_groups(model, source, 2),
        load(model.family, model.arch, source, make_mesh(1), RULES, BF16),
    )
    for name, rows in (("expert_gate_up", 2), ("expert_down", 1)):
        have, want = (np.asarray(tree["layers"][1][name]) for tree in (got, one))
        np.testing.assert_array_equal(have, np.concatenate([want, want[: 2 * rows]]))


def test_dummy_experts_differ_and_do_not_depend_on_the_mesh(tmp_path: Path) -> None:
    model = Model(tmp_path / "m", CONFIGS["qwen2_moe"])

    def drawn(tp: int) -> Any:
        return draw_all(model.family.specs(model.arch, tp), 0, make_mesh(tp), RULES, BF16)

    assert_equal(drawn(2)["layers"][1], drawn(1)["layers"][1])
    w = np.asarray(drawn(1)["layers"][1]["expert_gate_up"])
    assert len({x.tobytes() for x in w}) == 12


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensors: tensors.pop(LAST), "missing"),
        (lambda tensors: tensors.update({LAST: tensors[LAST][:-1]}), "the config asks for"),
        (lambda tensors: tensors.update({LAST: tensors[LAST] * np.nan}), "NaN"),
    ],
)
def test_a_broken_expert_is_named(tmp_path: Path, change: Any, why: str) -> None:
    model = Model(tmp_path / "m", CONFIGS["qwen2_moe"])
    change(model.tensors)
    model.single()
    with pytest.raises(WeightsError, match=why) as caught:
        loaded(model)
    assert LAST in caught.value.message


def test_an_expert_too_many_is_named(tmp_path: Path) -> None:
    model = Model(tmp_path / "m", CONFIGS["qwen2_moe"])
    extra = LAST.replace(".5.", ".6.")
    model.tensors[extra] = model.tensors[LAST]
    with pytest.raises(WeightsError, match="no such expert") as caught:
        loaded(model.single())
    assert extra in caught.value.message


def test_experts_of_a_layer_that_is_not_served_are_no_error(tmp_path: Path) -> None:
    """As those of a draft layer behind the last one."""
    model = Model(tmp_path / "m", CONFIGS["qwen2_moe"])
    want = loaded(model.single())
    model.tensors["model.layers.2.mlp.experts.0.up_proj.weight"] = np.zeros((2, 2), BF16)
    assert_equal(loaded(model.single()), want)


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("mixtral", {"num_local_experts": None}, "num_experts"),
        ("mixtral", {"num_experts": 5}, "num_local_experts"),
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("mixtral", {"hidden_act": "relu"}, "hidden_act"),
        ("mixtral", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        ("mixtral", {"n_shared_experts": 1}, "n_shared_experts"),
        ("mixtral", {"routed_scaling_factor": 2.0}, "routed_scaling_factor"),
        ("mixtral", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("qwen2_moe", {"moe_intermediate_size": None}, "moe_intermediate_size"),
        ("qwen2_moe", {"mlp_only_layers": "all"}, "mlp_only_layers"),
        ("qwen2_moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_key(
    tmp_path: Path, name: str, changes: dict[str, Any], field: str
) -> None:
    model = Model(tmp_path / "m", CONFIGS[name])
    with pytest.raises(ConfigError, match=field) as caught:
        model.family.arch(model.config | changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "field"), [("mixtral", "intermediate_size"), ("qwen2_moe", "moe_intermediate_size")]
)
def test_a_width_that_devices_cannot_share_is_refused_by_its_key(
    tmp_path: Path, name: str, field: str
) -> None:
    model = Model(tmp_path / "m", CONFIGS[name])
    arch = model.family.arch(model.config | {field: 42})
    with pytest.raises(ConfigError, match="not divisible") as caught:
        padded(model.family.specs(arch, 4), ShardRules(), {"tp": 4})
    assert caught.value.field == field


def test_either_key_may_hold_the_number_of_experts(tmp_path: Path) -> None:
    model = Model(tmp_path / "m", CONFIGS["qwen2_moe"])
    named = {k: v for k, v in model.config.items() if k != "num_experts"}
    assert model.family.arch(named | {"num_local_experts": 6}) == model.arch
