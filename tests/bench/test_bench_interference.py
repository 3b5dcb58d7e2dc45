"""Interference: which gaps count as disturbed, what a setting is judged by, a whole run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import interference
from bench.engines import Engine, Running
from bench.stats import Trace

FAKE = str(Path(__file__).with_name("fake_server.py"))


def trace(text: list[float], *, late: bool = False, sent: float = 0.0) -> Trace:
    return Trace(
        sent=sent, ended=text[-1], text=text, wanted=len(text), usage=len(text), finish="length", late=late
    )  # fmt: skip


def test_a_gap_is_disturbed_when_it_overlaps_a_long_prompts_wait() -> None:
    decoder = trace([1.0, 2.0, 3.0, 5.0, 6.0, 7.5, 8.0])
    first = trace([4.5, 4.6], late=True, sent=3.5)
    second = trace([7.0, 7.1], late=True, sent=6.5)
    assert interference.disturbed([decoder, first, second]) == [2.0, 1.5]


def test_figures_compare_the_p99_with_the_median_alone() -> None:
    alone = [trace([0.1 * i for i in range(11)])]
    mixed = [trace([0.0, 0.1, 0.5, 0.6]), trace([0.55], late=True, sent=0.15)]
    found = interference.figures(alone, mixed)
    assert found["undisturbed_ms"]["p50"] == pytest.approx(100)
    assert found["disturbed_ms"]["max"] == pytest.approx(400)
    assert found["p99_over_median"] == pytest.approx(3.97, abs=0.01)
    assert found["long_ttft_ms"]["p50"] == pytest.approx(400)
    broken = trace([0.1], late=True)
    broken.error = "boom"
    assert interference.figures(alone, [mixed[0], broken])["first_errors"] == ["boom"]


def test_the_workload_sends_long_prompts_one_after_another() -> None:
    load = interference.workload(3, 0, long_tokens=100)
    late = [i for i in load.items if i.after_tokens]
    assert [len(i.prompt) for i in late] == [100] * 3
    assert [i.after_tokens for i in late] == [16, 64, 112]
    most = min(i.max_tokens for i in load.items if not i.after_tokens)
    assert most > max(i.after_tokens for i in late), "the decoders outlast the last arrival"
    alone = interference.workload(0, 0)
    assert {i.prompt for i in load.items}.isdisjoint({i.prompt for i in alone.items})


def test_settings_differ_in_what_they_are_about() -> None:
    whole, chunked, bounded = (interference.arguments(s, 31.5, 4096) for s in interference.SETTINGS)
    assert "--max-num-batched-tokens 4104" in whole
    assert "itl" not in whole + chunked
    assert bounded == f"{chunked} --itl-bound-ms 31.500"
    done = [{"setting": "chunked", "errors": 0, "undisturbed_ms": {"p50": 12.0}}]
    assert interference._bound(done) == 24.0
    assert interference._bound([]) == 0.0


def test_a_whole_run_against_a_running_server(tmp_path: Path, capsys) -> None:
    engine = Engine(
        name="fake", argv=(sys.executable, FAKE, "{port}", "--step-s", "0.003"), model="good"
    )
    out = tmp_path / "r" / "x.json"
    with Running(engine, tmp_path) as server:
        server.wait_ready(60)
        line = ["--url", server.url, "--served-model", "good", "--prompts", "2", "--long", "1200"]
        assert interference.main([*line, "--json", str(out)]) == 0
        assert interference.main(["--url", server.url, "--served-model", "refuses"]) == 1
    [one] = json.loads(out.read_text())["settings"]
    assert one["errors"] == 0
    assert one["disturbed_ms"]["p99"] >= one["disturbed_ms"]["p50"] > 0
    assert "p99 / alone p50" in capsys.readouterr().out


def test_a_server_that_the_run_starts_has_its_load_counted(tmp_path: Path, monkeypatch) -> None:
    """Cores of its process, which are then not foreign."""
    engine = Engine(name="fake", argv=(sys.executable, FAKE, "{port}"), model="good")
    monkeypatch.setattr(interference, "build", lambda name, paths: engine)
    line = [str(tmp_path), "--prompts", "2", "--long", "1200", "--ready-timeout", "60"]
    args = interference.parser().parse_args(line)
    found = interference.serve("whole", args, tmp_path, 0.0)
    assert found["errors"] == 0
    assert found["cpu"]["server_cores"] > 0


@pytest.mark.parametrize("line", [[], ["--url", "x", "--prompts", "0"]])
def test_bad_usage_is_exit_code_2(line: list[str]) -> None:
    with pytest.raises(SystemExit) as e:
        interference.main(line)
    assert e.value.code == 2
