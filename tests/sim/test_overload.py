"""Ten times what the server can do: lane interactive keeps its goodput, and soon all is well again."""

import pytest

from jserve.config import EngineConfig
from jserve.sim import report, traffic
from jserve.sim.costs import Device
from jserve.sim.report import Slo
from jserve.sim.simulate import Run, Setup, simulate

CALM_S, FLOOD_S, AFTER_S = 8.0, 8.0, 14.0
SHARES = {"interactive": 0.3, "standard": 0.4, "bulk": 0.3}
SLO = Slo(ttft_ms=1000.0, tpot_ms=300.0)


class Slow:
    """About 12 requests of 100 and 20 tokens a second."""

    def seconds(self, n_decode: int, n_prefill: int, n_context: int) -> float:
        return 0.02 + 0.0005 * n_decode + 0.0004 * n_prefill


def setup(**options) -> Setup:
    options |= {"max_num_seqs": 16, "max_num_batched_tokens": 512}
    device = Device(name="slow", costs=Slow(), n_pages=400, max_model_len=1024)
    return Setup(config=EngineConfig.of(**options), device=device)


def source(lane: str, rate: float, start: float, seconds: float) -> str:
    deadlines = ",ttft_ms=1000,tpot_ms=300" if lane == "interactive" else ""
    return (
        f"lane={lane},rate={rate},start={start},seconds={seconds},prompt=100,prompt_sigma=0.3,"
        f"output=20,output_sigma=0.3{deadlines}"
    )


def capacity() -> float:
    """Requests per second when there is always one more."""
    items = traffic.generate(traffic.parse(source("standard", 1000.0, 0, 0.15)), 1)
    run = simulate(items, setup(max_queue_s=0.0))
    return len(items) / run.seconds


def flooded(times: float, seed: int) -> tuple[Run, int]:
    cap = capacity()
    phases = [(0.0, CALM_S, 0.9), (CALM_S, FLOOD_S, times), (CALM_S + FLOOD_S, AFTER_S, 0.9)]
    text = ";".join(
        source(lane, load * cap * share, start, seconds)
        for start, seconds, load in phases
        for lane, share in SHARES.items()
    )
    items = traffic.generate(traffic.parse(text), seed)
    return simulate(items, setup(max_queue_s=1.0)), len(items)


def good_per_s(run: Run, start: float, seconds: float) -> float:
    mine = [d for d in run.records.done if d.lane == "interactive"]
    return sum(SLO.kept(d) for d in mine if start <= d.at < start + seconds) / seconds


@pytest.mark.parametrize("seed", [1, 2])
def test_ten_times_the_load_costs_interactive_a_fifth_at_most(seed: int) -> None:
    run, n = flooded(10.0, seed)
    assert len(run.records.done) == n, "nobody goes without an answer"
    assert not run.records.open
    calm, flood = good_per_s(run, 0.0, CALM_S), good_per_s(run, CALM_S, FLOOD_S)
    assert calm > 2, "the calm is not all misses"
    assert flood >= 0.8 * calm
    interactive = [d for d in run.records.done if d.lane == "interactive"]
    assert report.recovery_s(interactive, SLO, CALM_S + FLOOD_S) <= 10.0
    everyone = report.recovery_s(run.records.done, SLO, CALM_S + FLOOD_S)
    assert everyone <= 10.0
    codes = {d.error for d in run.records.done if d.error}
    assert codes <= {"overloaded", "deadline_unreachable", "deadline_exceeded"}
