"""The order, the budget and the record of ``bench.gpu``; what its stages measure is tested beside
the kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace

import jax
import pytest

from bench import gpu, gpu_beside_xla, gpu_report, gpu_steps, gpu_wheels
from bench.gpu_record import STICKY, NotHere, Record


def lines(folder):
    return gpu.read(folder / "gpu.jsonl")


@pytest.mark.slow
def test_facts_on_a_cpu(tmp_path, capsys):
    assert gpu.main(["--tiny", "--only", "facts", "--out", str(tmp_path), "--budget", "250"]) == 0
    found = {x["name"]: x for x in lines(tmp_path)}
    assert found["device"]["platform"] == "cpu"
    assert found["read bandwidth"]["bytes_per_s"] > 0
    assert found["end"]["rc"] == 0
    assert gpu.whole(lines(tmp_path)) == {"facts"}
    assert "facts" in capsys.readouterr().out


def test_a_stage_that_hangs_is_ended(tmp_path):
    assert gpu._child(Record(tmp_path, "facts", tiny=True, seconds=0), -1.9) == 124


FAULTS = """
import os, time
import jax.numpy
import bench.gpu_facts as facts
import bench.gpu_peers as peers

measured = facts._skinny, facts._dispatch

def poisoned(*_):
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

def lost(*_):
    jax.numpy.add = poisoned
    poisoned()

def aborts(*_):
    os.abort()

def half(*a):
    if a[0] > 1:
        return measured[0](*a)
    with open(os.environ["RECORD"], "a") as f:
        f.write('{"stage": "facts", "na')
    os._exit(9)

def hangs(*a):
    time.sleep(1000) if a[0] == 2 else None
    return measured[1](*a)

facts._read, facts._copy, facts._skinny, facts._dispatch = lost, aborts, half, hangs
peers.peers = lambda record: record.attempt("one", lambda: {"x": 1})
"""


@pytest.mark.slow
def test_each_fault_costs_one_case(tmp_path, monkeypatch, capsys):
    """A lost device, an abort, half a line and a hang: recorded as errors, and all other cases run."""
    (tmp_path / "sitecustomize.py").write_text(FAULTS)
    monkeypatch.setenv("RECORD", str(tmp_path / "gpu.jsonl"))
    with monkeypatch.context() as faulty:
        faulty.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.getcwd()]))
        # So that the hang leaves time for the next stage.
        faulty.setitem(gpu.STAGES, "facts", replace(gpu.STAGES["facts"], seconds=18))
        out = ["--tiny", "--only", "facts,peers", "--out", str(tmp_path)]
        assert gpu.main([*out, "--budget", "240"]) == 1
    ends = {x["stage"]: x for x in lines(tmp_path) if x["name"] == "end"}
    assert ends["facts"]["lost"] == [STICKY, -6, 9, 1], (
        "of a lost device, an abort, an exit, a hang"
    )
    assert ends["facts"]["rc"] == 0, "and the last process came to the end"
    assert ends["peers"] == ends["peers"] | {"rc": 0, "lost": []}, "the next stage runs as ever"
    assert gpu.whole(lines(tmp_path)) == {"peers"}
    table = capsys.readouterr().out
    assert " 4 wrong  after processes that ended with 3, -6, 9, 1 " in table
    found = {x["name"]: x for x in lines(tmp_path)}
    errors = {name: x["error"] for name, x in found.items() if "error" in x}
    assert errors["read bandwidth"] == "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert errors["copy bandwidth"] == "the process ended with exit code -6"
    assert errors["skinny matmul 1"] == "the process ended with exit code 9"
    assert errors["dispatch of 2 + 1 arrays"].startswith("no result within")
    assert len(errors) == 4
    assert "hangs" in (tmp_path / "errors.log").read_text(), "the stacks of the hang"
    right = [name for name, x in found.items() if name not in errors and name not in ("end", "one")]
    assert len(right) == 10

    (tmp_path / "sitecustomize.py").unlink()
    before = found["matmul bfloat16"]
    again = tmp_path / "again"
    resumed = ["--resume", str(tmp_path / "gpu.jsonl"), "--out", str(again), "--budget", "250"]
    assert gpu.main(["--tiny", "--only", "facts", *resumed]) == 0
    found = {x["name"]: x for x in lines(again)}
    assert found["matmul bfloat16"] == before, "a good case is kept"
    assert found["read bandwidth"]["bytes_per_s"] > 0
    assert gpu.whole(lines(again)) == {"facts"}


def test_a_pool_takes_what_the_card_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an H100 as of an H200; weights that do not fit are said and skipped."""
    from bench import gpu_rig

    rig = gpu_rig.Rig(gpu_rig.ARCHS["tiny"], "dense", n_pages=100, M=8)
    weights = sum(x.nbytes for x in jax.tree.leaves(rig.params))
    page = rig.model.kv.page_bytes
    monkeypatch.setattr(gpu_rig, "memory", lambda: weights + gpu_rig.SCRATCH + 10 * page + 1)
    small = gpu_rig.Rig(gpu_rig.ARCHS["tiny"], "dense", n_pages=100, M=8)
    assert (rig.model.n_pages, small.model.n_pages) == (100, 10)
    assert small.state.kv[0][0].shape[0] == 10
    monkeypatch.setattr(gpu_rig, "memory", lambda: weights)
    with pytest.raises(NotHere, match="do not hold weights"):
        gpu_rig.Rig(gpu_rig.ARCHS["tiny"], "dense", n_pages=100, M=8)


def test_a_lost_device_ends_its_process_with_a_code_of_its_own(tmp_path):
    """A real process, whose device fails in a case and in every call after it."""
    say = (
        "import sys, types, pathlib\n"
        "from bench.gpu_record import Record\n"
        "def lost(*_): raise RuntimeError('CUDA_ERROR_ILLEGAL_ADDRESS')\n"
        "if sys.argv[2] == 'lost':\n"
        "    sys.modules['jax'] = jax = types.ModuleType('jax')\n"
        "    sys.modules['jax.numpy'] = jax.numpy = types.ModuleType('jax.numpy')\n"
        "    jax.numpy.ones = lost\n"
        "record = Record(pathlib.Path(sys.argv[1]), 'facts', tiny=True, seconds=60)\n"
        "record.attempt('one', lost)\n"
        "record.attempt('two', lambda: {'x': 1})\n"
    )
    run = lambda how: subprocess.run([sys.executable, "-c", say, str(tmp_path), how]).returncode  # noqa: E731
    assert run("lost") == STICKY == 3
    assert [x["name"] for x in lines(tmp_path)] == ["one"], "nothing is measured on a lost device"
    assert run("well again") == 0
    assert [x["name"] for x in lines(tmp_path)] == ["one", "two"], (
        "what is recorded is not tried again"
    )


def test_the_stage_and_the_next_one_go_on_after_a_lost_device(tmp_path, monkeypatch, capsys):
    codes = iter([STICKY, 124, 0, 0])

    def child(record, seconds):
        record.add(f"case {(rc := next(codes))}", **({"error": "lost"} if rc else {"x": 1.0}))
        if rc == 124:
            case = {"name": "hung", "limit": 1, "at": 0}
            (tmp_path / "case.json").write_text(json.dumps(case))
        return rc

    monkeypatch.setattr(gpu, "_child", child)
    assert gpu.main(["--only", "facts,peers", "--out", str(tmp_path), "--budget", "60"]) == 1
    ends = [(x["stage"], x["rc"], x["lost"]) for x in lines(tmp_path) if x["name"] == "end"]
    assert ends == [("facts", 0, [STICKY, 124]), ("peers", 0, [])]
    table = capsys.readouterr().out
    assert "3 wrong  after processes that ended with 3, 124 " in table
    assert gpu.whole(lines(tmp_path)) == {"peers"}


def test_a_process_that_cannot_be_killed_is_left(tmp_path, monkeypatch):
    class Stuck:
        def __init__(self, *_, **__):
            pass

        def wait(self, seconds):
            raise subprocess.TimeoutExpired("stuck", seconds)

        def kill(self):
            pass

    monkeypatch.setattr(gpu.subprocess, "Popen", Stuck)
    assert gpu._child(Record(tmp_path, "facts", tiny=True, seconds=0), 1) == 125


def test_the_fastest_graphs_that_run_are_taken(tmp_path, monkeypatch):
    record = Record(tmp_path, "graphs", tiny=True, seconds=60)
    assert record.cuda_graphs == "step"
    ms = {"step": None, "xla": 2.0, "off": 3.0}

    def time_of(record, rig, batch, context):
        if ms[rig] is None:
            raise RuntimeError("capture failed")
        return {"ms": ms[rig]}

    class Rig(str):
        def __new__(cls, *_, cuda_graphs, **__):
            return str.__new__(cls, cuda_graphs)

        def fill(self):
            pass

    monkeypatch.setattr(gpu_steps, "Rig", Rig)
    monkeypatch.setattr(gpu_steps, "_step_time", time_of)
    gpu_steps.graphs(record)
    assert lines(tmp_path)[-1] == {
        "stage": "graphs",
        "name": "verdict",
        "tiny": True,
        "cuda_graphs": "xla",
        "ok": True,
    }
    assert Record(tmp_path, "steps_1b", tiny=True, seconds=60).cuda_graphs == "xla"


def test_the_last_verdict_counts_and_one_of_a_broken_stage_does_not(tmp_path):
    steps = Record(tmp_path, "steps_1b", tiny=True, seconds=60)
    graphs = Record(tmp_path, "graphs", tiny=True, seconds=60)
    for mode in ("step", "off"):
        graphs.add("verdict", cuda_graphs=mode, ok=True)
    assert steps.cuda_graphs == "off"
    (tmp_path / "out").mkdir()
    gpu._carry_over(tmp_path / "gpu.jsonl", tmp_path / "out", ("hopper", "hopper"))
    again = Record(tmp_path / "out", "steps_1b", tiny=True, seconds=60)
    assert again.cuda_graphs == "step", "stage graphs did not come to its end"


def test_whole_steps_are_checked_with_the_graphs_that_others_take(tmp_path, monkeypatch):
    Record(tmp_path, "graphs", tiny=True, seconds=60).add("verdict", cuda_graphs="xla", ok=True)
    taken = []

    def rig(*_, cuda_graphs, **__):
        taken.append(cuda_graphs)
        raise RuntimeError("seen")

    monkeypatch.setattr(gpu_steps, "Rig", rig)
    gpu_steps.step_numerics(Record(tmp_path, "step_numerics", tiny=True, seconds=60))
    assert set(taken) == {"xla"}


def test_figures_of_another_attention_are_others(tmp_path):
    """Its stage is measured though that of hopper is whole, and a report shows both."""

    def record(attn):
        return gpu._record(
            gpu.options().parse_args(["--out", str(tmp_path), "--attn", attn]), "steps_8b", 60
        )

    figures = {"ms": 1.0, "tok_per_s": 1.0, "share": 0.5}
    record("hopper").attempt("8b, batch 1, 2048", lambda: figures)
    record("hopper").add("end", rc=0)
    record("dense").attempt("8b, batch 1, 2048", lambda: figures | {"ms": 9.0})
    record("dense").attempt("8b, batch 1, 2048", lambda: figures | {"ms": 7.0})
    assert [x.get("ms") for x in lines(tmp_path)] == [1.0, None, 9.0], "the third is known"
    for attn, done in (("hopper", {"steps_8b"}), ("dense", set())):
        (tmp_path / attn).mkdir()
        assert gpu._carry_over(tmp_path / "gpu.jsonl", tmp_path / attn, (attn, "hopper")) == done
    table = gpu_report.markdown(gpu_report.merged([tmp_path / "gpu.jsonl"]))
    assert "| steps_8b: 8b, batch 1, 2048 | 1.00 ms" in table
    assert "| steps_8b: 8b, batch 1, 2048, attention dense | 9.00 ms" in table


def test_a_candidate_is_judged_by_what_earlier_processes_measured_too(tmp_path, monkeypatch):
    def one(shape):
        return gpu_beside_xla.Comparison(
            "k", shape, *(lambda *_: None,) * 2, {}, lambda *_: None, 1
        )

    monkeypatch.setattr(gpu_beside_xla, "_measured", lambda *_: {"ratio": 2.0})
    before = Record(tmp_path, "candidate_times", tiny=True, seconds=60)
    before.add("k a", ratio=1.5)
    after = Record(tmp_path, "candidate_times", tiny=True, seconds=60)
    gpu_beside_xla.times(after, [lambda _: iter([one("a"), one("b")])])
    assert lines(tmp_path)[-1] | {"verdict": "stays", "least": 1.5} == lines(tmp_path)[-1]


def test_a_record_that_is_not_there_cannot_be_resumed(tmp_path):
    with pytest.raises(SystemExit, match="there is no such file"):
        gpu.main(["--resume", str(tmp_path / "none"), "--out", str(tmp_path / "out")])


def test_whole_stages_are_not_run_again(tmp_path):
    record = tmp_path / "before.jsonl"
    ends = [{"stage": n, "name": "end", "rc": 0, "tiny": True} for n in gpu.STAGES]
    record.write_text("\n".join(json.dumps(x) for x in ends))
    assert gpu.main(["--resume", str(record), "--out", str(tmp_path / "out")]) == 0
    assert lines(tmp_path / "out") == ends, "kept, and nothing measured"


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
@pytest.mark.parametrize("stage", ["attention_peers", "peers", "serving", "serving_speculative"])
def test_stages_beside_other_engines(stage, tmp_path):
    """With torch's CPU build and a server of a tiny model; what needs a GPU is skipped."""
    if not stage.startswith("serving"):
        pytest.importorskip("torch")
    gpu.main(["--tiny", "--only", stage, "--out", str(tmp_path), "--budget", "400"])
    found = lines(tmp_path)
    assert found[-1]["rc"] == 0
    for line in found:
        assert "error" not in line, line
        assert line.get("ok", True), line
    assert sum("skipped" not in x for x in found) > 2
