"""Bounds of a search: certain, and no later than they have to be."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from jserve.sim.records import Record
from jserve.sim.report import Slo
from jserve.sim.study import load_trace
from jserve.sizing.bounds import Bounds, serves, too_slow

ITEM = msgspec.structs.replace(
    load_trace("rate=1,n=1,prompt=8,output=11", 0)[0], outputs=(((2, 0, 11),),), max_tokens=None
)
SLO = Slo(ttft_ms=100.0, tpot_ms=10.0)


def record(number: int, *times: float) -> Record:
    """Of a request sent at 0 whose tokens came at these seconds."""
    item = msgspec.structs.replace(ITEM, id=f"r{number}")
    return Record(item, 0.0, [list(times)], 1)


@pytest.mark.parametrize("n", [50, 100, 200, 1000])
def test_it_ends_with_the_first_miss_that_is_too_many(n: int) -> None:
    bounds = Bounds(slo=SLO, n=n)
    allowed = max(k for k in range(n) if serves(n - k, n))
    for i in range(allowed):
        bounds.token(record(i, 0.2))
        bounds.token(record(i, 0.2, 0.21))  # the same one again
    assert not bounds.enough
    bounds.token(record(n, 0.2))
    assert bounds.enough
    assert f"{allowed + 1} requests missed" in bounds.why


def test_a_request_is_given_up_when_no_later_token_can_save_it() -> None:
    """Eleven tokens, and an end token, 10 ms each: 110 ms after the first, at most."""
    assert not SLO.missed(record(0, 0.1, 0.209))
    assert SLO.missed(record(0, 0.1, 0.211))
    assert SLO.missed(record(0, 0.101))
    assert not SLO.missed(record(0))


@pytest.mark.parametrize("n", [1, 2, 99, 100, 101, 200, 731])
def test_it_ends_with_the_first_token_that_makes_the_last_percent_late(n: int) -> None:
    """Against numpy, of what the percentile would be if all later ones came at once."""
    bounds, seconds = Bounds(slo=Slo(), n=n, latest_ms=50.0), np.zeros(n)
    for i in range(n):
        bounds.token(record(i, 0.06))
        seconds[i] = 0.06
        late = np.percentile(seconds, 99) > 0.05
        assert not bounds.enough or late, "too early"
        lowest = np.percentile(seconds, 99, method="lower") > 0.05
        assert bounds.enough == lowest
    in_time = Bounds(slo=Slo(), n=2, latest_ms=60.0)
    in_time.token(record(0, 0.06))
    in_time.token(record(1, 0.06))
    assert not in_time.enough


def test_a_step_that_takes_too_long_is_too_slow_for_those_whose_targets_it_exceeds() -> None:
    trace = [ITEM] * 200
    assert too_slow(0.009, trace, SLO) == ""
    assert "11.00 ms" in too_slow(0.011, trace, SLO)
    one = msgspec.structs.replace(ITEM, max_tokens=1)
    assert too_slow(0.011, [one] * 200, SLO) == "", "it has no later token"
    assert too_slow(0.2, [one] * 200, SLO)
    assert too_slow(0.011, [*[one] * 198, ITEM, ITEM], SLO) == ""
    assert too_slow(0.011, [*[one] * 197, ITEM, ITEM, ITEM], SLO)
