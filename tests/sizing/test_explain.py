"""``explain_sharding`` against arrays that lie so, and against steps as jax and XLA have them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jserve import Sharding, explain_sharding
from jserve.errors import ConfigError
from jserve.model.hand import step_model_of
from jserve.model.mesh import mesh_of
from jserve.model.shard import ShardRules, padded
from jserve.model.step import make_step
from jserve.model.view import buffer_size
from jserve.sizing.compiled import exchanged
from jserve.sizing.explain import BUCKETS, Collective, of_program
from jserve.sizing.models import find
from jserve.weights.dummy import draw_all
from jserve.weights.place import tp_size
from tests.whole.equal import TINY

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


LAYOUTS: dict[str, dict[str, Any]] = {
    "one axis": {"mesh": {"tp": 4}},
    "split logits": {"mesh": {"tp": 4}, "logits": "split"},
    "width": {
        "mesh": {"x": 2, "y": 2},
        "rules": {"embed": "x", "kv_heads": "y", "ffn": "y", "vocab": "y"},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n == "split logits" else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)
def test_a_compiled_step_has_the_collectives_that_are_explained(name: str, tmp_path: Path):
    """XLA adds none, leaves none out, and widens none."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    explained = explain_sharding(str(tmp_path), LAYOUTS[name])
    found, mesh = find(str(tmp_path)), mesh_of(explained.sharding)
    rules = ShardRules.of_sharding(explained.sharding, mesh.shape)
    model = step_model_of(found.family, found.arch, mesh=mesh, rules=rules, dtype=found.dtype)
    for bucket, program in zip(BUCKETS, explained.programs, strict=True):
        buf = jax.ShapeDtypeStruct((buffer_size(model.fields(bucket)),), jnp.int32)
        args = (model.abstract_params(), model.abstract_state(), buf)
        compiled = jax.jit(make_step(model, bucket), donate_argnums=1).lower(*args).compile()
        made = [c for c in of_program(compiled.as_text() or "") if not c.rare]
        assert summed(made) == summed(program.usual)


def summed(collectives: Iterable[Collective]) -> dict[str, tuple[int, int]]:
    """Number and bytes of each kind."""
    total: dict[str, tuple[int, int]] = {}
    for c in collectives:
        n, n_bytes = total.get(c.op, (0, 0))
        total[c.op] = n + c.count, n_bytes + c.n_bytes
    return total


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


PROGRAM = """HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %z = f32[] add(%x, %y)
}

%few (p: f32[8,64]) -> f32[8,64] {
  ROOT %r = f32[8,64]{1,0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
}

%many (p: f32[8,64]) -> f32[8,64] {
  %r = f32[8,64]{1,0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
  ROOT %s = f32[8,128]{1,0} all-gather(%r), dimensions={1}
}

ENTRY %main (p: f32[8,64]) -> f32[8,64] {
  %a = f32[8,64]{1,0} all-reduce-start(%p), to_apply=%add
  %b = (f32[8,64]{1,0}, bf16[4]{0}) all-reduce-start(%p, %q), to_apply=%add
  %c = (f32[8,64]{1,0}, f32[8,256]{1,0}) all-gather-start(%p), dimensions={1}
  %d = (s32[5]{0}, s32[5]{0}, u32[], u32[]) collective-permute-start(%p)
  %e = f32[8,64]{1,0} all-reduce-done(%a)
  ROOT %f = f32[8,64]{1,0} conditional(%i, %p, %p), branch_computations={%few, %many}
}
"""


def test_collectives_of_a_program_are_read_from_its_text() -> None:
    """Operands of what begins one are no results, several arrays in one are one, and a branch is taken rarely."""
    found = list(of_program(PROGRAM))
    usual = Counter({(c.op, c.dtype, c.shape): c.count for c in found if not c.rare})
    assert usual == {
        ("all-reduce", "float32", (8, 64)): 2,
        ("all-reduce", "float32", (8 * 64 + 2,)): 1,
        ("all-gather", "float32", (8, 256)): 1,
        ("collective-permute", "int32", (5,)): 1,
    }
    rare = Counter({c.op: c.count for c in found if c.rare})
    assert rare == {"all-reduce": 1, "all-gather": 1}
    deeper = PROGRAM.replace(
        "ROOT %s = f32[8,128]{1,0} all-gather(%r), dimensions={1}",
        "ROOT %s = f32[8,128]{1,0} conditional(%i, %r, %r), branch_computations={%none, %few}",
    ).replace("\n%many", "\n%none (p: f32[8,64]) -> f32[8,64] {\n}\n\n%many")
    counted = {c.op: c.count for c in of_program(deeper) if not c.rare and c.shape == (8, 64)}
    assert counted == {"all-reduce": 2}, "of the usual branch too, which another one calls as well"
    deeper = deeper.replace("{%none, %few}", "{%none, %other}")
    other = "%other (p: f32[8,64]) -> f32[8,64] {\n  ROOT %u = f32[8,64]{1,0} all-reduce(%p)\n}"
    deeper = deeper.replace("\n%many", f"\n{other}\n\n%many")
    rare = Counter({c.op: c.count for c in of_program(deeper) if c.rare})
    assert rare == {"all-reduce": 2}, "%many, and what it alone calls"
    figures = exchanged(PROGRAM, {"x": 2, "y": 4})
    n_bytes = 2 * 2048 + (2048 + 8) + 8192 + 20
    assert figures["collective_mib"] == pytest.approx(n_bytes / 2**20)
    sent = 7 / 8 * (2 * (2 * 2048 + 2048 + 8) + 8192 + 20)
    assert figures["collective_ms"] == pytest.approx((5 * 8e-6 + sent / 450e9) * 1e3)
