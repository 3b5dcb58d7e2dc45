"""``jserve simulate`` as a user meets it: tables, JSON, sweeps, plots, replays, refusals."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jserve import cli
from jserve.commands import simulate_options
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.sim import plot, study
from jserve.sim.study import SimulateOptions
from tests.sim.models import MODEL

TRAFFIC = "rate=40,n=30,prompt=60,output=8;lane=bulk,rate=10,n=6,prompt=90,output=9"
run = CliRunner()


def simulate(*line: str) -> str:
    result = run.invoke(cli.app, ["simulate", *line], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_run_prints_a_table_or_json(tmp_path: Path) -> None:
    saved = tmp_path / "t.jsonl"
    text = simulate(TRAFFIC, "--max-num-seqs", "8", "--save-trace", str(saved))
    for word in ("llama-3.1-8b on one NVIDIA H200", "bulk", "standard", "TTFT p50", "cache hits"):
        assert word in text
    [found] = json.loads(simulate(str(saved), "--max-num-seqs", "8", "--json"))
    assert found["lanes"]["all"]["requests"] == 36
    assert found["lanes"]["bulk"]["ended"] == 6


def test_a_sweep_gives_one_report_per_value() -> None:
    line = [TRAFFIC, "--sweep", "max-num-seqs=1,8", "--json", "--seed", "3"]
    one, eight = json.loads(simulate(*line))
    assert (one["setting"], eight["setting"]) == ({"max_num_seqs": "1"}, {"max_num_seqs": "8"})
    assert one["queue"]["running_max"] == 1
    assert one["lanes"]["all"]["ttft_ms"]["p99"] > 2 * eight["lanes"]["all"]["ttft_ms"]["p99"]
    loads = json.loads(simulate(TRAFFIC, "--sweep", "load=0.5,2", "--json"))
    assert loads[0]["seconds"] > 1.5 * loads[1]["seconds"]


def test_a_second_axis_gives_every_pair() -> None:
    wish = SimulateOptions(
        model=MODEL, trace="", sweep="load=1,2", against="batching=static,continuous"
    )
    points = study.settings(wish, EngineConfig())
    assert [(s.load, s.batching) for _, s in points] == [
        (1.0, "static"),
        (1.0, "continuous"),
        (2.0, "static"),
        (2.0, "continuous"),
    ]


def test_traffic_may_stand_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mix.traffic"
    path.write_text("# two kinds\nrate=4,n=3   # chat\n\nrate=1,n=2,lane=bulk\n")
    assert len(study.load_trace(str(path), 0)) == 5
    path.write_text("rats=4")
    with pytest.raises(ConfigError, match="did you mean"):
        study.load_trace(str(path), 0)


def test_cache_and_length_options_reach_the_device() -> None:
    config = EngineConfig.of(n_pages=77, page_size=16)
    [(_, setup)] = study.settings(SimulateOptions(model=MODEL, trace="", max_model_len=640), config)
    assert setup.device.n_pages == 77
    assert setup.config.model.max_model_len == 640
    points = study.settings(
        SimulateOptions(model=MODEL, trace="", sweep="n_pages=5,9"), EngineConfig()
    )
    assert [s.device.n_pages for _, s in points] == [5, 9]
    points = study.settings(
        SimulateOptions(model=MODEL, trace="", sweep="kv_cache_dtype=auto,float32"), EngineConfig()
    )
    assert points[0][1].device.n_pages == pytest.approx(2 * points[1][1].device.n_pages, abs=2)
    points = study.settings(
        SimulateOptions(model=MODEL, trace="", sweep="kv_cache_dtype=bf16,fp8"), EngineConfig()
    )
    assert points[1][1].device.n_pages == pytest.approx(2 * points[0][1].device.n_pages, abs=2)
    points = study.settings(
        SimulateOptions(model=MODEL, trace="", sweep="deadlines=kept,hidden"), EngineConfig()
    )
    assert [s.deadlines for _, s in points] == [True, False]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"trace": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"sweep": "port=1,2"}, "sweep"),
        ({"sweep": "journal=a,b"}, "sweep"),
        ({"against": "load=1,2"}, "needs a sweep"),
        ({"sweep": "max_num_seqs=-1"}, "at least 0"),
        ({"sweep": "load=fast"}, "load must be a number"),
        ({"sweep": "batching=dynamic"}, "batching must be one of"),
        ({"sweep": "deadlines=maybe"}, "kept or hidden"),
        ({"load": 0.0}, "load must be above 0"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas must be 0 or in"),
        ({"max_replicas": 2, "start_s": -1.0}, "start_s must not be negative"),
        ({"copy_gb_s": -1.0}, "copy_gb_s"),
        ({"sweep": "disk_dir=/tmp"}, "disk tier is not simulated"),
        ({"gpu": "abacus"}, "no roofline for"),
        ({"plot": Path("x.png")}, "must end in .svg"),
    ],
)
def test_a_senseless_wish_is_refused_by_name(changes, word) -> None:
    wish = dataclasses.replace(SimulateOptions(model=MODEL, trace="n=1"), **changes)
    with pytest.raises(ConfigError, match=word):
        study.study(wish, EngineConfig(), lambda _: None)


CONFIG = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "sliding_window": None,
    "torch_dtype": "float32",
}


def refused(*line: str) -> str:
    result = run.invoke(cli.app, ["simulate", *line], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    return result.output


def test_a_model_is_read_as_the_engine_reads_it(tmp_path: Path) -> None:
    """The window, the type and the refusals are those of its family."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    found = simulate_options(
        EngineConfig(), {"roofline": str(tmp_path), "costs": None, "trace": ""}
    )
    assert found.model is not None
    assert (found.model.name, found.model.itemsize) == (str(tmp_path), 4)
    arch = found.model.arch
    assert (arch.family, arch.L, arch.D, arch.F) == ("mistral", 2, 64, 128)
    assert (arch.N, arch.K, arch.H, arch.V) == (4, 2, 16, 256)
    assert not any(layer.window for layer in arch.kv_layers)
    path.write_text(json.dumps(CONFIG | {"hidden_size": "64"}))
    assert "hidden_size" in refused("n=1", "--roofline", str(path))
    path.write_text(json.dumps(CONFIG | {"architectures": ["Other"]}))
    assert "architectures" in refused("n=1", "--roofline", str(path))
    assert "nowhere" in refused("n=1", "--roofline", str(tmp_path / "nowhere"))
    assert "not both" in refused("n=1", "--roofline", str(path), "--costs", "a")


MIXED = (
    "lane=bulk,rate=20,n=20,prompt=2048,output=120;"
    "lane=interactive,rate=20,n=30,prompt=256,output=32"
)


def test_swaps_are_decided_by_what_moves_cost() -> None:
    """Bulk gives way to lane interactive; a fast copy is worth it, a slow one is not."""
    line = [MIXED, "--max-num-seqs", "8", "--n-pages", "500", "--no-prefix-caching", "--json"]
    line += ["--host-memory-gb", "2", "--max-queue-s", "0", "--sweep"]
    found = json.loads(
        simulate(*line, "preemption=recompute,swap,auto", "--against", "copy_gb_s=1,50")
    )
    by = {(r["setting"]["preemption"], r["setting"]["copy_gb_s"]): r for r in found}
    assert all(r["preemptions"] > 0 for r in found)
    assert all(r["lanes"]["all"]["ended"] == 50 for r in found)
    swaps = {key: r["host"]["swaps_out"] for key, r in by.items()}
    assert swaps["recompute", "1"] == swaps["recompute", "50"] == swaps["auto", "1"] == 0
    assert swaps["swap", "1"] > 0
    assert swaps["auto", "50"] > 0
    assert by["swap", "1"]["host"]["moves_s"] > 10 * by["swap", "50"]["host"]["moves_s"] > 0
    assert by["swap", "1"]["seconds"] > by["swap", "50"]["seconds"], "moves take the device's time"
    again = by["recompute", "50"]["computed_tokens"]
    assert by["swap", "50"]["computed_tokens"] < again, "what came back is not computed again"
    assert by["recompute", "50"]["host"]["moves_s"] == 0


def test_pages_of_host_memory_are_hits_at_a_price() -> None:
    """A prefix that was evicted comes back from the host; without one it is computed again."""
    traffic = "rate=2,n=30,prompt=64,output=4,prefixes=6,prefix=512"
    line = [traffic, "--n-pages", "80", "--max-num-seqs", "4", "--json", "--sweep"]
    without, small, large = json.loads(simulate(*line, "host_memory_gb=0,0.05,1"))
    assert without["host"] == {}
    assert small["host"]["pages"] < large["host"]["pages"]
    assert large["host"]["loaded_pages"] > small["host"]["loaded_pages"]
    assert large["cache"]["hit_tokens"] > without["cache"]["hit_tokens"]
    assert large["computed_tokens"] < without["computed_tokens"]
    n_moves = large["host"]["loaded_pages"] + large["host"]["saved_pages"]
    page = 2 * 2 * 32 * 8 * 128 * 32  # bytes of 32 tokens of keys and values in bf16
    assert large["host"]["moves_s"] == pytest.approx(n_moves * page / 50e9, rel=0.05, abs=1e-4)


def test_a_journal_is_written_replayed_and_simulated(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    options = ["--max-num-seqs", "4", "--n-pages", "60", "--max-model-len", "512"]
    simulate(TRAFFIC, *options, "--journal", str(path))
    assert "36 requests" in simulate(str(path), *options, "--verify")
    assert "every decision" in simulate(str(path), *options, "--verify")
    [found] = json.loads(simulate(str(path), *options, "--json"))
    assert found["lanes"]["all"]["requests"] == 36
    other = run.invoke(cli.app, ["simulate", str(path), "--max-num-seqs", "3", "--verify"])
    assert other.exit_code == 1
    assert "the journal has" in other.output
    refused = run.invoke(cli.app, ["simulate", "n=1", "--verify"])
    assert refused.exit_code == 2


@pytest.mark.slow
def test_plots_are_small_svg_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = []
    for name, more in (
        ("run", []),
        ("again", []),
        ("lanes", ["--sweep", "max_prefill_chunk=32,64"]),
        ("lines", ["--sweep", "load=1,2", "--against", "batching=static,continuous"]),
    ):
        path = tmp_path / f"{name}.svg"
        simulate("rate=40,n=9,prompt=60,output=8;lane=bulk,n=4", "--plot", str(path), *more)
        drawn.append(path.read_text())
    assert all("<svg" in text and len(text) < 100_000 for text in drawn)
    assert drawn[0] == drawn[1], "the same run draws the same file"
    assert "static TTFT p99" in drawn[3]


def test_without_matplotlib_a_plot_is_refused_before_the_run(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"jserve\[plot\]"):
        plot.check(tmp_path / "x.svg")
    refused = run.invoke(cli.app, ["simulate", "n=1", "--plot", str(tmp_path / "x.svg")])
    assert refused.exit_code == 2
    assert "'jserve[plot]'" in refused.output, "brackets are no markup"
