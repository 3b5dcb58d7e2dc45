"""The k table, its hysteresis and its probes."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from jserve.speculation.policy.acceptance import NEVER, Odds
from jserve.speculation.policy.ktable import (
    CHEAP,
    FIRST_HOLD,
    HOLD,
    MARGIN,
    PROBE_EVERY,
    PROBE_ROUNDS,
    PROBE_STEPS,
    REFRESH,
    Hysteresis,
    KTable,
    widths,
)

LONG = 1e6
KS = tuple(w - 1 for w in widths(15))


def test_widths_grow_by_halves_up_to_all_drafts():
    assert [widths(n) for n in (0, 1, 2, 3, 4, 7, 8, 15)] == [
        (1,),
        (1, 2),
        (1, 3),
        (1, 4),
        (1, 5),
        (1, 4, 8),
        (1, 4, 9),
        (1, 4, 8, 16),
    ]


def table(per_draft: float, min_speed: float = 0.98, depth=lambda n: n) -> KTable:
    """Where a step costs 1 and each draft of a row ``per_draft``."""
    return KTable(KS, depth, lambda rows, k, behind: 1.0 + per_draft * k * rows, min_speed)


def test_k_grows_with_acceptance_and_shrinks_with_cost_and_rows():
    cells = [table(0.05).k([Odds(a, 1.0)], LONG) for a in (0.1, 0.5, 0.8, 0.95, 1.0)]
    assert cells == sorted(cells)
    assert cells[0] < cells[-1] == 15
    by_cost = [table(cost).k([Odds(0.9, 1.0)], LONG) for cost in (0.0, 0.1, 0.3, 1.0)]
    assert by_cost == sorted(by_cost, reverse=True)
    assert by_cost[-1] == 0
    by_rows = [table(0.05).k([Odds(0.9, 1.0)] * n, LONG) for n in (1, 4, 16, 64)]
    assert by_rows == sorted(by_rows, reverse=True)
    assert by_rows[-1] == 0


def test_nothing_to_expect_is_no_draft():
    assert table(0.0).k([], LONG) == 0
    assert table(0.0).k([NEVER, NEVER], LONG) == 0
    assert table(0.1).k([Odds(0.0, 1.0)], LONG) == 0
    assert table(0.1).k([Odds(0.9, 0.0)], LONG) == 0


def test_where_drafts_cost_next_to_nothing_they_are_always_made():
    least = (CHEAP - 1.0) / 3
    assert CHEAP < MARGIN
    assert table(0.9 * least).k([Odds(0.0, 1.0)], LONG) == 3
    assert table(1.1 * least).k([Odds(0.0, 1.0)], LONG) == 0


def test_no_row_pays_for_others():
    rows = [Odds(0.99, 1.0), NEVER]
    assert table(0.05, min_speed=0.0).k(rows, LONG) > 0
    assert table(0.05).k(rows, LONG) == 0


def test_short_answers_get_few_drafts():
    sure = [Odds(1.0, 1.0)]
    found = [table(0.3, min_speed=0.0).k(sure, length) for length in (2, 20, 1000)]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_a_wait_for_the_host_is_part_of_the_time():
    made = KTable((0, 3), lambda n: n, lambda rows, k, behind: 1.0 + behind, 0.98)
    row = [Odds(0.3, 1.0)]
    assert made.k(row, LONG, (False, True)) == 0
    assert made.k(row, LONG, (True, True)) == 3


def test_of_a_tree_its_depth_counts():
    flat = table(0.1, depth=lambda n: min(n, 1))
    assert flat.k([Odds(0.95, 1.0)], LONG) == 3
    assert table(0.1).k([Odds(0.95, 1.0)], LONG) > 3


def test_cells_are_computed_anew_now_and_then():
    speed = {"draft": 20.0}
    made = KTable(KS, lambda n: n, lambda rows, k, behind: 1.0 + speed["draft"] * (k > 0), 0.98)
    row = [Odds(0.9, 1.0)]
    assert made.k(row, LONG) == 0
    speed["draft"] = 0.1
    for _ in range(REFRESH - 1):
        made.step()
        assert made.k(row, LONG) == 0, "a cell stays for a while"
    made.step()
    assert made.k(row, LONG) > 0


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6),
    st.tuples(*[st.floats(1.0, 4.0)] * 3),
)
def test_a_cell_never_loses_by_its_own_arithmetic(rows, times):
    seconds = dict(zip(KS, [1.0, *sorted(times)], strict=True))
    odds = [Odds(*row) for row in rows]
    k = KTable(KS, lambda n: n, lambda rows, k, behind: seconds[k], 0.98).k(odds, LONG)
    if k and seconds[k] >= CHEAP:
        mean = sum(o.expected(k) for o in odds) / len(odds)
        assert (1 + mean + 0.1 * k) / seconds[k] > 0.9, "bins may round up, by a tenth of a draft"


# --- hysteresis and probes


def test_drafting_does_not_end_or_begin_too_often():
    k = Hysteresis(probe=0)
    assert k.step(3) == 3, "the first is taken at once"
    assert [k.step(0) for _ in range(FIRST_HOLD)] == [3] * (FIRST_HOLD - 1) + [0], "it was a guess"
    assert [k.step(3) for _ in range(HOLD)] == [0] * (HOLD - 1) + [3]
    assert [k.step(7), k.step(3)] == [7, 3], "more or fewer drafts cost nothing to begin"
    assert [k.step(0) for _ in range(HOLD - 2)] == [3] * (HOLD - 3) + [0]


def test_behind_a_crowd_drafting_begins_anew():
    k = Hysteresis(probe=3)
    assert k.step(3) == 3
    k.end()
    assert k.k == 0
    assert [k.step(3) for _ in range(HOLD)] == [0] * (HOLD - 1) + [3]


def test_probes_are_rare_and_end_when_something_was_seen():
    k, drafted = Hysteresis(probe=3), []
    for _ in range(20 * PROBE_EVERY):
        drafted.append(k.step(0))
        if drafted[-2:] == [3, 3]:
            k.seen()
    n = sum(x > 0 for x in drafted)
    assert set(drafted) == {0, 3}
    assert 15 * PROBE_ROUNDS <= n <= 21 * (PROBE_ROUNDS + 2)
    assert not any(drafted[: PROBE_EVERY - 1])


def test_a_probe_that_sees_nothing_ends_too():
    k = Hysteresis(probe=3)
    n = sum(k.step(0) > 0 for _ in range(2 * PROBE_EVERY - 1))
    assert 0 < n <= PROBE_STEPS


@pytest.mark.parametrize("probe", [0, 3])
def test_without_need_there_are_no_probes(probe):
    k = Hysteresis(probe)
    wanted = 0 if not probe else 7
    assert {k.step(wanted) for _ in range(3 * PROBE_EVERY)} == {wanted}
