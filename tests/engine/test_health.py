"""Whether an engine should get new requests: each symptom, its end, and what is no symptom."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from jserve.engine.health import REST_S, WINDOW_S, EngineHealth, HealthLimits, Symptom


class Watched:
    """A ``EngineHealth`` that hears an engine of our making every quarter of a second."""

    def __init__(self, **limits) -> None:
        self.health = EngineHealth(HealthLimits(**limits))
        self.now, self.step = 1000.0, 0
        self.values = dict.fromkeys(
            ("finished", "sequences_nonfinite_total", "step_faults_total", "steps_failed_in_row"),
            0.0,
        )
        self.values["step_slowness"] = 1.0

    def tell(self, seconds: float = 0.25, *, steps: int = 1, **values: float) -> list[str]:
        """``seconds`` pass, the engine makes ``steps`` and says ``values``; what ails it."""
        self.now += seconds
        self.step += steps
        self.values |= values
        self.health.observe(self.step, self.values, self.now)
        return self.degraded_reasons()

    def degraded_reasons(self, without_step_s: float = 0.0) -> list[str]:
        return self.health.degraded_reasons(self.now, without_step_s)

    def run(self, seconds: float, **values: float) -> list[str]:
        for _ in range(round(seconds * 4)):
            self.tell(**values)
        return self.degraded_reasons()


def test_an_engine_that_works_is_fit():
    watched = Watched()
    assert watched.degraded_reasons() == []
    for i in range(600):
        assert watched.tell(finished=i, step_slowness=1.0 + i % 3) == []
    watched.now += 1e6
    assert watched.degraded_reasons(without_step_s=29.0) == []
    assert watched.health.n_degraded == 0


def test_steps_that_fail_in_a_row():
    watched = Watched(failed_steps=3)
    assert watched.tell(step_faults_total=2, steps_failed_in_row=2) == []
    assert watched.tell(step_faults_total=3, steps_failed_in_row=3) == ["3 steps failed in a row"]
    assert watched.tell(steps_failed_in_row=0), "one that came back proves little"
    assert watched.run(REST_S) == []
    assert watched.tell(step_faults_total=9, steps_failed_in_row=0) == []
    assert watched.health.n_degraded == 1


def test_who_is_sent_nothing_any_more_gets_another_try():
    """Without traffic no step can come back; the verdict must not rest on one that would have to."""
    watched = Watched()
    degraded_reasons = watched.tell(
        finished=10,
        sequences_nonfinite_total=10,
        step_faults_total=7,
        steps_failed_in_row=7,
    )
    assert len(degraded_reasons) == 2
    watched.now += WINDOW_S - 1
    assert watched.degraded_reasons() == degraded_reasons
    watched.now += REST_S
    assert watched.degraded_reasons() == []


def test_many_sequences_with_logits_that_are_not_finite():
    watched = Watched()
    assert watched.tell(finished=3, sequences_nonfinite_total=3) == [], "few are an accident"
    assert watched.tell(finished=40, sequences_nonfinite_total=4) == [
        "4 of 40 sequences of a minute had logits that are not finite"
    ]
    assert watched.run(5, finished=50), "8 % is below the limit, and not below half of it"
    assert watched.run(REST_S, finished=100) == []
    assert watched.run(WINDOW_S + 1, finished=200) == []
    assert watched.tell(finished=203, sequences_nonfinite_total=7) == []
    assert watched.tell(finished=204, sequences_nonfinite_total=8), "4 of the 4 of this minute"


def test_a_share_below_the_limit_is_none():
    watched = Watched()
    for i in range(600):
        assert watched.tell(finished=25 * i, sequences_nonfinite_total=2 * i) == []


def test_it_remembers_a_minute_of_ends_though_nobody_asks():
    watched = Watched()
    for i in range(2000):
        watched.step, watched.now = i, watched.now + 0.25
        watched.values["finished"] = i
        watched.health.observe(i, watched.values, watched.now)
    assert len(watched.health._ends) <= WINDOW_S * 4 + 2


def test_steps_that_are_slow_for_a_minute():
    watched = Watched(slowness=5.0)
    assert watched.run(WINDOW_S - 1, step_slowness=8.0) == []
    assert watched.run(2) == ["steps take 8.0 times as long as usual"]
    assert watched.run(20, step_slowness=3.0), "below the limit, and not below half of it"
    assert watched.run(1, step_slowness=2.0) == []
    assert watched.run(WINDOW_S / 2, step_slowness=9.0) == []
    watched.run(1, step_slowness=4.9)
    assert watched.run(WINDOW_S - 1, step_slowness=9.0) == [], "a minute without a break"


def test_one_slow_step_before_a_pause_is_no_slow_minute():
    watched = Watched()
    watched.tell(step_slowness=20.0)
    watched.now += 2 * WINDOW_S
    assert watched.degraded_reasons() == []
    assert watched.tell(step_slowness=20.0) == []


def test_a_minute_with_a_pause_in_it_is_no_slow_minute():
    watched = Watched()
    watched.run(5, step_slowness=9.0)
    watched.tell(WINDOW_S - 10, step_slowness=9.0)
    assert watched.run(WINDOW_S - 1, step_slowness=9.0) == []
    assert watched.run(2, step_slowness=9.0)


def test_a_slow_engine_without_steps_gets_another_try():
    watched = Watched()
    assert watched.run(WINDOW_S + 1, step_slowness=9.0)
    watched.now += WINDOW_S - 1
    assert watched.degraded_reasons()
    watched.now += 2
    assert watched.degraded_reasons() == []


def test_a_step_that_runs_for_long():
    watched = Watched(step_s=30.0)
    assert watched.degraded_reasons(without_step_s=29.9) == []
    assert watched.degraded_reasons(without_step_s=31.0) == ["no step for 31 s while there is work"]
    assert watched.tell(), "it came: not yet"
    watched.now += REST_S
    assert watched.degraded_reasons() == []


def test_another_engine_begins_anew():
    watched = Watched()
    assert watched.tell(step_faults_total=9, steps_failed_in_row=9)
    watched.health.forget()
    assert watched.degraded_reasons() == []


@pytest.mark.parametrize("name", HealthLimits.__dataclass_fields__)
def test_a_limit_of_0_is_never_reached(name):
    watched = Watched(**{name: 0})
    values = {"finished": 10, "sequences_nonfinite_total": 10, "step_slowness": 20.0}
    degraded_reasons = watched.run(
        WINDOW_S + 1, step_faults_total=9, steps_failed_in_row=9, **values
    )
    degraded_reasons += watched.degraded_reasons(without_step_s=100.0)
    said = {
        "failed_steps": "failed",
        "nonfinite_share": "not finite",
        "slowness": "as usual",
        "step_s": "no step",
    }
    assert {key for key, word in said.items() if any(word in one for one in degraded_reasons)} == {
        *said
    } - {name}


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 12)), max_size=80), st.floats(0, 30))
def test_a_symptom_shows_at_its_limit_and_rests_below_half_of_it(looks, lasts_s):
    """It never shows unless the limit was kept for ``lasts_s``, and never ends above half of it or
    before its rest."""
    symptom, now, since, last, shown = Symptom(5.0, lasts_s), 0.0, None, -1e9, False
    for seconds, value in looks:
        now += seconds
        symptom.look(now, value)
        shows = symptom.shows
        since = None if value < 5.0 else now if since is None else since
        last = now if value >= 5.0 else last
        if shows and not shown:
            assert since is not None
            assert now - since >= lasts_s
        if shown and not shows:
            assert value < 2.5
            assert now - last >= REST_S
        if value >= 5.0 and now - (since or 0.0) >= lasts_s:
            assert shows
        shown = shows
