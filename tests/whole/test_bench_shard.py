"""``jserve bench shard --live``: the same tokens under every sharding, and a plant that is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jserve import shard_commands
from jserve.cli import app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SPLIT = '{"mesh":{"tp":2},"sums":"weights","logits":"split"}'
SMALL = ["--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--max-model-len", "160"]


def ran(model: Path, *specs: str) -> tuple[int, list[dict]]:
    words = [word for spec in specs for word in ("--spec", spec)]
    load = ["--trace", "rate=100,n=4,prompt=12,output=8", "--live", "--json"]
    how = ["--load-format", "dummy", "--dtype", "float32", "--compile-cache", ""]
    done = CliRunner().invoke(app, ["bench", "shard", str(model), *words, *load, *how, *SMALL])
    assert done.stdout, done.output
    return done.exit_code, [row["live"] for row in json.loads(done.stdout)["specs"]]


def test_every_sharding_draws_the_same_tokens(tiny_dir: Path) -> None:
    code, rows = ran(tiny_dir, "tp=1", "tp=2", SPLIT)
    assert code == 0
    assert [row["other_requests"] for row in rows] == [0, 0, 0]
    assert all(row["requests"] == 4 and row["step_ms"] > 0 for row in rows)
    layers = json.loads((tiny_dir / "config.json").read_text())["num_hidden_layers"]
    for row, n in zip(rows, (0, 2 * layers + 2, None), strict=True):
        assert [p["prefill_tokens"] > 0 for p in row["programs"]] == [False, True]
        for program in row["programs"]:
            assert n is None or program["collectives"] == n
            assert (program["collective_mib"] > 0) == (program["collectives"] > 0)
            assert 0 <= program["exposed_ms"] < program["step_ms"]


def test_another_token_is_counted_and_ends_with_1(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was = shard_commands._requests
    runs: list[int] = []

    def planted(*args: object) -> list:
        runs.append(1)
        found = was(*args)  # type: ignore[arg-type]
        return found if len(runs) == 1 else [*found[1:], found[0]][: len(found) - 1]

    monkeypatch.setattr(shard_commands, "_requests", planted)
    code, rows = ran(tiny_dir, "tp=1", "tp=2")
    assert code == 1
    assert rows[1]["other_requests"] == 1
    assert rows[1]["first_other"]
