"""Turns with a fake server process: order, start-up, clean-up, reports, exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from bench import engines, models, probe, report, serving
from bench.engines import Engine, EngineError, Paths, Running

FAKE = str(Path(__file__).with_name("fake_server.py"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    small = probe.bandwidth
    monkeypatch.setattr(probe, "bandwidth", lambda: small(threads=1, mib=1, repeats=1))
    monkeypatch.setattr(serving, "SETTLE_S", 0.0)


def fake(name: str, *more: str, model: str = "good", cache: Path | None = None) -> Engine:
    argv = (sys.executable, FAKE, "{port}", *more)
    return Engine(name=name, argv=argv, model=model, cache=cache, version_argv=("echo", "fake 1"))


def test_turns_alternate_direction() -> None:
    a, b = fake("a"), fake("b")
    assert [(n, e.name) for n, e in serving.turns([a, b], 3)] == [
        (0, "a"),
        (0, "b"),
        (1, "b"),
        (1, "a"),
        (2, "a"),
        (2, "b"),
    ]


def test_a_server_is_ended_with_its_children(tmp_path: Path) -> None:
    with Running(fake("a", "--child"), tmp_path) as server:
        waited = server.wait_ready(30)
        assert 0 < waited < 30
        child = psutil.Process(int(server.log.read_text().split()[1]))
        assert child.is_running()
        server.stop(grace_s=0.5)
    assert server.process.poll() is not None
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert list(tmp_path.iterdir()) == [], "a log without a failure is removed"


def test_a_server_that_dies_at_start_shows_its_last_words(tmp_path: Path) -> None:
    dying = Engine(name="dying", argv=(sys.executable, "-c", "print('no memory'); exit(3)"))
    with (
        pytest.raises(EngineError, match=r"dying .* ended with 3[\s\S]*no memory"),
        Running(dying, tmp_path) as server,
    ):
        server.wait_ready(30)
    assert len(list(tmp_path.iterdir())) == 1, "the log of a failure stays"


def test_a_server_that_is_never_ready_is_given_up_and_ended(tmp_path: Path) -> None:
    deaf = Engine(name="deaf", argv=(sys.executable, "-c", "import time; time.sleep(60)"))
    with (
        pytest.raises(EngineError, match=r"not ready after 0\.4 s"),
        Running(deaf, tmp_path) as server,
    ):
        server.wait_ready(0.4)
    assert server.process.poll() is not None


def test_an_executable_that_is_missing_is_named() -> None:
    with pytest.raises(EngineError, match=r"ghost: .*no-such-file"):
        Running(Engine(name="ghost", argv=("/no-such-file",)))


def paths(tmp_path: Path, **more: object) -> Paths:
    return Paths(model=tmp_path, compile_cache=tmp_path, **more)  # type: ignore[arg-type]


def test_engines_without_their_files_are_skipped_with_a_reason(tmp_path: Path) -> None:
    assert "--vllm-python" in str(engines.build("vllm", paths(tmp_path)))
    assert "--gguf" in str(engines.build("llamacpp", paths(tmp_path, llamacpp_server=tmp_path)))
    with pytest.raises(EngineError, match="unknown engine 'sglang'"):
        engines.build("sglang", paths(tmp_path))


def test_extra_arguments_reach_the_command_line(tmp_path: Path) -> None:
    built = engines.build("jserve", paths(tmp_path, extra={"jserve": "--dtype 'b c'"}))
    assert isinstance(built, Engine)
    assert built.argv[-2:] == ("--dtype", "b c")


def test_an_empty_compile_cache_means_a_cold_start(tmp_path: Path) -> None:
    engine = fake("jserve", cache=tmp_path)
    assert engine.is_cold()
    (tmp_path / "program").write_text("x")
    assert not engine.is_cold()
    assert not fake("vllm").is_cold()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """One comparison of two fake engines over two rounds, from the command line."""
    folder = tmp_path_factory.mktemp("run")
    shape = models.SHAPES["llama-60m"]
    model = models.write(folder / "tiny", models.Shape(**{**_fields(shape), **_TINY}))
    cache, made = folder / "cache", {}

    def build(name: str, _: Paths) -> Engine:
        # Tokens that come all at once, to a client that was not looking, have no rate.
        made[name] = fake(name, "--step-s", "0.003", cache=cache if name == "jserve" else None)
        return made[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "build", build)
        patch.setattr(serving, "SETTLE_S", 0.0)
        patch.setattr(probe, "bandwidth", lambda: {"gb_s_best": 10.0})
        code = serving.main(
            f"{model} --engine jserve --engine vllm --workload S1 --workload S3 --workload S4"
            f" --sweep 2 --scale 0.25 --compile-cache {cache} --json {folder}/out.json".split()
        )
    assert code == 0
    return json.loads((folder / "out.json").read_text())


_TINY = {"layers": 1, "hidden": 64, "heads": 2, "kv_heads": 1, "ffn": 64, "head_dim": 32}


def _fields(shape: models.Shape) -> dict:
    return {name: getattr(shape, name) for name in shape.__slots__}


@pytest.mark.slow
def test_a_comparison_runs_every_turn(run: dict) -> None:
    order = [(t["round"], t["engine"]) for t in run["turns"]]
    assert order == [(0, "jserve"), (0, "vllm"), (1, "vllm"), (1, "jserve")]
    for turn in run["turns"]:
        assert set(turn["workloads"]) == {"S1", "S3", "S4", "chat@2"}
        assert turn["start"]["ready_s"] <= turn["start"]["first_token_s"] < 60
        assert turn["workloads"]["S1"]["output_tokens"] == 128
        assert turn["workloads"]["S4"]["long_ttft_ms"] > 0
        assert turn["workloads"]["S3"]["ttft_steady_ms"] > 0
        assert 0 < turn["start"]["cpu_s"] < 60
        assert turn["memory_gib"] > 0
    assert run["engines"] == {"jserve": "fake 1", "vllm": "fake 1"}
    assert run["machine"]["cores"] >= 1


@pytest.mark.slow
def test_limits_are_worked_out_from_the_model(run: dict) -> None:
    s1, model = run["turns"][0]["workloads"]["S1"], run["model"]
    share = s1["decode_tok_s_p50"] * model["weight_bytes"] / 1e9 / 10.0 * 100
    assert s1["share_of_bandwidth"] == pytest.approx(share, rel=0.01)
    flop = 2 * (model["body_params"] * 256 + model["head_params"] * 128)
    assert s1["gflop_s"] == pytest.approx(flop / s1["wall_s"] / 1e9, rel=0.02)
    assert "share_of_bandwidth" not in run["turns"][0]["workloads"]["chat@2"]


@pytest.mark.slow
def test_tables_hold_the_numbers_and_the_ratios(run: dict) -> None:
    console = Console(width=220, record=True, file=io.StringIO())
    report.show(run, console)
    text = console.export_text()
    for expected in ("S1", "chat@2", "longest gap ms", "jserve cold", "ratios", "tiny"):
        assert expected in text
    found = {(r["workload"], r["figure"]): r for r in report.ratios(run)}
    ours, theirs = (
        [t["workloads"]["S1"]["output_tok_s"] for t in run["turns"] if t["engine"] == e]
        for e in ("jserve", "vllm")
    )
    row = found["S1", "out tok/s"]
    assert row["pairs"] == 2
    assert row["min"] == pytest.approx(min(ours[0] / theirs[0], ours[1] / theirs[1]), rel=1e-3)


def test_a_failing_engine_is_reported_and_the_others_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = serving.Plan(
        names=("chat@2",), seed=0, scale=0.1, request_timeout_s=10, ready_timeout_s=30
    )
    liar = fake("liar", model="boasts")
    done = list(serving.compare([liar, fake("good")], plan, 1))
    assert "warm-up failed" in done[0]["error"] or "first request failed" in done[0]["error"]
    assert done[1]["workloads"]["chat@2"]["errors"] == 0
    assert report.exit_code({"turns": done}) == 1
    assert report.exit_code({"turns": done[1:]}) == 0
    assert report.exit_code({"turns": []}) == 1


def test_bad_usage_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for args, says in [
        ([], "model directory"),
        (["m", "--workload", "S7"], "unknown workload 'S7'"),
        (["m", "--rounds", "0"], "--rounds"),
        (["m", "--engine", "nope"], "unknown engine"),
    ]:
        with pytest.raises(SystemExit) as ended:
            serving.main(args)
        assert ended.value.code == 2, args
        assert says in capsys.readouterr().err


def test_the_probe_measures_something_and_sees_who_is_busy() -> None:
    assert probe.bandwidth()["gb_s_best"] > 0.1
    before = probe.Clock.read(None)
    sum(range(3_000_000))
    used = before.until(probe.Clock.read(None))
    assert used["client_cores"] > 0.2
    assert used["foreign_cores"] >= 0


def test_ending_the_benchmark_ends_its_server(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom bench import serving\n"
        "from bench.engines import Engine\n"
        "deaf = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
        "plan = serving.Plan(names=(), seed=0, scale=1, request_timeout_s=9, ready_timeout_s=50,\n"
        "                    log_dir=Path(sys.argv[1]))\n"
        "with serving.ending_unwinds():\n"
        "    list(serving.compare([Engine(name='deaf', argv=(sys.executable, '-c', deaf))], plan, 1))\n"
    )
    harness = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    deadline = time.monotonic() + 30
    while not (said := "".join(f.read_text() for f in tmp_path.iterdir())).strip():
        assert time.monotonic() < deadline
        assert harness.poll() is None
        time.sleep(0.02)
    server = psutil.Process(int(said))
    harness.terminate()
    assert harness.wait(20) == 143
    assert not server.is_running()
