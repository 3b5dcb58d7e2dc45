"""The format of a sharding: what is read is what was written, and everything else is refused by its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

from jserve.errors import ConfigError
from jserve.sharding import LOGICAL, LOGITS, RESIDUAL, SUMS, Sharding

AXES = ("x", "y", "tensor")
SPEC = {
    "mesh": {"x": 2, "y": 4},
    "mode": "auto",
    "rules": {"kv_heads": "y", "ffn": ["x", "y"], "embed": None},
    "params": {"layers/.*/down": [None, ["x", "y"]]},
}


@st.composite
def specs(draw: Any) -> dict[str, Any]:
    mesh = {axis: draw(st.integers(1, 4)) for axis in AXES[: draw(st.integers(1, len(AXES)))]}
    one = st.sampled_from(sorted(mesh))
    axes = st.one_of(st.none(), one, st.lists(one, unique=True))
    rules = {name: draw(axes) for name in LOGICAL if draw(st.booleans())}
    return {
        "mesh": mesh,
        "rules": rules,
        "sums": draw(st.sampled_from(SUMS)),
        "logits": draw(st.sampled_from(LOGITS)),
        "residual": draw(st.sampled_from(RESIDUAL)),
    }


@given(specs())
def test_every_spec_is_read_as_it_is_or_refused_by_a_key_of_it(spec: dict[str, Any]):
    used = {axis for axes in spec["rules"].values() for axis in axes or ()}
    used |= {axes for axes in spec["rules"].values() if isinstance(axes, str)}
    spare = [axis for axis, size in spec["mesh"].items() if size > 1 and axis not in used]
    if spare:
        with pytest.raises(ConfigError) as caught:
            Sharding.of(spec)
        assert caught.value.field == f"sharding.mesh.{spare[0]}"
        return
    found = Sharding.of(spec)
    assert dict(found.mesh) == spec["mesh"]
    chosen = {"sums": found.sums, "logits": found.logits, "residual": found.residual}
    assert chosen == {key: spec[key] for key in chosen}
    lists = {k: [v] if isinstance(v, str) else list(v or ()) for k, v in spec["rules"].items()}
    assert {name: list(axes) for name, axes in found.rules or ()} == lists
    assert Sharding.of(found.as_mapping()) == Sharding.of(str(found)) == found


def test_all_ways_to_write_one_are_equal(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(SPEC, sort_keys=False))
    found = Sharding.of(SPEC)
    assert (
        found == Sharding.of(tmp_path / "a.yaml") == Sharding.of(str(found)) == Sharding.of(found)
    )
    assert found.n_devices == 8
    assert found.rules == (("kv_heads", ("y",)), ("ffn", ("x", "y")), ("embed", ()))
    assert found.params == (("layers/.*/down", ((), ("x", "y"))),)


def test_groups_of_devices_are_no_axis_of_one_engine():
    found = Sharding.of("dp=2,tp=4")
    assert (found.dp, found.n_devices, found.group_size) == (2, 8, 4)
    assert (str(found), str(found.group)) == ("dp=2,tp=4", "tp=4")
    assert Sharding.of(found.as_mapping()) == Sharding.of(str(found)) == found
    alone = Sharding.of({"mesh": {"dp": 3}})
    assert (alone.mesh, alone.n_devices) == ((("tp", 1),), 3)


def test_sizes_alone_are_a_mesh_with_its_own_rules():
    found = Sharding.of("ep=2, tp=4")
    assert (found.mesh, found.rules, str(found)) == ((("ep", 2), ("tp", 4)), None, "ep=2,tp=4")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("tp=x", ""),
        ("tp=2,tp=2", ""),
        ("tp", ""),
        ("nothing.yaml", ""),
        ("{", ""),
        ('{"mesh": [', ""),
        ("{} []", ""),
        ("dp=0", ".mesh.dp"),
        ("pp=2", ".mesh.pp"),
        ({"mesh": {"dp": 2, "tp": 2}, "rules": {"ffn": ["dp", "tp"]}}, ".rules.ffn"),
        ({"mesh": {"tp": 0}}, ".mesh.tp"),
        ({"mesh": {"tp": True}}, ".mesh.tp"),
        ({"mesh": {"t p": 2}}, ".mesh"),
        ({"mesh": "tp"}, ".mesh"),
        ({"meshes": {}}, ".meshes"),
        ({"mesh": {"tp": 2}, "mode": "manually"}, ".mode"),
        ({"mesh": {"tp": 2}, "sums": "bfloat16"}, ".sums"),
        ({"mesh": {"tp": 2}, "sums": ["weights"]}, ".sums"),
        ({"mesh": {"tp": 2}, "mode": "auto", "sums": "weights"}, ".sums"),
        ({"mesh": {"tp": 2}, "rules": {"heads": "tp"}}, ".rules.heads"),
        ({"mesh": {"tp": 2}, "rules": {"ffn": "x"}}, ".rules.ffn"),
        ({"mesh": {"tp": 2}, "rules": {"ffn": ["tp", "tp"]}}, ".rules.ffn"),
        ({"mesh": {"tp": 2}, "rules": {"ffn": 3}}, ".rules.ffn"),
        ({"mesh": {"tp": 2, "x": 2}, "rules": {"ffn": "tp"}}, ".mesh.x"),
        ({"mesh": {"tp": 2}, "rules": "tp"}, ".rules"),
        ({"mesh": {"tp": 2}, "params": {"a": ["tp"]}}, ".params"),
        ({"mesh": {"tp": 2}, "mode": "auto", "params": {"(": ["tp"]}}, ".params.("),
        ({"mesh": {"tp": 2}, "mode": "auto", "params": {"a": "tp"}}, ".params.a"),
        ({"mesh": {"tp": 2}, "mode": "auto", "params": {"a": ["tp", "tp"]}}, ".params.a"),
        ({"mesh": {"tp": 2}, "mode": "auto", "params": {"a": ["x"]}}, ".params.a"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_key(given: Any, field: str):
    with pytest.raises(ConfigError) as caught:
        Sharding.of(given)
    assert caught.value.field == f"sharding{field}"
    assert "sharding" in caught.value.message
