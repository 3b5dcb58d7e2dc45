"""The offline benchmark with a made-up engine: honest counts, and failures that are seen."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import models, offline, offline_engines, probe
from bench.workloads import Item

SPEC = {"engine": "made-up", "seed": 0, "scale": 0.25, "names": ["S1", "S2"], "options": {}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "bandwidth", lambda: {"gb_s_best": 10.0})


def engine(calls: list[int], lost: int = 0) -> Any:
    @contextlib.contextmanager
    def start(_: dict) -> Iterator[offline_engines.Generate]:
        def generate(items: Sequence[Item]) -> list[list[int]]:
            calls.append(len(items))
            time.sleep(0.002)
            return [[1] * (i.max_tokens - lost) for i in items]

        yield generate

    return start


def test_s1_runs_one_at_a_time_and_s2_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setitem(offline_engines.ENGINES, "made-up", engine(calls))
    turn = offline_engines.run({**SPEC, "scale": 0.5})
    assert calls == [1, 6, 1, 1, 24], "first token, warm-up, S1, S2"
    s1, s2 = turn["workloads"]["S1"], turn["workloads"]["S2"]
    assert (s1["output_tokens"], s1["errors"]) == (256, 0)
    assert s2["output_tok_s"] > 0
    assert set(s1["latency_ms"]) == {"p50", "p95", "p99", "max"}


def test_missing_tokens_are_errors_and_no_speed_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(offline_engines.ENGINES, "made-up", engine([], lost=1))
    s2 = offline_engines.run(SPEC)["workloads"]["S2"]
    assert s2["errors"] == s2["requests"] == 16
    assert "output_tok_s" not in s2


def test_a_child_that_fails_is_reported_with_its_last_words() -> None:
    turn = offline.one_turn(SPEC, 60)
    assert "ended with 1" in turn["error"]
    assert "KeyError" in turn["error"]


def test_a_child_that_hangs_is_given_up() -> None:
    assert offline.one_turn(SPEC, 0.01) == {"error": "no end within 0.01 s"}


def test_the_result_file_of_two_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = models.Shape(
        layers=1, hidden=64, heads=2, kv_heads=1, ffn=64, rope_theta=1e4, max_len=8192, head_dim=32
    )
    model = models.write(tmp_path / "tiny", tiny)
    monkeypatch.setitem(offline_engines.ENGINES, "hf", engine([]))
    monkeypatch.setattr(offline, "one_turn", lambda spec, _: offline_engines.run(spec))
    monkeypatch.setattr(offline, "missing", lambda name: None)
    out = tmp_path / "out.json"
    args = f"{model} --engine hf --workload S2 --scale 0.25 --json {out}".split()
    assert offline.main(args) == 0
    result = json.loads(out.read_text())
    assert [(t["round"], t["engine"]) for t in result["turns"]] == [(0, "hf"), (1, "hf")]
    assert result["turns"][0]["workloads"]["S2"]["gflop_s"] > 0
    assert (result["kind"], result["model"]["name"]) == ("offline", "tiny")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("m --workload S4", "S4 has no meaning offline"),
        ("m --rounds 0", "--rounds"),
        ("no-such-model", "no readable model"),
    ],
)
def test_bad_usage_is_one_line(args: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        offline.main(args.split())
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
