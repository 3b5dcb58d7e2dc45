"""A sharding by each of its doors: a program's own mesh, the environment, a server's file. Tokens are one device's."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from jax.sharding import AxisType, Mesh
from typer.testing import CliRunner

from jserve import LLM, SamplingParams, Sharding, build, explain_sharding
from jserve.cli import app
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.model.mesh import group_meshes
from jserve.sim.roofline import CHIPS
from jserve.sizing.compare import simulation
from jserve.sizing.layout import lay_out
from jserve.sizing.models import find
from tests.whole.conftest import SMALL_OPTIONS
from tests.whole.test_serve import Server, client

OPTIONS = {**SMALL_OPTIONS, "structured_outputs": False}
RULES = {"kv_heads": ["rows", "columns"], "ffn": "columns", "vocab": "rows"}
PROMPTS = [[5, 7, 9], [11] * 20]
PARAMS = [SamplingParams(max_tokens=6, temperature=float(i), seed=i) for i in range(2)]


def mesh(*names: str, kind: AxisType = AxisType.Auto) -> Mesh:
    """Of devices that are not the first ones."""
    types = (kind,) * len(names)
    return jax.make_mesh((2, 2), names, axis_types=types, devices=jax.devices()[4:8])


def drawn(model: Path, **options: Any) -> tuple[list[Any], set[int]]:
    """Tokens of each prompt, and the devices that hold weights."""
    llm = LLM(str(model), **OPTIONS, **options)
    try:
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        [engine] = build.each_of(llm._engine)
        leaves = jax.tree.leaves(engine.runner.params)  # type: ignore[attr-defined]
        return [o.outputs[0].token_ids for o in found], {d.id for x in leaves for d in x.devices()}
    finally:
        llm.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_mesh_of_the_programs_own_with_axes_of_any_names(tiny_dir: Path) -> None:
    want, one = drawn(tiny_dir)
    assert len(one) == 1
    for mode in ("manual", "auto"):
        for kind in (AxisType.Auto, AxisType.Explicit):
            given = mesh("rows", "columns", kind=kind)
            sharding = Sharding.of({"rules": RULES, "mode": mode})
            got, devices = drawn(tiny_dir, mesh=given, sharding=sharding)
            assert got == want, (mode, kind)
            assert devices == {4, 5, 6, 7}


def test_a_mesh_with_explicit_axes_is_taken_as_auto() -> None:
    """A plain ``jax.make_mesh`` makes such ones."""
    given = mesh("dp", "tp", kind=AxisType.Explicit)
    groups = [group_meshes(Sharding(), given)]
    groups += [group_meshes(Sharding(), mesh("x", "y", kind=AxisType.Explicit))]
    assert [[one.shape_tuple for one in each] for each in groups] == [
        [(("tp", 2),)] * 2,
        [(("x", 2), ("y", 2))],
    ]
    for one in (*groups[0], *groups[1]):
        assert {*one.axis_types} == {AxisType.Auto}
    assert [d.id for each in groups[0] for d in each.devices.flat] == [4, 5, 6, 7]


@pytest.mark.parametrize("sharding", [{"rules": {"ffn": "x"}}, {"sums": "weights"}, {}])
def test_a_sharding_without_a_mesh_is_refused_by_every_door(
    tiny_dir: Path, sharding: dict[str, Any]
) -> None:
    text = json.dumps(sharding)
    for door in (
        lambda: LLM(str(tiny_dir), **OPTIONS, sharding=sharding),
        lambda: lay_out(find(str(tiny_dir)), EngineConfig.of(sharding=text), CHIPS["h200"]),
        lambda: explain_sharding(str(tiny_dir), sharding),
        lambda: simulation(str(tiny_dir), Sharding.of(sharding), "h200", EngineConfig()),
    ):
        with pytest.raises(ConfigError, match="is missing") as caught:
            door()
        assert caught.value.field == "sharding.mesh"
    for command in (["plan"], ["compile"]):
        words = [*command, str(tiny_dir), "--sharding", text]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2, done.output
        assert "sharding.mesh: is missing" in done.stderr


@pytest.mark.parametrize(
    ("sharding", "field"),
    [
        ({"rules": {"kv_heads": "tensor"}}, "sharding.rules.kv_heads"),
        ({"rules": {"kv_heads": "rows"}}, "sharding.mesh.columns"),
        ({"mesh": {"rows": 4}, "rules": {"kv_heads": "rows"}}, "sharding.mesh"),
        ({"rules": {**RULES, "experts": "rows"}}, "sharding.rules.experts"),
    ],
)
def test_a_mesh_that_does_not_go_with_the_sharding_is_refused(
    tiny_dir: Path, sharding: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(tiny_dir), **OPTIONS, mesh=mesh("rows", "columns"), sharding=sharding)
    assert caught.value.field == field


def test_the_environment_names_one(tiny_dir: Path, tmp_path: Path) -> None:
    """A flag comes before it."""
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump({"mesh": {"x": 2}, "rules": {"ffn": "x"}}))
    words = ["plan", str(tiny_dir / "config.json"), "--json"]
    for more, name in (([], "x"), (["--sharding", "tp=2"], "tp")):
        done = CliRunner().invoke(app, [*words, *more], env={"JSERVE_SHARDING": str(file)})
        assert done.exit_code == 0, done.output
        weights = {w["path"]: w["partition"] for w in json.loads(done.stdout)["weights"]}
        assert weights["layers/0/down"] == [None, name]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_serves_a_file(tiny_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    spec = {"mesh": {"rows": 2, "columns": 2}, "rules": RULES, "logits": "split"}
    file.write_text(yaml.safe_dump(spec))
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    texts = []
    for more in ({}, {"sharding": file}):
        server = Server(tiny_dir, tmp_path / "log", **{**OPTIONS, "compile_cache": cache}, **more)
        try:
            asked = {"model": "tiny-llama", "prompt": "the quick", "max_tokens": 12}
            made = client(server).completions.create(**asked, temperature=1.0, seed=3)
            texts.append(made.choices[0].text)
            assert ("rows=2,columns=2" in server.banner) == bool(more), server.banner
        finally:
            assert server.stop() == 0
    assert texts[0] == texts[1] != ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_has_groups_of_devices(tiny_dir: Path, tmp_path: Path) -> None:
    """Two engines behind one address give what one gives."""
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    told = []
    for sharding in ("tp=1", "dp=2"):
        options = {**OPTIONS, "compile_cache": cache, "sharding": sharding}
        server = Server(tiny_dir, tmp_path / "log", **options)
        try:
            asked = {"model": "tiny-llama", "max_tokens": 24, "temperature": 1.0}
            ask = partial(client(server).completions.create, **asked)
            with ThreadPoolExecutor(8) as pool:
                made = [pool.submit(ask, prompt=f"{i} the quick", seed=i) for i in range(8)]
                told.append([each.result().choices[0].text for each in made])
            assert ("2 x (" in server.banner) == (sharding == "dp=2"), server.banner
        finally:
            assert server.stop() == 0
    assert told[0] == told[1]
    assert len({*told[0]}) > 4
