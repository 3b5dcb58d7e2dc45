"""Estimates of acceptance."""

from __future__ import annotations

import random

import pytest

from jserve.speculation.policy.acceptance import Acceptance, Odds


@pytest.mark.parametrize(("a", "n", "want"), [(0.5, 3, 0.875), (0.0, 7, 0.0), (1.0, 7, 7.0)])
def test_expected_drafts_of_a_chain(a, n, want):
    assert Odds(a, 1.0).expected(n) == pytest.approx(want)
    assert Odds(a, 0.25).expected(n) == pytest.approx(want / 4)


def test_rounds_without_drafts_say_nothing_of_drafts():
    overall = Acceptance()
    for _ in range(1000):
        overall.add(3, 3)
    assert min(Acceptance(overall).odds()) > 0.95
    for _ in range(1000):
        overall.add(0, 0)
    assert Acceptance(overall).odds().offers < 0.05
    assert Acceptance(overall).odds().accepts > 0.95


def test_a_new_request_is_judged_by_all_and_soon_by_itself():
    overall = Acceptance()
    assert Acceptance(overall).odds() == (0.5, 0.5), "nothing is known at all"
    for _ in range(300):
        Acceptance(overall).add(1, 1)
    mine = Acceptance(overall)
    assert mine.odds().accepts > 0.95
    for _ in range(10):
        mine.add(1, 0)
    assert mine.odds().accepts < 0.5
    assert Acceptance(overall).odds().accepts > 0.85, "ten of many rounds"


@pytest.mark.parametrize("p", [0.0, 0.3, 0.8, 1.0])
def test_expected_drafts_are_those_that_are_accepted(p):
    """Rounds of a true rate: the estimate comes close to the mean number accepted."""
    rng = random.Random(4)
    overall = Acceptance()
    mine, accepted, said = Acceptance(overall), [], []
    for _ in range(3000):
        n = next((j for j in range(7) if rng.random() >= p), 7)
        accepted.append(n)
        mine.add(7, n)
        said.append(mine.odds().expected(7))
    mean = sum(accepted) / len(accepted)
    assert sum(said) / len(said) == pytest.approx(mean, rel=0.3, abs=0.1)
    assert overall.odds().expected(7) == pytest.approx(mean, rel=0.2, abs=0.1)


def test_a_text_that_changes_is_noticed():
    mine = Acceptance(Acceptance())
    for _ in range(50):
        mine.add(4, 4)
    high = mine.odds().expected(4)
    for _ in range(25):
        mine.add(4, 0)
    assert high > 2.5
    assert mine.odds().expected(4) < high / 4


def test_a_text_tells_the_rounds_that_drafts_would_have_had(monkeypatch):
    one, rounds = Acceptance(Acceptance()), []
    monkeypatch.setattr(Acceptance, "add", lambda self, *found: rounds.append(found))
    assert one.ended([5]), "no round is open"
    text = [5]
    for drafts, tokens, found in (
        ((1, 2, 3), [1, 2], None),
        (None, [9, 3], (3, 2)),
        ((1,), [1], None),
        (None, [1], (1, 1)),
        ((), [], None),
        (None, [1], (0, 0)),
    ):
        if drafts is not None:
            one.proposal = len(text), drafts
        text += tokens
        rounds.clear()
        assert one.ended(text) == (found is not None)
        assert rounds == ([] if found is None else [found])
