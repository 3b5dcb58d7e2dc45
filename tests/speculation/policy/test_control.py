"""Estimates of acceptance, and the choice of a width made from them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from jserve.speculation.policy.acceptance import ProposerRates, RequestRates, Shadow
from jserve.speculation.policy.width import ProbeBudget, best_width, gain, rate, widths
from jserve.types import Lane

BULK = Lane.BULK


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


def linear(per_token: float):
    """Seconds of a width where a step costs 1 and each further token ``per_token``."""
    return lambda width: 1.0 + per_token * (width - 1)


def flat(p: float, most: int) -> list[float]:
    """Gains when each draft stands with chance ``p`` given those before."""
    found = [0.0]
    for j in range(1, most + 1):
        found.append(found[-1] + p**j)
    return found


def test_nothing_to_gain_is_no_width():
    options = widths(15)
    assert best_width([flat(0.0, 15)], options, linear(1e-9), 1.0, 0.98) == 1
    assert best_width([[0.0]], options, linear(0.0), 1.0, 0.98) == 1
    assert best_width([], options, linear(0.0), 1.0, 0.98) == 1


def test_the_width_grows_with_acceptance_and_shrinks_with_cost():
    options = widths(15)

    def chosen(p, cost):
        return best_width([flat(p, 15)], options, linear(cost), 1.0, 0.0)

    by_rate = [chosen(p, 0.05) for p in (0.1, 0.5, 0.8, 0.95, 0.99)]
    assert by_rate == sorted(by_rate)
    assert by_rate[0] < by_rate[-1] == 16
    by_cost = [chosen(0.9, cost) for cost in (0.0, 0.1, 0.3, 1.0)]
    assert by_cost == sorted(by_cost, reverse=True)
    assert by_cost[-1] == 1


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=7), min_size=1, max_size=5),
    st.lists(st.floats(1.0, 4.0), min_size=2, max_size=2),
    st.sampled_from([0.0, 0.9, 0.98]),
)
def test_the_choice_is_the_best_of_all_fair_ones(rates, times, min_speed):
    rows = []
    for row in rates:
        standing, gains = 1.0, [0.0]
        for p in row:
            standing *= p
            gains.append(gains[-1] + standing)
        rows.append(gains)
    options = widths(7)
    seconds = dict(zip(options, [1.0, *sorted(times)], strict=True))
    chosen = best_width(rows, options, seconds.__getitem__, 1.0, min_speed)
    fair = [
        w
        for w in options
        if w == 1 or all((1 + gain(g, w)) / seconds[w] >= min_speed - 1e-12 for g in rows)
    ]
    best = max(rate(rows, w, seconds[w]) for w in fair)
    assert rate(rows, chosen, seconds[chosen]) == pytest.approx(best)
    if chosen > 1:
        assert all((1 + gain(g, chosen)) / seconds[chosen] >= min_speed - 1e-9 for g in rows)


def test_nobody_pays_for_others():
    copies, talks = flat(0.99, 7), [0.0]
    options = widths(7)
    assert best_width([copies, talks], options, linear(0.05), 1.0, 0.0) == 8
    assert best_width([copies, talks], options, linear(0.05), 1.0, 0.98) == 1
    assert best_width([copies, talks], options, linear(0.002), 1.0, 0.98) == 8


def test_rates_are_measured_by_position():
    proposer = ProposerRates(3)
    for _ in range(1000):
        proposer.add(3, 1, BULK)
    assert proposer.rate(0, BULK) > 0.95
    assert proposer.rate(1, BULK) < 0.05
    assert proposer.rate(2, BULK) == 0.5, "never tried"
    assert proposer.rate(9, BULK) == proposer.rate(2, BULK)
    assert proposer.offer() > 0.95
    for _ in range(1000):
        proposer.add(0, 0, BULK)
    assert proposer.offer() < 0.05
    assert proposer.rate(0, BULK) > 0.95, "no drafts say nothing of drafts"


def test_a_new_request_is_judged_by_its_lane_and_a_new_lane_by_all():
    proposer = ProposerRates(2)
    for _ in range(1000):
        proposer.add(1, 1, Lane.BULK)
    new = proposer.rate(0, Lane.STANDARD)
    assert new > 0.95, "nothing is known of the lane"
    for _ in range(20):
        proposer.add(1, 0, Lane.STANDARD)
    assert proposer.rate(0, Lane.STANDARD) < 0.2
    assert proposer.rate(0, Lane.BULK) > 0.9


@pytest.mark.parametrize("p", [0.0, 0.3, 0.8, 1.0])
def test_expected_drafts_are_those_that_stand(p):
    """Rounds of a true rate: the estimate comes close to the mean number that stood."""
    rng = random.Random(4)
    proposer, mine, stood, said = ProposerRates(7), RequestRates(), [], []
    for _ in range(3000):
        n = next((j for j in range(7) if rng.random() >= p), 7)
        stood.append(n)
        proposer.add(7, n, BULK)
        mine.add(7, n)
        said.append(mine.gains(7, proposer, BULK)[7])
    mean = sum(said) / len(said)
    assert mean == pytest.approx(sum(stood) / len(stood), rel=0.3, abs=0.1)
    fresh = RequestRates().gains(7, proposer, BULK)
    assert fresh[7] == pytest.approx(sum(stood) / len(stood), rel=0.2, abs=0.1)


def test_a_text_that_changes_is_noticed():
    proposer, mine = ProposerRates(4), RequestRates()
    for _ in range(50):
        mine.add(4, 4)
    high = mine.gains(4, proposer, BULK)[4]
    for _ in range(25):
        mine.add(4, 0)
    assert high > 2.5
    assert mine.gains(4, proposer, BULK)[4] < 0.5


def test_a_shadow_tells_the_round_that_drafts_would_have_had():
    shadow = Shadow()
    assert shadow.see(5) is None, "no round is open"
    shadow.open((1, 2, 3))
    assert [shadow.see(t) for t in (1, 2, 9)] == [None, None, (3, 2)]
    assert shadow.see(3) is None
    shadow.open((1,))
    assert [shadow.see(t) for t in (1, 1)] == [None, (1, 1)]
    shadow.open(())
    assert shadow.see(1) == (0, 0)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.01, 50)), max_size=60))
def test_looks_cost_no_more_than_their_share(steps):
    probe_budget, spent, worked, most = ProbeBudget(0.01), 0.0, 0.0, 0.0
    for seconds, cost in steps:
        probe_budget.earn(seconds)
        worked += seconds
        if probe_budget.spend(cost):
            spent += cost
            most = max(most, cost)
        assert spent <= 0.01 * worked + 1e-9


def test_a_purse_saves_for_one_look_only():
    probe_budget = ProbeBudget(0.01)
    probe_budget.earn(1000.0)
    assert not probe_budget.holds(11.0)
    assert probe_budget.holds(2.0)
    assert probe_budget.spend(1.5)
    assert not probe_budget.spend(1.0), "the rest of the ten is gone"


def test_looks_do_come():
    probe_budget = ProbeBudget(0.01)
    n = 0
    for _ in range(1000):
        probe_budget.earn(1.0)
        n += probe_budget.spend(0.5)
    assert 15 <= n <= 20
