"""Who is suspected, put out and tried again: what never happens, and the way of one slow replica."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from jserve.fleet.suspicion import (
    MAX_REST_S,
    PROBES,
    REST_S,
    SUSPECT,
    WINDOW_S,
    WINDOWS,
    RetryBudget,
    Suspicion,
    n_may_be_out,
)

NAMES = ["a", "b", "c", "d", "e", "f", "g"]


def fleet(n: int) -> Suspicion:
    made = Suspicion()
    for name in NAMES[:n]:
        made.join(name)
    made.look(0.0)  # opens the first window
    return made


def window(made: Suspicion, now: float, **ratios: float) -> list[str]:
    """One window in which replicas have these ratios, others 1; who is put out."""
    for name in made.records:
        made.observe(name, ratios.get(name, 1.0))
    return made.look(now)


def test_one_that_is_slow_for_three_windows_is_out():
    made = fleet(3)
    assert [window(made, k * WINDOW_S, b=4.0) for k in (1, 2, 3)] == [[], [], ["b"]]
    assert made.records["b"].out
    assert made.n_ejected == 1


def test_one_good_window_between_and_it_stays():
    made = fleet(3)
    for k in range(1, 9):
        assert window(made, k * WINDOW_S, b=1.0 if k % WINDOWS == 0 else 4.0) == []


def test_a_window_is_judged_once_it_is_over():
    made = fleet(2)
    made.observe("a", 1.0)
    made.observe("b", 2.0)
    made.look(WINDOW_S / 2)
    assert made.records["b"].factor == 1.0
    made.look(WINDOW_S)
    assert made.records["b"].factor == 2.0


@pytest.mark.parametrize(("ratio", "factor"), [(1.0, 1.0), (1.4, 1.0), (1.6, 1.6), (2.9, 2.9)])
def test_from_one_and_a_half_its_price_grows_with_it(ratio, factor):
    made = fleet(3)
    window(made, WINDOW_S, b=ratio)
    assert made.records["b"].factor == factor


def test_where_all_are_slow_none_is():
    made = fleet(3)
    for k in range(1, 6):
        assert window(made, k * WINDOW_S, a=5.0, b=5.0, c=5.0) == []
    assert {record.factor for record in made.records.values()} == {1.0}


def test_of_two_the_slower_one_goes_and_the_last_one_never():
    made = fleet(2)
    for k in range(1, 4):
        put_out = window(made, k * WINDOW_S, b=4.0)
    assert put_out == ["b"]
    for k in range(4, 9):
        assert window(made, k * WINDOW_S, a=9.0) == []
    assert not made.records["a"].out


def test_the_way_back():
    made = fleet(3)
    now = 0.0
    for k in range(1, 4):
        window(made, now := k * WINDOW_S, b=4.0)
    assert made.due(now + REST_S - 0.1) == []
    now += REST_S
    for k in range(PROBES):
        assert made.due(now) == ["b"]
        made.probe("b", f"probe-{k}")
        assert made.due(now) == [], "one request at a time"
        made.probed("b", "another", 9.0, now)  # not the one that it is tried with
        made.probed("b", f"probe-{k}", 1.1, now)
    assert not made.records["b"].out
    assert made.due(now) == []


def test_a_bad_probe_doubles_the_rest_and_one_that_nobody_saw_end_is_none():
    made = fleet(3)
    for k in range(1, 4):
        window(made, k * WINDOW_S, b=4.0)
    now = WINDOWS * WINDOW_S
    rest_s = REST_S
    for _ in range(6):
        now += rest_s
        assert made.due(now - 0.01) == []
        made.probe("b", "p")
        made.release("b", "another")
        assert made.due(now) == []
        made.release("b", "p")
        assert made.due(now) == ["b"]
        made.probe("b", "q")
        made.probed("b", "q", SUSPECT, now)
        rest_s = min(2 * rest_s, MAX_REST_S)
    assert made.records["b"].out


def test_a_probe_is_measured_against_the_fleet():
    """Where first tokens take twice their prices everywhere, one that does so too is trusted again."""
    made = fleet(3)
    for k in range(1, 4):
        window(made, now := k * WINDOW_S, a=2.0, b=8.0, c=2.0)
    assert made.due(now + REST_S) == ["b"]
    for k in range(PROBES):
        made.probe("b", f"probe-{k}")
        made.probed("b", f"probe-{k}", 2.5, now + REST_S)
    assert not made.records["b"].out


def test_all_that_have_rested_are_due():
    made = fleet(7)
    for k in range(1, 4):
        window(made, now := k * WINDOW_S, b=4.0, c=5.0)
    assert made.due(now + REST_S) == ["b", "c"]
    made.probe("b", "p")
    assert made.due(now + REST_S) == ["c"]


def test_one_that_left_is_forgotten():
    made = fleet(2)
    made.leave("b")
    made.observe("b", 9.0)
    made.probed("b", "p", 1.0, 0.0)
    assert set(made.records) == {"a"}


@given(
    st.integers(2, 7),
    st.lists(st.lists(st.floats(0.5, 9.0), min_size=7, max_size=7), min_size=1, max_size=9),
)
def test_never_more_than_a_third_is_out(n, windows):
    made = fleet(n)
    for k, ratios in enumerate(windows, 1):
        window(made, k * WINDOW_S, **dict(zip(NAMES, ratios, strict=False)))
        assert sum(record.out for record in made.records.values()) <= n_may_be_out(n)
        assert all(record.factor >= 1.0 for record in made.records.values())


@pytest.mark.parametrize(("n", "out"), [(1, 0), (2, 1), (3, 1), (5, 1), (6, 2), (64, 21)])
def test_how_many_may_be_out(n, out):
    assert n_may_be_out(n) == out


def test_a_part_of_what_ends_well_may_be_moved():
    budget = RetryBudget(share=0.125, most=3.0)
    assert [budget.spend(2), budget.spend(2), budget.spend(2)] == [2, 1, 0]
    for _ in range(7):
        budget.earned()
    assert budget.spend(1) == 0
    budget.earned()
    assert budget.spend(1) == 1
    for _ in range(1000):
        budget.earned()
    assert budget.spend(99) == 3, "it is not saved up"
