"""An operator's commands in the loop: prefixes forgotten between two steps, profiles."""

from __future__ import annotations

import pytest

from jserve.engine.wire import Control
from jserve.errors import BadRequest
from jserve.types import Finish
from tests.engine.fakes import request
from tests.engine.test_engine import end_of, engine_of, expected, fault_runner, tokens_of


class Recorder:
    """A profiler that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self) -> None:
        if self.told[-1:] == ["start"]:
            raise BadRequest("already", code="profiler_active")
        self.told.append("start")

    def stop(self) -> None:
        self.told.append("stop")


def obeyed(engine, action: str):
    engine.ask(Control(id=f"c-{action}", action=action))
    outputs = engine.step()
    (answer,) = engine.take_answers()
    assert answer.id == f"c-{action}"
    return answer, outputs


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_reset_lands_what_flies_and_changes_no_token(overlap):
    engine = engine_of(fault_runner(), overlap=overlap)
    engine.submit(request("a", max_tokens=12))
    outputs = [out for _ in range(4) for out in engine.step()]
    answer, more = obeyed(engine, "reset_prefix_cache")
    assert answer.error is None
    assert engine.scheduler.n_resets == 1
    assert engine.runner.n_resets == 0, "the device keeps its state"
    outputs += more + engine.drain()
    assert tokens_of(outputs, "a") == expected(request("a", max_tokens=12))
    assert end_of(outputs, "a") is Finish.LENGTH


@pytest.mark.parametrize("overlap", [1, 2])
def test_a_step_that_fails_while_it_lands_is_a_fault_like_any_other(overlap):
    engine = engine_of(fault_runner("collect 5"), overlap=overlap)
    engine.submit(request("a", max_tokens=12))
    outputs = []
    while engine.scheduler.planned[-1:] != [5]:
        outputs += engine.step()
    answer, more = obeyed(engine, "reset_prefix_cache")
    assert answer.error is None
    assert engine.runner.n_resets == 1
    outputs += more + engine.drain()
    assert tokens_of(outputs, "a") == expected(request("a", max_tokens=12))


def test_profiles_are_for_those_who_have_a_profiler():
    engine = engine_of()
    answer, _ = obeyed(engine, "start_profile")
    assert (answer.error_code, answer.error_field) == ("invalid_value", "profile_dir")
    recorder = Recorder()
    engine = engine_of(profiler=recorder)
    assert obeyed(engine, "start_profile")[0].error is None
    assert obeyed(engine, "start_profile")[0].error_code == "profiler_active"
    assert obeyed(engine, "stop_profile")[0].error is None
    assert recorder.told == ["start", "stop"]
