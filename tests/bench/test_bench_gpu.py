"""The order, the budget and the record of ``bench.gpu``; what its stages measure is tested beside
the kernels."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile

import pytest

from bench import gpu, gpu_wheels
from bench.gpu_record import NotHere, Record


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
    record = Record(tmp_path, "facts", tiny=True, seconds=60)

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
    record = Record(tmp_path, "facts", tiny=True, seconds=0)
    record.attempt("one", lambda: pytest.fail("ran"))
    assert lines(tmp_path)[0]["skipped"] == "out of time"


def test_unknown_stages_are_refused(capsys):
    with pytest.raises(SystemExit) as e:
        gpu.main(["--only", "facts,nothing"])
    assert e.value.code == 2
    assert "no stage nothing" in capsys.readouterr().err


def test_what_a_stage_lacks_is_skipped_by_name(tmp_path):
    record = Record(tmp_path, "peers", tiny=True, seconds=60)

    def lacks():
        raise NotHere("torch is not installed")

    record.attempt("one", lacks)
    assert lines(tmp_path)[0]["skipped"] == "torch is not installed"
    assert " 0 wrong" in gpu.summary(lines(tmp_path))


def test_a_skip_of_a_child_process_is_a_skip(tmp_path, monkeypatch):
    """The stage runs as a program of its own, whose modules must be the same as the stages'."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    gpu.main(["--tiny", "--only", "peers", "--out", str(tmp_path), "--budget", "250"])
    found = [x for x in lines(tmp_path) if x["name"] != "end"]
    assert len(found) == 3
    assert all("torch" in x.get("skipped", "") for x in found), found


def test_only_missing_wheels_are_unpacked(tmp_path, monkeypatch):
    folder = tmp_path / "wheels"
    folder.mkdir()
    foreign = "jserve_of_another_python-1.0-cp27-cp27mu-linux_x86_64.whl"
    wheels = ("numpy-0.1-py3-none-any.whl", "jserve_carried_thing-1.0-py3-none-any.whl")
    for name in (*wheels, foreign):
        with zipfile.ZipFile(folder / name, "w") as z:
            z.writestr(f"{name.split('-')[0]}/__init__.py", "here = True\n")
    assert [w.name.split("-")[0] for w in gpu_wheels.missing(folder)] == ["jserve_carried_thing"]
    monkeypatch.setattr(gpu_wheels.tempfile, "gettempdir", lambda: str(tmp_path))
    environment = gpu_wheels.environment(folder)
    say = "import jserve_carried_thing as x, numpy; print(x.here, numpy.__version__ > '1')"
    out = subprocess.run([sys.executable, "-c", say], env=environment, capture_output=True)
    assert out.stdout.decode().strip() == "True True", out.stderr


def test_nothing_carried_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "here")
    assert gpu_wheels.environment(tmp_path)["PYTHONPATH"] == "here"


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["attention_peers", "peers", "serving"])
def test_stages_beside_other_engines(stage, tmp_path):
    """With torch's CPU build and a server of a tiny model; what needs a GPU is skipped."""
    if stage != "serving":
        pytest.importorskip("torch")
    gpu.main(["--tiny", "--only", stage, "--out", str(tmp_path), "--budget", "400"])
    found = lines(tmp_path)
    assert found[-1]["rc"] == 0
    for line in found:
        assert "error" not in line, line
        assert line.get("ok", True), line
    assert sum("skipped" not in x for x in found) > 3
