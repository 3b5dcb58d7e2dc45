"""How many replicas a load needs, when others are started and stopped, and whose end costs least."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from jserve.fleet.autoscale import Autoscaler, ReplicaLoad
from jserve.fleet.serve_policy import FIRST_START_S, ServePolicy

WINDOW_S, HOLD_S = 60.0, 300.0


class World:
    """Replicas that are offered ``load`` device seconds a second, all together."""

    def __init__(self, n: int = 1, start_s: float = 30.0) -> None:
        self.scaler, self.now, self.start_s = Autoscaler(), 1000.0, start_s
        self.offered = [0.0] * n
        self.queue_s = 0.0

    def run(self, seconds: float, load: float, growth: float = 0.0) -> Autoscaler:
        """``growth``: of the load, each second."""
        for i in range(round(seconds)):
            self.now += 1.0
            n = len(self.offered)
            self.offered = [sum_s + (load + growth * i) / n for sum_s in self.offered]
            self.observe()
        return self.scaler

    def observe(self) -> None:
        loads = {
            f"r{i}": ReplicaLoad(offered_s=offered_s, queue_s=self.queue_s / len(self.offered))
            for i, offered_s in enumerate(self.offered)
        }
        self.scaler.observe(self.now, loads, self.start_s)


def test_a_steady_load_needs_so_many_that_each_has_seventy_per_cent():
    for load, n in ((0.1, 1), (0.7, 1), (0.75, 2), (2.0, 3), (5.6, 8)):
        scaler = World(3).run(WINDOW_S + 2, load)
        assert scaler.load == pytest.approx(load)
        assert scaler.needed == n, load


def test_nothing_is_said_before_the_first_window():
    scaler = World().run(WINDOW_S - 1, 5.0)
    assert (scaler.needed, scaler.enough(2000.0)) == (0, None)


def test_a_load_that_grows_is_met_when_the_replica_is_ready():
    """From 1.0 it grows by 0.01 a second: the mean is 1.3, now it is 1.6, and in 40 s it is 2.0."""
    slow, fast = World(start_s=40.0), World(start_s=0.0)
    ahead, now = slow.run(WINDOW_S + 1, 1.0, 0.01), fast.run(WINDOW_S + 1, 1.0, 0.01)
    assert now.needed == math.ceil(1.6 / 0.7)
    assert ahead.needed == math.ceil((1.6 + 0.4) / 0.7)
    bound = World(start_s=10_000.0).run(WINDOW_S + 1, 1.0, 0.01)
    assert bound.needed == math.ceil((1.6 + 0.6) / 0.7), "foreseen for a minute at most"


def test_one_peak_is_no_growth():
    world = World(start_s=60.0)
    world.run(41, 0.8)
    scaler = world.run(20, 1.4)
    assert scaler.load == pytest.approx(1.0)
    assert scaler.needed == 2


def test_work_that_waits_asks_for_more_where_it_would_not_be_done_by_then():
    world = World(2, start_s=20.0)
    world.queue_s = 30.0
    assert world.run(WINDOW_S + 2, 1.0).needed == 3, "1.43; 30 s wait, 20 are done by then"
    world.queue_s = 20.0
    world.run(2, 1.0)
    assert world.scaler.needed == 2


def test_fewer_are_enough_only_after_five_minutes():
    world = World(3)
    world.run(WINDOW_S + 2, 2.0)
    assert world.scaler.enough(world.now) is None
    world.run(HOLD_S, 0.5)
    assert world.scaler.enough(world.now) == 4, "2.0 at 0.6 each"
    world.run(WINDOW_S, 0.5)
    assert world.scaler.enough(world.now) == 1
    assert world.run(10, 0.65).enough(world.now) == 1
    world.run(60, 0.65)
    assert (world.scaler.needed, world.scaler.enough(world.now)) == (1, 2), "between both bounds"


def test_a_replica_that_joins_or_is_seen_again_adds_nothing_that_it_did_before():
    world = World(1)
    world.run(WINDOW_S + 2, 0.5)
    world.offered.append(1e6)
    world.observe()
    assert world.run(WINDOW_S, 0.5).load == pytest.approx(0.5, abs=0.01)
    world.scaler.forget("r1")
    world.offered[1] += 1e6
    assert world.run(WINDOW_S, 0.5).load == pytest.approx(0.5, abs=0.01)


def test_a_replica_that_starts_again_under_its_name_takes_nothing_away():
    world = World(1)
    world.run(WINDOW_S + 2, 0.5)
    world.offered = [0.0]
    assert world.run(20, 0.5).load == pytest.approx(0.5, abs=0.01)


def test_what_a_cache_saved_fades():
    scaler = Autoscaler()
    scaler.observe(0.0, {"a": ReplicaLoad(offered_s=0.0), "b": ReplicaLoad(offered_s=0.0)}, 0.0)
    a, b = (ReplicaLoad(offered_s=0.0, saved_s=s) for s in (10.0, 4.0))
    scaler.observe(10.0, {"a": a, "b": b}, 0.0)
    assert scaler.saved_s == {"a": 10.0, "b": 4.0}
    b = ReplicaLoad(offered_s=0.0, saved_s=9.0)
    scaler.observe(310.0, {"a": a, "b": b}, 0.0)
    assert scaler.saved_s["a"] == pytest.approx(10.0 / math.e)
    assert scaler.saved_s["b"] == pytest.approx(4.0 / math.e + 5.0)


@settings(max_examples=60)
@given(
    st.lists(st.floats(0, 20), min_size=70, max_size=140),
    st.floats(0, 200),
    st.floats(0, 300),
)
def test_more_work_never_needs_fewer(loads, queue_s, start_s):
    less, more = World(2, start_s), World(2, start_s)
    for load in loads:
        less.run(1, load)
    more.queue_s = queue_s
    for load in loads:
        more.run(1, load)
        assert more.scaler.needed >= 1 or more.now - 1000 <= WINDOW_S + 1
    assert more.scaler.needed >= less.scaler.needed
    assert less.scaler.needed >= math.floor(less.scaler.load)


# -- as Serve's policy


class Serve:
    """Calls a policy as Serve's controller does, with replicas that start in ``start_s``."""

    def __init__(self, *, start_s: float = 12.0, most: int = 8) -> None:
        self.policy = ServePolicy(window_s=6.0, hold_s=30.0)
        self.now, self.start_s, self.most = 100.0, start_s, most
        self.running = {"r0": 0.0}
        self.starting: list[tuple[float, str]] = []
        self.retired: set[str] = set()
        self.target = self.n_started = 1

    def run(self, seconds: float, load: float) -> None:
        for _ in range(round(seconds)):
            self.now += 1.0
            for ready_at, name in [one for one in self.starting if one[0] <= self.now]:
                self.running[name] = 0.0
                self.starting.remove((ready_at, name))
            for name in self.running:
                self.running[name] += load / len(self.running)
            self._tick()

    def _tick(self) -> None:
        said = {
            _Replica(name): {
                "offered_seconds_total": offered_s,
                "retired": float(name in self.retired),
            }
            for name, offered_s in self.running.items()
        }
        metrics = {
            key: {replica: [SimpleNamespace(value=values[key])] for replica, values in said.items()}
            for key in ("offered_seconds_total", "retired")
        }
        wanted, _ = self.policy(
            SimpleNamespace(
                current_time=self.now,
                target_num_replicas=self.target,
                running_replicas=list(said),
                raw_metrics=metrics,
                capacity_adjusted_max_replicas=self.most,
            )
        )
        self.target = min(wanted, self.most)
        while len(self.running) + len(self.starting) < self.target:
            self.starting.append((self.now + self.start_s, f"r{self.n_started}"))
            self.n_started += 1


class _Replica(str):
    @property
    def unique_id(self) -> str:
        return str(self)


def test_serve_starts_what_is_needed_and_is_never_told_to_stop_any():
    serve = Serve()
    assert serve.policy.start_s == FIRST_START_S
    serve.run(10, 0.5)
    assert serve.target == 1
    serve.run(10, 1.9)
    assert serve.target >= 3
    serve.run(30, 1.9)
    assert len(serve.running) == serve.target
    assert serve.policy.start_s == pytest.approx(serve.start_s, abs=1.1)
    before = serve.target
    serve.run(200, 0.1)
    assert serve.target == before, "the front chooses who is stopped"


def test_one_that_is_retired_is_not_replaced_and_one_that_dies_is():
    serve = Serve()
    serve.run(60, 2.0)
    n = serve.target
    assert n == len(serve.running) == 3
    serve.retired.add("r1")
    serve.run(5, 0.1)
    assert serve.target == n, "while it runs Serve would stop another one"
    del serve.running["r1"]
    serve.starting.append((serve.now + 12, "soon"))  # Serve saw its end first
    serve.run(1, 0.1)
    assert serve.target == n - 1
    serve.starting.clear()
    serve.run(60, 0.1)
    assert serve.target == n - 1
    del serve.running["r2"]
    serve.run(20, 0.1)
    assert (serve.target, len(serve.running)) == (n - 1, n - 1)
    assert serve.policy.autoscaler.saved_s.keys() == serve.running.keys(), (
        "who is gone is forgotten"
    )


def test_no_more_are_wished_for_than_may_be():
    serve = Serve(most=2)
    serve.run(60, 5.0)
    assert serve.target == 2
    assert serve.policy.start_s == pytest.approx(serve.start_s, abs=1.1)
