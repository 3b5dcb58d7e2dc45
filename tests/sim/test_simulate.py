"""The simulation: hand-computed times, nothing lost, figures of the report, overlap, gates, retries."""

import dataclasses
import math

import msgspec
import numpy as np
import pytest

from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.kv_layout import Reach, Span
from jserve.ports import StepTime
from jserve.sim import report, traffic
from jserve.sim.costs import Device, StepTimeTable
from jserve.sim.report import Slo, summarise
from jserve.sim.simulate import Run, Setup, simulate
from jserve.sim.trace import TraceItem


class Flat:
    """A tenth of a second for decoding, a hundredth per prompt token on top."""

    def seconds(self, n_decode: int, n_prefill: int, n_context: int) -> float:
        return 0.1 + 0.01 * n_prefill


def setup(**changes) -> Setup:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 8, "overlap": 0}
    options |= changes.pop("options", {})
    device = Device(
        name="flat",
        costs=Flat(),
        n_pages=changes.pop("n_pages", 200),
        max_model_len=512,
        host_s=changes.pop("host_s", 0.0),
    )
    return Setup(config=EngineConfig.of(**options), device=device, **changes)


def item(id: str, at: float, n_prompt: int, n_out: int, **more) -> TraceItem:
    stream = 10 * int(id)
    more.setdefault("max_tokens", n_out)
    return TraceItem(
        id=id, at=at, prompt=((stream, 0, n_prompt),), outputs=(((stream + 1, 0, n_out),),), **more
    )


def done(run: Run) -> dict[str, object]:
    return {d.id: d for d in run.records.done}


def test_one_request_by_hand() -> None:
    """10 prompt tokens take 0.2 s, then two more tokens 0.1 s each; sent at 5 s."""
    run = simulate([item("1", 5.0, 10, 3)], setup())
    [d] = run.records.done
    assert d.ttft == pytest.approx(0.2)
    assert d.tpot == pytest.approx(0.1)
    assert d.end == pytest.approx(5.4)
    assert (d.finish, d.n_output, run.n_steps, run.n_tokens) == ("length", 3, 3, 12)
    assert run.busy_s == pytest.approx(0.4)
    assert run.seconds == pytest.approx(0.4)


def test_an_answer_below_its_limit_ends_by_its_end_token() -> None:
    run = simulate([item("1", 0.0, 10, 3, max_tokens=9)], setup())
    [d] = run.records.done
    assert (d.finish, d.n_output) == ("stop", 3)


@pytest.mark.parametrize(("overlap", "end", "steps"), [(0, 0.49, 3), (1, 0.43, 4), (2, 0.43, 5)])
def test_overlap_hides_the_host_and_costs_the_rows_planned_too_early(overlap, end, steps) -> None:
    """Three tokens with 0.03 s of host a step. Alone each step waits for it; ahead only the first
    does, but the end token is seen one or two steps late, and their rows are dropped."""
    asked = item("1", 0.0, 10, 3, max_tokens=9)
    run = simulate([asked], setup(options={"overlap": overlap}, host_s=0.03))
    [d] = run.records.done
    assert d.n_output == 3
    assert run.n_steps == steps
    assert d.end == pytest.approx(end)


def test_a_later_turn_waits_for_the_answer_and_finds_it_in_the_cache() -> None:
    first = item("1", 0.0, 30, 11)
    second = TraceItem(
        id="2",
        at=2.0,
        after="1",
        prompt=((10, 0, 30), (11, 0, 10), (40, 0, 5)),
        outputs=(((41, 0, 2),),),
        max_tokens=2,
    )
    run = simulate([first, second], setup())
    end, later = done(run)["1"].end, done(run)["2"]
    assert later.at == pytest.approx(end + 2.0)
    assert later.n_cached == 40, "30 prompt and 10 answer tokens are 5 pages"
    assert later.ttft == pytest.approx(0.1 + 0.01 * 5)
    cache = summarise(run, Slo())["cache"]
    assert cache["hit_tokens"] == 40


def test_a_turn_after_a_refused_one_is_never_sent() -> None:
    items = [item("1", 0.0, 600, 3), item("2", 1.0, 4, 2, after="1")]
    run = simulate(items, setup())
    [d] = run.records.done
    assert (d.id, d.error, d.refused, d.ttft) == ("1", "context_length_exceeded", True, None)
    assert run.records.n_unsent == 1


def test_a_client_that_hangs_up_ends_its_request() -> None:
    run = simulate([item("1", 0.0, 10, 50, cancels=((0.45, None),))], setup())
    [d] = run.records.done
    assert d.finish == "abort"
    assert 0.45 <= d.end < 0.6
    assert not Slo().kept(d)


def test_static_batching_lets_nobody_in_before_all_are_done() -> None:
    items = [item("1", 0.0, 10, 20), item("2", 0.05, 10, 2), item("3", 0.3, 10, 2)]
    ends = {}
    for batching in ("continuous", "static"):
        run = simulate(items, setup(batching=batching))
        ends[batching] = {id: d.end for id, d in done(run).items()}
        assert done(run)["2"].at == 0.05
    assert ends["continuous"]["2"] < 1.0
    assert ends["static"]["1"] < ends["static"]["2"] == ends["static"]["3"]


def test_refused_clients_send_again_when_told_to() -> None:
    items = [item(str(i), 0.0, 8, 3) for i in range(1, 9)]
    full = {"max_num_seqs": 2, "max_waiting": 2}
    lost = summarise(simulate(items, setup(options=full)), Slo())["lanes"]["all"]
    assert lost["errors"].get("overloaded")
    assert lost["ended"] + sum(lost["errors"].values()) == 8, "nobody goes without an answer"
    again = summarise(simulate(items, setup(options=full, retries=9)), Slo())["lanes"]["all"]
    assert again["ended"] == 8
    assert again["retries"] >= 2


def test_deadlines_can_be_hidden_and_are_judged_all_the_same() -> None:
    """100 prompt tokens are two steps: 0.1 + 0.64 and 0.1 + 0.36 s."""
    late = item("1", 0.0, 100, 2, ttft_deadline_ms=1000.0)
    run = simulate([late], setup(deadlines=False))
    [d] = run.records.done
    assert d.ttft == pytest.approx(1.2)
    assert not Slo().kept(d)
    assert Slo().kept(msgspec.structs.replace(d, ttft_deadline=1.3))


def test_load_compresses_arrivals() -> None:
    run = simulate([item("1", 2.0, 4, 1), item("2", 8.0, 4, 1)], setup(load=4.0))
    assert {d.at for d in run.records.done} == {0.5, 2.0}


def test_jitter_is_seeded_and_keeps_the_mean() -> None:
    runs = [simulate([item("1", 0.0, 4, 400)], setup(jitter=0.3, seed=s)) for s in (1, 1, 2)]
    assert runs[0].busy_s == runs[1].busy_s != runs[2].busy_s
    assert runs[0].busy_s == pytest.approx(40 * math.exp(0.045), rel=0.1)


def test_choices_all_end_and_preemption_is_seen() -> None:
    twin = TraceItem(
        id="1",
        at=0.0,
        prompt=((1, 0, 9),),
        outputs=(((2, 0, 7),), ((3, 0, 4),)),
        max_tokens=20,
    )
    [d] = simulate([twin], setup()).records.done
    assert d.n_output == 11
    crowd = [item(str(i), 0.0, 20, 60) for i in range(1, 5)]
    run = simulate(crowd, setup(n_pages=22))
    assert run.stats.preemptions > 0
    assert sum(d.n_preempted for d in run.records.done) == run.stats.preemptions
    assert summarise(run, Slo())["lanes"]["all"]["preempted_share"] > 0


def busy() -> Run:
    items = traffic.generate(
        traffic.parse(
            "rate=3,n=60,prompt=30,output=6,lane=interactive,ttft_ms=1500;"
            "rate=2,n=40,prompt=40,output=9,lane=bulk,prefixes=2,prefix=24,turns=2,think=1"
        ),
        7,
    )
    return simulate(items, setup(options={"max_num_seqs": 8, "max_waiting": 6}))


def test_the_report_agrees_with_its_records() -> None:
    run = busy()
    found = summarise(run, Slo(ttft_ms=4000.0))
    lanes = found["lanes"]
    assert set(lanes) == {"all", "interactive", "bulk"}
    assert lanes["all"]["requests"] == lanes["interactive"]["requests"] + lanes["bulk"]["requests"]
    ttfts = [d.ttft for d in run.records.done if d.lane == "bulk" and d.ttft is not None]
    assert lanes["bulk"]["ttft_ms"]["p99"] == pytest.approx(
        1e3 * np.percentile(ttfts, 99), rel=1e-3
    )
    good = [
        d
        for d in run.records.done
        if d.error is None and d.ttft <= (1.5 if d.lane == "interactive" else 4.0)
    ]
    assert 0 < lanes["all"]["good_share"] < 1
    assert lanes["all"]["good_share"] == pytest.approx(len(good) / len(run.records.done), abs=1e-4)
    tokens = sum(d.n_output for d in run.records.done)
    assert lanes["all"]["output_tok_s"] == pytest.approx(tokens / run.seconds, rel=1e-3)
    assert found["queue"]["waiting_max"] > 0
    gaps = sum(len(g) for parts in run.records.gaps.values() for g in parts)
    assert gaps == sum(max(0, d.n_output - 1) for d in run.records.done)


def test_the_timeline_counts_everybody_once_and_recovery_is_the_last_miss() -> None:
    run, slo = busy(), Slo(ttft_ms=4000.0)
    bins = report.timeline(run.records.done, slo, 2.0)
    assert sum(b[1] for b in bins) == len(run.records.done)
    assert sum(b[2] for b in bins) == sum(map(slo.kept, run.records.done))
    missed = [d.at for d in run.records.done if not slo.kept(d)]
    assert report.recovery_s(run.records.done, slo, 1.0) == max(missed) - 1.0
    assert report.recovery_s(run.records.done, slo, max(missed) + 1) == 0.0


def test_the_tables_show_every_lane() -> None:
    found = summarise(busy(), Slo())
    text = report.tables([("a=1", found), ("a=2", found)], "title")
    for word in ("title", "a=1", "a=2", "interactive", "bulk", "cache hits"):
        assert word in text


def test_a_step_without_a_price_ends_the_simulation_by_name() -> None:
    table = StepTimeTable([StepTime(n_decode=2, n_prefill=8, n_context=1, seconds=0.1)])
    small = dataclasses.replace(
        setup(), device=Device(name="t", costs=table, n_pages=50, max_model_len=64)
    )
    with pytest.raises(ConfigError, match="no step of"):
        simulate([item("1", 0.0, 20, 2)], small)


def test_pages_of_groups_of_layers_come_back_from_host_memory() -> None:
    """Five texts in turn through a pool that holds two: with host memory only their first turns are computed."""
    reaches = (Reach(Span(), 1), Reach(Span(32), 2))
    device = dataclasses.replace(
        setup().device, n_pages=130, reaches=reaches, page_bytes=1 << 20, move_s=1e-4
    )
    trace = [
        TraceItem(
            id=str(i),
            at=30.0 * i,
            prompt=((i % 5, 0, 256),),
            outputs=(((9, i, 2),),),
            max_tokens=2,
        )
        for i in range(15)
    ]
    found = {}
    for gib in (0.0, 1.0):
        given = setup(options={"host_memory_gb": gib})
        found[gib] = simulate(trace, dataclasses.replace(given, device=device))
    assert found[0.0].n_tokens == 15 * 257
    assert found[1.0].n_tokens == 5 * 257 + 10 * (8 + 1)
    assert found[1.0].moved_s > 10 * 31 * 1e-4
