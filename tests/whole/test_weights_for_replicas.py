"""Weights in memory reach replicas as they are, or not at all."""

from __future__ import annotations

import asyncio
import json
import tempfile
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jserve.build import serving_engine
from jserve.config import EngineConfig
from jserve.engine.wire import Control
from jserve.errors import WeightsError
from jserve.fleet.face import FleetEngine
from jserve.model.families import family_for
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.sampling import SamplingParams
from jserve.types import Request
from jserve.weights.adapters import AdapterDelta
from jserve.weights.for_replicas import write_for_replicas
from jserve.weights.handed import from_directory
from jserve.weights.layout import split
from jserve.weights.place import named
from jserve.weights.source import Source, resolve
from tests.fleet.fakes import ThreadSource
from tests.whole.test_weights import OPTIONS, drawn


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    """What is written lies below it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def found(root: Path) -> Source:
    return resolve(str(root), load_format="dummy")


def by_name(root: Path, params: Any) -> dict[str, np.ndarray]:
    """The tensors of ``params`` as a checkpoint names them."""
    config = json.loads((root / "config.json").read_text())
    family = family_for(config)
    found: dict[str, np.ndarray] = {}
    specs = named(family.specs(family.arch(config), 1))
    for (_, spec), leaf in zip(specs, jax.tree.leaves(params), strict=True):
        found |= split(spec, np.asarray(leaf))
    return found


@pytest.mark.parametrize("form", ["jax", "numpy", "bfloat16", "names"])
def test_a_replica_reads_what_was_handed_over(tiny_dir, form, temporary):
    params = drawn(tiny_dir, 1)
    if form == "bfloat16":
        params = jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), params)
    given = {
        "names": lambda: by_name(tiny_dir, params),
        "numpy": lambda: jax.tree.map(np.asarray, params),
    }
    source = given.get(form, lambda: params)()
    directory = write_for_replicas(source, found(tiny_dir))
    assert Path(directory).parent == temporary
    config = json.loads((tiny_dir / "config.json").read_text())
    family = family_for(config)
    arch = family.arch(config)
    read = from_directory(directory, family, arch, make_mesh(1), ShardRules(), np.float32)
    assert jax.tree.structure(read) == jax.tree.structure(params)
    for got, want in zip(jax.tree.leaves(read), jax.tree.leaves(params), strict=True):
        assert np.array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_what_is_wrong_is_named_and_nothing_is_left_behind(tiny_dir, temporary, monkeypatch):
    params = drawn(tiny_dir, 1)
    wrong = drawn(tiny_dir, 1)
    wrong["layers"][1]["o"] = wrong["layers"][1]["o"][:-1]
    deltas = AdapterDelta({})
    cases = [
        (wrong, r"params\.layers\.1\.o: shape"),
        ({"embed": params["embed"]}, "missing"),
        (deltas, "one engine"),
    ]
    for source, why in cases:
        with pytest.raises(WeightsError, match=why):
            write_for_replicas(source, found(tiny_dir))
    monkeypatch.setattr("jserve.weights.orbax.copy_beside", _fails)
    with pytest.raises(RuntimeError):
        write_for_replicas(params, found(tiny_dir))
    assert not list(temporary.iterdir())


def _fails(*_: Any) -> None:
    raise RuntimeError


@pytest.mark.slow
async def test_replicas_draw_what_one_engine_draws_with_the_same_weights(tiny_dir):
    params = drawn(tiny_dir, 7)
    options = {**OPTIONS, "model": str(tiny_dir), "dtype": "float32", "load_format": "dummy"}
    prompt = tuple(range(5, 30))

    async def drawn_by(engine: Any) -> list[int]:
        sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        asked = Request(id=uuid.uuid4().hex, prompt_ids=prompt, params=sampling)
        return [t async for out in engine.generate(asked) for t in out.token_ids]

    config = EngineConfig.of(**options)
    alone = serving_engine(config, in_process=True, params=params)
    await alone.start()
    wanted = await drawn_by(alone)
    await alone.close()
    source = ThreadSource(2, build="jserve.build:engine", **options)
    write = partial(write_for_replicas, model=found(tiny_dir))
    fleet = FleetEngine(source, model=str(tiny_dir), write=write)
    await fleet.start()
    before = [await drawn_by(fleet) for _ in range(2)]
    command = Control(id="one", action="update_weights", source=params, version="step-1")
    facts = await fleet.control(command)
    assert set(facts["replicas"].values()) == {"step-1"}
    after = await asyncio.gather(*(drawn_by(fleet) for _ in range(8)))
    assert all(one.n_requests > 2 for one in fleet.members)
    await fleet.close()
    assert before == [before[0]] * 2
    assert after == [wanted] * 8 != [before[0]] * 8
