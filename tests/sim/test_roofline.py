"""Rooflines follow the arithmetic."""

from __future__ import annotations

import dataclasses

import pytest

from jserve.config import CacheOptions
from jserve.errors import ConfigError
from jserve.model.arch import Arch, resized
from jserve.sim.roofline import CHIPS, Roofline
from tests.sim.models import EIGHT_B


def line(tp: int = 1, arch: Arch = EIGHT_B) -> Roofline:
    return Roofline(arch=arch, itemsize=2, chip=CHIPS["h200"], kv_itemsize=2, tp=tp)


def test_8b_on_an_h200() -> None:
    """Against figures computed independently: 15.0 GB of weights and 128 KiB of KV a token are read
    at 4.3 TB/s, and 4096 prompt tokens take 78.9 ms at 780 TFLOP/s."""
    one = line()

    def limit(d: int, p: int, c: int) -> float:
        return (one.seconds(d, p, c) - one.chip.step_s) * one.chip.reached

    assert one.body + 2 * one.unembed == pytest.approx(8.03e9, rel=0.001)
    assert limit(1, 0, 512) == pytest.approx(3.51e-3, rel=0.01)
    assert limit(128, 0, 2048) == pytest.approx(11.49e-3, rel=0.01)
    assert limit(0, 4096, 2048) == pytest.approx(78.9e-3, rel=0.03)


def test_pages_on_an_h200() -> None:
    one = line()
    # 85 % of what is taken of 139.8 GiB, less 16.06 GB, in pages of 4 MiB.
    assert one.n_pages(CacheOptions()) == int((139.8 * 2**30 * 0.95 * 0.85 - 16.06e9) // 2**22)
    assert one.n_pages(CacheOptions(kv_memory_gb=1.0)) == 2**30 // (32 * 131072)
    with pytest.raises(ConfigError, match="no room"):
        one.n_pages(CacheOptions(memory_utilization=0.1))
    cpu = dataclasses.replace(one, chip=CHIPS["cpu"])
    assert cpu.n_pages(CacheOptions(n_pages=9)) == 9
    with pytest.raises(ConfigError, match="set n_pages"):
        cpu.n_pages(CacheOptions())


def test_devices_share_the_work_and_pay_for_their_links() -> None:
    step = {"rows": 64, "tokens": 64, "drawn": 64, "n_context": 2048}
    one, eight = line(1).work(**step), line(8).work(**step)
    for name in ("weight_bytes", "kv_bytes", "flops"):
        assert getattr(eight, name) == pytest.approx(getattr(one, name) / 8)
    assert (one.n_collectives, one.link_bytes) == (0, 0)
    assert eight.n_collectives == 66
    assert line(8).links(eight) > 66 * CHIPS["h200"].link_s
    assert line(1).links(one) == 0


def test_kv_heads_are_kept_twice_by_twice_as_many_devices() -> None:
    step = {"rows": 8, "tokens": 8, "drawn": 8, "n_context": 100}
    assert line(16).work(**step).kv_bytes == line(8).work(**step).kv_bytes


def test_the_slower_of_two_decides() -> None:
    few = line().work(rows=1, tokens=1, drawn=1, n_context=0)
    many = line().work(rows=1, tokens=8192, drawn=1, n_context=0)
    assert not line().is_compute_bound(few)
    assert line().is_compute_bound(many)
    assert line().limit(few) == pytest.approx((few.weight_bytes + few.kv_bytes) / 4.3e12)
    assert line().limit(many) == pytest.approx(many.flops / 780e12)


def test_a_tied_embedding_is_stored_once_and_read_once() -> None:
    tied = dataclasses.replace(EIGHT_B, tied=True)
    step = {"rows": 1, "tokens": 1, "drawn": 1, "n_context": 0}
    assert line(arch=tied).work(**step).weight_bytes == line().work(**step).weight_bytes
    assert line(arch=tied).n_pages(CacheOptions()) > line().n_pages(CacheOptions())


def test_a_window_bounds_what_a_row_reads() -> None:
    windowed = resized(EIGHT_B, windows=(4096,) * EIGHT_B.L)
    long, short = ({"rows": 4, "tokens": 4, "drawn": 4, "n_context": n} for n in (8192, 4096))
    assert line(arch=windowed).work(**long) == line().work(**short)
