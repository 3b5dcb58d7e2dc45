"""The order, the budget and the record of ``bench.gpu``; what its stages measure is tested beside
the kernels."""

from __future__ import annotations

import json

import pytest

from bench import gpu


def lines(folder):
    return gpu.read(folder / "gpu.jsonl")


def test_facts_on_a_cpu(tmp_path, capsys):
    assert gpu.main(["--tiny", "--only", "facts", "--out", str(tmp_path), "--budget", "250"]) == 0
    found = {x["name"]: x for x in lines(tmp_path)}
    assert found["device"]["platform"] == "cpu"
    assert found["read bandwidth"]["bytes_per_s"] > 0
    assert found["end"]["rc"] == 0
    assert gpu.whole(lines(tmp_path)) == {"facts"}
    assert "facts" in capsys.readouterr().out


def test_a_stage_that_hangs_is_ended(tmp_path):
    assert gpu._child("facts", tmp_path, tiny=True, seconds=-1.9) == 124


def test_whole_stages_are_not_run_again(tmp_path):
    record = tmp_path / "before.jsonl"
    ends = [{"stage": n, "name": "end", "rc": 0, "tiny": True} for n in gpu.STAGES]
    record.write_text("\n".join(json.dumps(x) for x in ends))
    assert gpu.main(["--resume", str(record), "--out", str(tmp_path / "out")]) == 0
    assert not lines(tmp_path / "out")


def test_no_stage_begins_without_time(tmp_path):
    gpu.main(["--only", "facts,peers", "--out", str(tmp_path), "--budget", "1"])
    assert [(x["stage"], x["rc"]) for x in lines(tmp_path)] == [("facts", -1), ("peers", -1)]
    assert gpu.whole(lines(tmp_path)) == set()


def test_an_error_is_a_figure(tmp_path, capsys):
    record = gpu.Record(tmp_path, "facts", tiny=True, seconds=60)

    def fails():
        raise ValueError("out of luck")

    record.attempt("one", fails)
    record.attempt("two", lambda: {"x": 1.5, "ok": True})
    assert [x.get("error") for x in lines(tmp_path)] == ["ValueError: out of luck", None]
    assert "out of luck" in (tmp_path / "errors.log").read_text()
    assert " 1 wrong" in gpu.summary(lines(tmp_path))
    assert record.figure("facts", "two", "x", 9.0) == 1.5
    assert record.figure("facts", "three", "x", 9.0) == 9.0


def test_time_that_is_up_skips(tmp_path):
    record = gpu.Record(tmp_path, "facts", tiny=True, seconds=0)
    record.attempt("one", lambda: pytest.fail("ran"))
    assert lines(tmp_path)[0]["skipped"] == "out of time"


def test_unknown_stages_are_refused(capsys):
    with pytest.raises(SystemExit) as e:
        gpu.main(["--only", "facts,nothing"])
    assert e.value.code == 2
    assert "no stage nothing" in capsys.readouterr().err
