"""Prices: tables choose as the runner does."""

from pathlib import Path

import msgspec
import pytest

from jserve.config import CacheOptions
from jserve.errors import ConfigError
from jserve.kv_layout import Reach, Span
from jserve.ports import StepTime
from jserve.sim import costs
from jserve.sim.costs import StepTimeTable, TableFile
from jserve.sizing.models import simulated
from tests.sim.models import MODEL


def step(d: int, p: int, c: int, s: float) -> StepTime:
    return StepTime(n_decode=d, n_prefill=p, n_context=c, seconds=s)


STEPS = (
    step(2, 0, 10, 1.0),
    step(2, 0, 110, 2.0),
    step(8, 0, 10, 3.0),
    step(8, 32, 10, 5.0),
    step(2, 128, 10, 9.0),
    step(8, 128, 10, 11.0),
)


@pytest.mark.parametrize(
    ("d", "p", "c", "seconds"),
    [
        (1, 0, 0, 1.0),
        (2, 0, 60, 1.5),
        (2, 0, 210, 3.0),
        (3, 0, 60, 3.0),
        (0, 1, 10, 5.0),
        (2, 33, 10, 9.0),
        (8, 128, 10, 11.0),
    ],
)
def test_a_step_takes_the_cheapest_bucket_that_holds_it(d, p, c, seconds) -> None:
    assert StepTimeTable(STEPS).seconds(d, p, c) == pytest.approx(seconds)


def test_a_step_outside_the_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="9 decode rows"):
        StepTimeTable(STEPS).seconds(9, 0, 0)
    with pytest.raises(ConfigError, match="makes no sense"):
        StepTimeTable([step(1, 0, 0, 0.0)])
    with pytest.raises(ConfigError, match="no steps"):
        StepTimeTable([])


def test_the_choice_of_a_bucket_is_the_runners() -> None:
    from jserve.runner import sizes
    from jserve.runner.buckets import Ladder, Needs

    ladder = Ladder.of(max_decode_rows=16, max_prefill_tokens=256, max_prefill_rows=8, scores=False)
    table = StepTimeTable([step(b.D, b.P, 0, 1.0 + i) for i, b in enumerate(ladder.buckets)])
    for d in range(17):
        for p in (0, 1, 31, 33, 100, 129, 256):
            if d + p:
                chosen = ladder.choose(Needs(D=d, P=p, F=min(1, p)))
                assert table.seconds(d, p, 0) == 1.0 + ladder.buckets.index(chosen), (d, p)
    assert costs.MAX_PREFILL_ROWS == sizes.MAX_PREFILL_ROWS


def write_table(path: Path, **changes) -> Path:
    base = {
        "format": costs.FORMAT,
        "about": {"model": "m"},
        "host_seconds": 0.001,
        "n_slots": 8,
        "n_pages": 101,
        "page_size": 32,
        "max_model_len": 512,
        "steps": STEPS,
    }
    path.write_bytes(msgspec.json.encode(TableFile(**(base | changes))))
    return path


def test_moves_cost_what_the_table_or_the_user_says(tmp_path: Path) -> None:
    old = costs.from_table(write_table(tmp_path / "old.json"), CacheOptions())
    with pytest.raises(ConfigError, match="does not say") as caught:
        old.n_host_pages(1.0)
    assert caught.value.field == "host_memory_gb"
    assert old.n_host_pages(0.0) == 0
    half = write_table(tmp_path / "half.json", page_bytes=1 << 20)
    with pytest.raises(ConfigError, match="copy_gb_s"):
        costs.from_table(half, CacheOptions()).n_host_pages(1.0)
    stated = costs.from_table(half, CacheOptions()).copying(1e9)
    assert (stated.n_host_pages(1.0), stated.move_s) == (1024, pytest.approx((1 << 20) / 1e9))
    whole = write_table(tmp_path / "whole.json", page_bytes=1 << 20, page_move_s=1e-3)
    twice = costs.from_table(whole, CacheOptions(page_size=64))
    assert (twice.page_bytes, twice.move_s, twice.n_host_pages(1.0)) == (1 << 21, 2e-3, 512)


def test_a_table_file_is_a_device(tmp_path: Path) -> None:
    path = write_table(tmp_path / "steps.json")
    device = costs.from_table(path, CacheOptions())
    assert (device.name, device.n_pages, device.max_model_len) == ("m", 101, 512)
    assert device.costs.seconds(8, 0, 10) == 3.0
    assert costs.from_table(path, CacheOptions(page_size=64)).n_pages == 51
    assert costs.from_table(path, CacheOptions(n_pages=7)).n_pages == 7
    with pytest.raises(ConfigError, match="kv_memory_gb has no meaning"):
        costs.from_table(path, CacheOptions(kv_memory_gb=1.0))
    with pytest.raises(ConfigError, match="format"):
        costs.from_table(write_table(path, format="x"), CacheOptions())
    path.write_text("{}")
    with pytest.raises(ConfigError, match="steps"):
        costs.from_table(path, CacheOptions())


def test_groups_of_layers_follow_the_model(tmp_path: Path) -> None:
    groups = (Reach(Span(), 1), Reach(Span(128), 1))
    path = write_table(tmp_path / "groups.json", reaches=groups)
    assert costs.from_table(path, CacheOptions()).reaches == groups
    moved = write_table(path, reaches=groups, page_bytes=1 << 20, page_move_s=1e-3)
    assert costs.from_table(moved, CacheOptions(host_memory_gb=1.0)).n_host_pages(1.0) == 1024
    model = simulated("gpt-oss-20b")
    with_groups = costs.from_roofline(model, "h200", CacheOptions())
    without = costs.from_roofline(model, "h200", CacheOptions(kv_groups="off"))
    assert (with_groups.reaches, without.reaches) == (groups, ())
    assert without.page_bytes == 2 * with_groups.page_bytes
    assert with_groups.n_pages // 2 == without.n_pages
    tiered = costs.from_roofline(model, "h200", CacheOptions(host_memory_gb=1.0))
    assert tiered.reaches == groups
    assert tiered.n_host_pages(1.0) == 2**30 // with_groups.page_bytes


def test_the_roofline_of_a_model() -> None:
    device = costs.from_roofline(MODEL, "h200", CacheOptions(n_pages=9))
    assert (device.n_pages, device.max_model_len) == (9, 131072)
    assert device.name == "8b on one NVIDIA H200 (roofline)"
    with pytest.raises(ConfigError, match="v100"):
        costs.from_roofline(MODEL, "v100", CacheOptions())


def test_the_ladder_covers_every_step() -> None:
    table = StepTimeTable(
        costs.ladder(StepTimeTable([step(64, 512, 0, 1.0)]), rows=48, tokens=500, context=99)
    )
    assert table.seconds(48, 500, 99) == 1.0
    assert table.seconds(1, 0, 0) == 1.0
