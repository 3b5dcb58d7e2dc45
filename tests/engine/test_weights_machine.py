"""The stateful property test of weights, and bugs that it has to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from jserve.engine import operate
from jserve.engine.hold import Hold
from jserve.kv.cache import PageCache
from jserve.sched.resources import Resources
from jserve.sched.versions import WeightVersions
from tests.engine.weights_machine import WeightsMachine

COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": True,
    "derandomize": True,
}


def run(examples: int, steps: int = 40, **more: Any) -> None:
    settings_ = settings(max_examples=examples, stateful_step_count=steps, **COMMON, **more)
    run_state_machine_as_test(WeightsMachine, settings=settings_)


def test_random_updates_keep_every_invariant() -> None:
    WeightsMachine.came.clear()
    run(60)
    for name in ("updates over pages in host memory", "pages that came back"):
        assert WeightsMachine.came[name] > 5, name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_updates_keep_every_invariant_nightly() -> None:
    run(1000, 60)


def cached_pages_stay(patch: pytest.MonkeyPatch) -> None:
    """Prefixes that the old weights computed are found by new requests."""
    patch.setattr(PageCache, "clear", lambda self, **how: None)


def host_pages_keep_their_names(patch: pytest.MonkeyPatch) -> None:
    """Prefixes that the old weights computed come back from host memory."""
    clear = PageCache.clear

    def device_alone(self: PageCache, **how: Any) -> int:
        tier, self.tier = self.tier, None
        n = clear(self)
        self.tier = tier
        return n

    patch.setattr(PageCache, "clear", device_alone)


def running_keep_their_kv(patch: pytest.MonkeyPatch) -> None:
    """``recompute`` is carried out as ``mix``."""
    requeue = Resources.requeue_all

    def keep(self: Resources, *, weights: str | None = None, **how: Any) -> None:
        if weights is None:
            requeue(self, **how)
        else:
            self.keep_running(weights)

    patch.setattr(Resources, "requeue_all", keep)


def spans_are_of_the_newest(patch: pytest.MonkeyPatch) -> None:
    """Tokens of sequences that end under the old weights are said to be of the new ones."""
    patch.setattr(WeightVersions, "of", lambda self, seq: self.version)


def turns_are_mixed_up(patch: pytest.MonkeyPatch) -> None:
    """A plan of the new weights has rows of the old ones."""
    patch.setattr(WeightVersions, "running", lambda self, seqs: seqs)


def updated_in_mid_flight(patch: pytest.MonkeyPatch) -> None:
    """``finish`` does not wait for those of before."""
    settle = operate.settle

    def early(engine: Any) -> Any:
        command = engine.hold.pending
        if command is None or command.action != "update_weights":
            return settle(engine)
        engine.hold.pending = None
        return command, operate._replace(
            engine, msgspec.structs.replace(command, running="recompute")
        )

    patch.setattr(operate, "settle", early)


def paused_and_planned(patch: pytest.MonkeyPatch) -> None:
    """``keep`` goes on with steps."""
    patch.setattr(Hold, "stopped", property(lambda self: bool(self.asleep)))


BUGS = [
    cached_pages_stay,
    host_pages_keep_their_names,
    running_keep_their_kv,
    spans_are_of_the_newest,
    turns_are_mixed_up,
    updated_in_mid_flight,
    paused_and_planned,
]


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, ExceptionGroup, KeyError, IndexError)):
        run(150, phases=(Phase.generate,), report_multiple_bugs=False)
