"""The choice of k, its hysteresis and its probes."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, strategies as st

from jserve.speculation.policy.acceptance import NEVER, Odds
from jserve.speculation.policy.draft_count import (
    CHEAP,
    HOLD,
    MARGIN,
    PROBE_EVERY,
    PROBE_RARELY,
    PROBE_STEPS,
    WIDER,
    Hysteresis,
    best_k,
    widths,
)

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


def best(
    per_draft: float,
    *odds: Odds,
    min_speed: float = 0.98,
    depths: Sequence[int] = range(16),
) -> int:
    """Where a step costs 1 and each draft of a row ``per_draft``."""
    seconds = lambda k: 1.0 + per_draft * k * len(odds)  # noqa: E731
    return best_k(odds, KS, depths, seconds, min_speed)


def test_k_grows_with_acceptance_and_shrinks_with_cost_and_rows():
    found = [best(0.05, Odds(a, 1.0)) for a in (0.1, 0.5, 0.8, 0.95, 1.0)]
    assert found == sorted(found)
    assert found[0] < found[-1] == 15
    by_cost = [best(cost, Odds(0.9, 1.0)) for cost in (0.0, 0.1, 0.3, 1.0)]
    assert by_cost == sorted(by_cost, reverse=True)
    assert by_cost[-1] == 0
    by_rows = [best(0.05, *[Odds(0.9, 1.0)] * n) for n in (1, 4, 16, 64)]
    assert by_rows == sorted(by_rows, reverse=True)
    assert by_rows[-1] == 0


def test_nothing_to_expect_is_no_draft():
    assert best(0.0) == 0
    assert best(0.0, NEVER, NEVER) == 0
    assert best(0.1, Odds(0.0, 1.0)) == 0
    assert best(0.1, Odds(0.9, 0.0)) == 0


def test_where_drafts_cost_next_to_nothing_they_are_always_made():
    least = (CHEAP - 1.0) / 3
    assert CHEAP < MARGIN
    assert best(0.9 * least, Odds(0.0, 1.0)) == 3
    assert best(1.1 * least, Odds(0.0, 1.0)) == 0


def test_no_row_pays_for_others():
    rows = [Odds(0.99, 1.0), NEVER]
    assert best(0.05, *rows, min_speed=0.0) > 0
    assert best(0.05, *rows) == 0


def test_each_row_counts_by_its_own_acceptance():
    """Of a copy and a text that drafts do not fit, 1.4 drafts stand; of two that are right half the time, 0.9."""
    seconds = dict(zip(KS, (1.0, 2.1, 99.0, 99.0), strict=True)).__getitem__
    for rows, k in (((0.95, 0.05), 3), ((0.5, 0.5), 0)):
        assert best_k([Odds(a, 1.0) for a in rows], KS, range(16), seconds, 0.0) == k


def test_of_a_tree_its_depth_counts():
    assert best(0.1, Odds(0.95, 1.0), depths=[min(n, 1) for n in range(16)]) == 3
    assert best(0.1, Odds(0.95, 1.0)) > 3


def test_more_drafts_have_to_be_better_than_fewer():
    """Three right of three or seven of seven: what a step of seven may take."""
    row, seven_over_three = Odds(1.0, 1.0), 8 / 4
    for longer, k in ((0.99 / WIDER, 7), (1.01 / WIDER, 3)):
        seconds = dict(zip(KS, (1.0, 1.5, 1.5 * seven_over_three * longer, 99.0), strict=True))
        assert best_k([row], KS, range(16), seconds.__getitem__, 0.9) == k


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6),
    st.tuples(*[st.floats(1.0, 4.0)] * 3),
)
def test_it_never_loses_by_its_own_arithmetic(rows, times):
    seconds = dict(zip(KS, [1.0, *sorted(times)], strict=True))
    odds = [Odds(*row) for row in rows]
    k = best_k(odds, KS, range(16), seconds.__getitem__, 0.98)
    if k and seconds[k] >= CHEAP:
        mean = sum(o.expected(k) for o in odds) / len(odds)
        assert (1 + mean) / seconds[k] > 1.0


# --- hysteresis and probes


def test_drafting_does_not_end_or_begin_too_often():
    k = Hysteresis(probe=3)
    step = lambda wanted: k.step(wanted, new=False)  # noqa: E731
    assert step(3) == 3, "the first is taken at once"
    assert [step(0) for _ in range(HOLD)] == [3] * (HOLD - 1) + [0]
    assert [step(3) for _ in range(HOLD)] == [0] * (HOLD - 1) + [3]
    assert [step(7), step(3)] == [7, 3], "more or fewer drafts cost nothing to begin"
    assert [step(0) for _ in range(HOLD - 2)] == [3] * (HOLD - 3) + [0]


def test_probes_get_rare_and_end_when_something_was_seen():
    k, drafted = Hysteresis(probe=3), []
    for _ in range(20 * PROBE_RARELY):
        drafted.append(k.step(0, new=True))
        if drafted[-2:] == [3, 3]:
            k.seen()
    begun = [i for i in range(len(drafted)) if drafted[i] and not (i and drafted[i - 1])]
    assert begun[:4] == [0, PROBE_EVERY, 3 * PROBE_EVERY, 7 * PROBE_EVERY]
    assert begun[-1] - begun[-2] == PROBE_RARELY
    assert sum(x > 0 for x in drafted) == 2 * len(begun)
    assert k.k == 0, "nobody else is drafted for"


def test_a_probe_that_sees_nothing_ends_too():
    k = Hysteresis(probe=3)
    assert sum(k.step(0, new=True) > 0 for _ in range(PROBE_EVERY)) == PROBE_STEPS


def test_drafting_in_between_makes_probes_frequent_again():
    k = Hysteresis(probe=3)
    for _ in range(3 * PROBE_RARELY):
        k.step(0, new=True)
    for _ in range(3 * HOLD):
        k.step(3, new=True)
    off = [k.step(0, new=True) for _ in range(HOLD + 2 * PROBE_EVERY)]
    assert off.index(0) < HOLD
    assert 3 in off[off.index(0) :]


def test_where_no_prompt_comes_drafting_begins_at_last():
    k = Hysteresis(probe=3)
    assert not any(k.step(0, new=False) for _ in range(2 * PROBE_RARELY - PROBE_EVERY))
    assert [k.step(0, new=False) for _ in range(HOLD)] == [3] * HOLD
    assert k.k == 3, "with a backfill of what was missed"
    assert not any(k.step(0, new=False) for _ in range(2 * PROBE_RARELY))


def test_while_drafts_pay_there_are_no_probes():
    k = Hysteresis(probe=3)
    assert {k.step(7, new=True) for _ in range(3 * PROBE_EVERY)} == {7}
