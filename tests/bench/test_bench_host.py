"""The measurements without a server: a run of each, and the record it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import dispatch, host


def checked(file: Path, kind: str) -> list[dict]:
    found = json.loads(file.read_text())
    assert (found["format"], found["kind"]) == (1, kind)
    assert {"cpu", "cores", "date", "load_1m", "python"} <= set(found["machine"])
    assert found["machine"]["packages"]["jax"]
    return found["lines"]


def test_the_record_of_the_hosts_part_says_where_it_was_taken(tmp_path: Path, capsys) -> None:
    out = tmp_path / "new" / "host.json"
    assert host.main(["--rows", "1,4", "--steps", "3", "--waiting", "2", "--json", str(out)]) == 0
    lines = checked(out, "host")
    assert [line["rows"] for line in lines] == [1, 4]
    assert all(line["plan_p50_us"] > 0 and line["commit_p50_us"] > 0 for line in lines)
    assert json.loads(out.read_text())["options"] == {"waiting": 2, "steps": 3, "logprobs": None}


def test_the_record_of_a_call_says_where_it_was_taken(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(dispatch, "ARGUMENTS", ((2, 1), (3, 2)))
    out = tmp_path / "new" / "dispatch.json"
    assert dispatch.main(["--repeats", "3", "--json", str(out)]) == 0
    lines = checked(out, "dispatch")
    assert [(line["kept"], line["donated"]) for line in lines] == [(2, 1), (3, 2)]
    assert all(line["numpy_buffer_us"] > 0 and line["device_buffer_us"] > 0 for line in lines)
    with pytest.raises(SystemExit):
        dispatch.main(["--repeats", "0"])
