"""The host's memory as the pool's budget sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jserve.runner import memory
from jserve.runner.memory import GIB, DeviceMemory

psutil = pytest.importorskip("psutil", reason="the oracle")


def test_it_is_what_psutil_counts() -> None:
    found, counted = DeviceMemory.of_host(), psutil.virtual_memory()
    assert found.is_host
    assert found.total == counted.total
    assert found.total - found.taken == pytest.approx(counted.available, abs=GIB)


def test_a_system_that_does_not_count_what_is_available(monkeypatch) -> None:
    monkeypatch.setattr(memory, "MEMINFO", Path("/nowhere/meminfo"))
    found = DeviceMemory.of_host()
    assert found.taken == 0
    assert found.total == pytest.approx(psutil.virtual_memory().total, rel=0.1)
    assert found.room(0.9, 0) <= found.total // 4


@pytest.mark.parametrize("n_pages", [1, 9, 127, 129, 1_000, 12_503, 24_575, 199_999])
def test_a_pool_on_a_device_gives_away_a_sixtieth_at_most(n_pages: int) -> None:
    """And stays as it is where a few pages more or less are free."""
    kept = memory._steady(n_pages, is_host=False)
    assert 0 <= n_pages - kept <= n_pages / 64
    assert memory._steady(kept + n_pages // 200, is_host=False) == kept
    assert n_pages - memory._steady(n_pages, is_host=True) <= n_pages / 8
