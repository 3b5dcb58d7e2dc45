"""Step times for a live engine: taken from a table that was measured on it, refused otherwise."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.ports import StepTime
from jserve.sim.costs import FORMAT, TableFile
from jserve.sim.known import step_times
from jserve.sim.measure import write
from tests.kv.test_real_reuse import runner

FACTS = {
    "source": "mini",
    "dtype": "float32",
    "kv_dtype": "float32",
    "device": "1 x cpu",
    "sharding": "tp=1",
    "backend": "xla",
    "kernels": "xla",
    "family": "llama",
}
STEPS = tuple(
    StepTime(n_decode=d, n_prefill=p, n_context=c, seconds=1e-3 * (1 + d + p + c))
    for d, p in ((2, 0), (8, 0), (8, 32), (8, 64))
    for c in (16, 64)
)


def table(path: Path, *, about=None, steps=STEPS) -> Path:
    made = TableFile(
        format=FORMAT,
        about={"jax": "0.0"} | FACTS | (about or {}),
        host_seconds=0.0,
        n_slots=8,
        n_pages=99,
        page_size=8,
        max_model_len=64,
        steps=steps,
    )
    write(made, path)
    return path


def test_the_times_of_the_programs_at_hand_are_taken(tmp_path):
    path = table(tmp_path / "t.json")
    found = step_times(path, FACTS, [(2, 0), (8, 0), (8, 32)])
    assert set(found) == {s for s in STEPS if s.n_prefill < 64}


@pytest.mark.parametrize("name", [name for name in FACTS if name != "family"])
def test_a_table_of_another_engine_is_refused_and_says_what_differs(tmp_path, name):
    path = table(tmp_path / "t.json", about={name: "other"})
    with pytest.raises(ConfigError, match=f"{name} is {FACTS[name]!r} here and 'other'") as e:
        step_times(path, FACTS, [(2, 0)])
    assert e.value.field == "step_times"


def test_a_table_that_lacks_programs_names_them(tmp_path):
    path = table(tmp_path / "t.json")
    with pytest.raises(ConfigError, match=r"lacks 2 programs .*16 \+ 0, 16 \+ 64"):
        step_times(path, FACTS, [(2, 0), (16, 0), (16, 64)])


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format": "x"}'])
def test_what_is_no_table_is_refused(tmp_path, content):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as e:
        step_times(path, FACTS, [])
    assert e.value.field == "step_times"
    with pytest.raises(ConfigError, match="No such file"):
        step_times(tmp_path / "none", FACTS, [])


def test_an_engine_starts_with_the_times_of_its_file(tmp_path):
    from jserve import build

    device = runner()
    facts = {"source": "tiny"} | device.report()
    steps = tuple(
        StepTime(n_decode=b.D, n_prefill=b.P, n_context=64, seconds=0.5)
        for b in device.plain_buckets
    )
    path = table(tmp_path / "t.json", about=facts, steps=steps)
    config = EngineConfig.of(step_times=str(path))
    limits = build._limits(config, device, facts)
    assert limits == dataclasses.replace(device.limits, step_times=steps)
    assert build._limits(EngineConfig.of(), device, facts) is device.limits
    assert msgspec.json.decode(path.read_bytes())["about"]["source"] == "tiny"
