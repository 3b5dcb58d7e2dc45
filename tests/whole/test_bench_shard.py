"""``jserve bench shard --live``: the same tokens under every sharding, a plant that is seen, and a child that dies."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jserve import shard_live, xla
from jserve.cli import app
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.shard_live import Live
from jserve.sharding import Sharding
from jserve.sizing.twin import StepCost

SPLIT = '{"mesh":{"tp":2},"sums":"weights","logits":"split"}'
BY_XLA = '{"mesh":{"tp":2},"mode":"auto","rules":{"kv_heads":"tp","ffn":"tp","vocab":"tp"}}'
SMALL = ["--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--max-model-len", "160"]
COST = StepCost(
    decode_rows=2, prefill_tokens=0, collectives=0, collective_mib=0.0, step_ms=1.0, exposed_ms=0.0
)
DONE = Live(
    answers={"a": (1, 2), "b": (3,)},
    wall_s=0.5,
    n_drawn=3,
    step_ms=2.0,
    dtype="float32",
    programs=(COST, COST),
)


def ran(
    model: Path, *specs: str, trace: str = "rate=100,n=4,prompt=12,output=8"
) -> tuple[int, list[dict]]:
    words = [word for spec in specs for word in ("--spec", spec)]
    load = ["--trace", trace, "--live", "--json"]
    how = ["--load-format", "dummy", "--dtype", "float32", "--compile-cache", ""]
    done = CliRunner().invoke(app, ["bench", "shard", str(model), *words, *load, *how, *SMALL])
    assert done.stdout, done.output
    return done.exit_code, json.loads(done.stdout)["specs"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_sharding_draws_the_same_tokens(tiny_dir: Path) -> None:
    code, specs = ran(tiny_dir, "tp=1", "tp=2", SPLIT, BY_XLA)
    rows = [row["live"] for row in specs]
    assert code == 0
    assert [row["other_requests"] for row in rows] == [0, 0, 0, 0]
    assert all(row["requests"] == 4 and row["step_ms"] > 0 for row in rows)
    layers = json.loads((tiny_dir / "config.json").read_text())["num_hidden_layers"]
    for row, n in zip(rows, (0, 2 * layers + 2, None, None), strict=True):
        assert [p["prefill_tokens"] > 0 for p in row["programs"]] == [False, True]
        for program in row["programs"]:
            assert n is None or program["collectives"] == n
            assert (program["collective_mib"] > 0) == (program["collectives"] > 0)
            assert program["step_ms"] > 0
            assert row is rows[3] or 0 <= program["exposed_ms"] < program["step_ms"]
    for program in rows[3]["programs"]:
        assert program["exposed_ms"] is None, "it has no twin"
        assert program["collectives"] >= 2 * layers


def children(monkeypatch: pytest.MonkeyPatch, *codes: str) -> list[dict[str, Any]]:
    """Children that run this instead, one after another; ``job`` is theirs and ``done(found)`` writes. Returns their
    jobs."""
    jobs: list[dict[str, Any]] = []
    left = iter(codes)

    def command(out: Path) -> list[str]:
        said = (
            "import json, os, pathlib, signal, sys; job = json.load(sys.stdin)\n"
            f"def done(found): pathlib.Path({str(out)!r}).write_text(json.dumps(found))\n"
            f"DONE = {json.dumps(dataclasses.asdict(DONE))}\n"
        )
        return [sys.executable, "-c", said + next(left)]

    was = shard_live.subprocess.run

    def run(*args: Any, **rest: Any) -> Any:
        jobs.append(json.loads(rest["input"]) | {"env": rest["env"]})
        return was(*args, **rest)

    monkeypatch.setattr(shard_live, "command", command)
    monkeypatch.setattr(shard_live.subprocess, "run", run)
    return jobs


FINE = "done({'live': DONE})"
OTHER = "done({'live': DONE | {'answers': {'a': [1, 2], 'b': [4]}}})"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
RAISED = "raise SystemExit(3)"


def test_another_token_is_counted_and_ends_with_1(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children(monkeypatch, FINE, OTHER)
    code, (first, second) = ran(tiny_dir, "tp=1", "tp=2")
    assert code == 1
    assert (first["live"]["other_requests"], second["live"]["other_requests"]) == (0, 1)
    assert second["live"]["first_other"] == "b"


def test_a_sharding_whose_process_dies_is_named_and_the_others_run(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = children(monkeypatch, FINE, KILLED, RAISED, FINE)
    code, rows = ran(tiny_dir, "tp=1", "tp=2", SPLIT, "tp=4")
    assert code == 1
    assert [row["refused"] for row in rows] == [
        *("", "its process ended with signal 9", "its process ended with exit code 3", "")
    ]
    assert ["live" in row for row in rows] == [True, False, False, True]
    assert [Sharding.of(job["sharding"]).n_devices for job in jobs] == [1, 2, 2, 4]
    assert rows[3]["live"]["other_requests"] == 0
    assert rows[3]["live"]["programs"] == [dataclasses.asdict(COST)] * 2


def test_errors_of_a_child_are_those_of_the_command(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about_spec = "done({'config_error': 'sharding.mesh: no', 'field': 'sharding.mesh'})"
    about_all = "done({'config_error': 'trace: too long', 'field': 'trace'})"
    children(monkeypatch, about_spec, FINE, "done({'error': 'the engine ended'})")
    code, rows = ran(tiny_dir, "tp=1", "tp=2", "tp=4")
    assert code == 1
    assert [row["refused"] for row in rows] == ["sharding.mesh: no", "", "the engine ended"]
    children(monkeypatch, about_all)
    with pytest.raises(ConfigError, match="too long") as caught:
        shard_live.ran(EngineConfig(), Sharding.of("tp=1"), "", {})
    assert caught.value.field == "trace"


def test_a_child_has_as_many_devices_as_its_sharding(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--one --{xla.FORCED}=8 --two")
    monkeypatch.delenv(xla.PREALLOCATE, raising=False)
    jobs = children(monkeypatch, FINE, FINE)
    ran(tiny_dir, "tp=2", "dp=2,tp=2")
    flags = [job["env"]["XLA_FLAGS"] for job in jobs]
    assert flags == [f"--one --{xla.FORCED}={n} --two" for n in (2, 4)]
    assert all(xla.PREALLOCATE not in job["env"] for job in jobs)
    few = {"XLA_FLAGS": f"--{xla.FORCED}=2"}
    assert xla.with_devices(4, few) == few
    assert xla.with_devices(4, {}) == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_request_that_is_too_long_ends_the_command(
    tiny_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Found by the child."""
    words = ["--spec", "tp=1", "--live", "--trace", "rate=100,n=1,prompt=200,output=8"]
    how = ["--load-format", "dummy", "--dtype", "float32", "--compile-cache", "", *SMALL]
    done = CliRunner().invoke(app, ["bench", "shard", str(tiny_dir), *words, *how])
    assert done.exit_code == 2
    assert "the context is 160" in " ".join((done.output + capfd.readouterr().err).split())
