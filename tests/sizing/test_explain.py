"""``explain_sharding`` against arrays that lie so, and against steps as jax and XLA have them."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest

from jserve import Sharding, explain_sharding
from jserve.errors import ConfigError
from jserve.model.mesh import mesh_of
from jserve.model.shard import ShardRules, padded
from jserve.sizing.models import find
from jserve.weights.dummy import draw_all
from jserve.weights.place import tp_size

MINI = "checkpoints/jserve-mini"
MANUAL = {
    "mesh": {"x": 2, "y": 2},
    "rules": {"kv_heads": "y", "ffn": ["x", "y"], "vocab": ["x", "y"]},
}
AUTO = {
    "mesh": {"x": 2, "y": 2},
    "mode": "auto",
    "rules": {"kv_heads": "y", "embed": "x"},
    "params": {"layers/0/down": [["y", "x"], None]},
}


@pytest.mark.parametrize("given", [MANUAL, pytest.param(AUTO, marks=pytest.mark.slow)])
def test_weights_take_as_many_bytes_as_it_says(given: dict[str, Any]):
    explained, model, sharding = explain_sharding(MINI, given), find(MINI), Sharding.of(given)
    mesh = mesh_of(sharding)
    rules = ShardRules.of_sharding(sharding, mesh.shape)
    specs = padded(model.family.specs(model.arch, tp_size(mesh, rules)), rules, mesh.shape)
    params = jax.tree_util.tree_leaves_with_path(draw_all(specs, 0, mesh, rules, model.dtype))
    assert len(params) == len(explained.weights)
    for (path, array), weight in zip(params, explained.weights, strict=True):
        assert weight.path == jax.tree_util.keystr(path, simple=True, separator="/")
        assert weight.partition == tuple(array.sharding.spec)
        assert {s.data.nbytes for s in array.addressable_shards} == {weight.device_bytes}
    assert explained.device_bytes == sum(w.device_bytes for w in explained.weights)


def test_a_manual_step_has_the_collectives_of_what_is_split():
    decode, prefill = explain_sharding(MINI, MANUAL).programs
    arch = find(MINI).arch
    for program, T, E in ((decode, 8, 8), (prefill, 258, 3)):
        assert {(c.op, c.axes, c.shape, c.count) for c in program.collectives or ()} == {
            ("all-reduce", ("x", "y"), (T, arch.D), arch.L + 1),  # each MLP, and the embedding
            ("all-reduce", ("y",), (T, arch.D), arch.L),
            ("all-gather", ("x", "y"), (E, arch.V), 1),
        }
    assert sum(c.n_bytes for c in decode.collectives or ()) == 4 * 8 * (
        (2 * arch.L + 1) * arch.D + arch.V
    )


def test_more_devices_than_there_are_can_be_explained():
    explained = explain_sharding("llama-3.1-8b", "tp=8")
    assert explained.device_bytes < 2.1e9
    assert explained.programs[0].collectives
    auto = explain_sharding(MINI, {"mesh": {"x": 64}, "mode": "auto", "rules": {"vocab": "x"}})
    assert [p.collectives for p in auto.programs] == [None, None]


@pytest.mark.slow
def test_the_collectives_of_mode_auto_are_those_that_xla_made():
    decode, _ = explain_sharding(MINI, AUTO).programs
    assert {c.op for c in decode.collectives or ()} >= {"all-reduce", "all-gather"}
    assert all(c.axes == () and c.n_bytes > 0 for c in decode.collectives or ())
    arch = find(MINI).arch
    largest = max(math.prod(c.shape) for c in decode.collectives or ())
    assert largest < arch.D * arch.layers[0].ffn.F, "matrices go from device to device"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "sharding.mesh"),
        ({"mesh": {"x": 5}, "rules": {"kv_heads": "x"}}, "sharding.rules.kv_heads"),
        ({"mesh": {"x": 5}, "rules": {"ffn": "x"}}, "sharding.rules.ffn"),
        ({"mesh": {"x": 2}, "rules": {"embed": "x", "ffn": "x"}}, "sharding.rules.embed"),
    ],
)
def test_what_a_model_cannot_honour_is_refused(given: dict[str, Any], field: str):
    with pytest.raises(ConfigError) as caught:
        explain_sharding(MINI, given)
    assert caught.value.field == field
