"""Estimates of acceptance."""

from __future__ import annotations

import random

import pytest

from jserve.speculation.policy.acceptance import (
    FADE_REQUEST,
    Acceptance,
    LaneAcceptance,
    Odds,
    Shadow,
)
from jserve.types import Lane

BULK = Lane.BULK


@pytest.mark.parametrize(("a", "n", "want"), [(0.5, 3, 0.875), (0.0, 7, 0.0), (1.0, 7, 7.0)])
def test_expected_drafts_of_a_chain(a, n, want):
    assert Odds(a, 1.0).expected(n) == pytest.approx(want)
    assert Odds(a, 0.25).expected(n) == pytest.approx(want / 4)


def test_rounds_without_drafts_say_nothing_of_drafts():
    lanes, new = LaneAcceptance(), Acceptance()
    for _ in range(1000):
        lanes.add(3, 3, BULK)
    assert min(lanes.odds(new, BULK)) > 0.95
    for _ in range(1000):
        lanes.add(0, 0, BULK)
    assert lanes.odds(new, BULK).offers < 0.05
    assert lanes.odds(new, BULK).accepts > 0.95


def test_a_new_request_is_judged_by_its_lane_and_a_new_lane_by_all():
    lanes, new = LaneAcceptance(), Acceptance()
    assert lanes.odds(new, BULK) == (0.5, 0.5), "nothing is known at all"
    for _ in range(1000):
        lanes.add(1, 1, Lane.BULK)
    assert lanes.odds(new, Lane.STANDARD).accepts > 0.95, "nothing is known of the lane"
    for _ in range(20):
        lanes.add(1, 0, Lane.STANDARD)
    assert lanes.odds(new, Lane.STANDARD).accepts < 0.2
    assert lanes.odds(new, Lane.BULK).accepts > 0.9


@pytest.mark.parametrize("p", [0.0, 0.3, 0.8, 1.0])
def test_expected_drafts_are_those_that_are_accepted(p):
    """Rounds of a true rate: the estimate comes close to the mean number accepted."""
    rng = random.Random(4)
    lanes, mine, accepted, said = LaneAcceptance(), Acceptance(), [], []
    for _ in range(3000):
        n = next((j for j in range(7) if rng.random() >= p), 7)
        accepted.append(n)
        lanes.add(7, n, BULK)
        mine.add(7, n, FADE_REQUEST)
        said.append(lanes.odds(mine, BULK).expected(7))
    mean = sum(accepted) / len(accepted)
    assert sum(said) / len(said) == pytest.approx(mean, rel=0.3, abs=0.1)
    assert lanes.odds(Acceptance(), BULK).expected(7) == pytest.approx(mean, rel=0.2, abs=0.1)


def test_a_text_that_changes_is_noticed():
    lanes, mine = LaneAcceptance(), Acceptance()
    for _ in range(50):
        mine.add(4, 4, FADE_REQUEST)
    high = lanes.odds(mine, BULK).expected(4)
    for _ in range(25):
        mine.add(4, 0, FADE_REQUEST)
    assert high > 2.5
    assert lanes.odds(mine, BULK).expected(4) < 0.5


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
