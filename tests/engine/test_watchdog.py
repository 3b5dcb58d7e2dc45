"""A process in which nothing moves is ended with its stacks and the reason; one that moves, or waits, is not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from jserve import faults
from jserve.config import EngineConfig
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.client import ProcClient
from jserve.engine.watchdog import EXIT_STUCK, Watchdog
from jserve.errors import EngineDead
from jserve.working import at_work, working_on
from tests.engine import child
from tests.engine.fakes import request


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watched(tmp_path):
    """A watchdog that only looks when it is told to, its clock, what it ended with, its stacks."""
    clock, ends = Clock(), []
    with (tmp_path / "stacks").open("w+") as stacks:
        dog = Watchdog(0.0, end=ends.append, stacks=stacks, clock=clock)
        dog.limit_s = 10.0
        yield dog, clock, ends, stacks


def test_what_takes_too_long_ends_the_process_with_reason_and_stacks(watched, caplog):
    dog, clock, ends, stacks = watched
    dog.at("warm up, 2 of 9 done")
    clock.now = 9.9
    dog.look()
    assert ends == []
    with working_on("step_D8_P0_F0_J1"):
        clock.now = 10.0
        dog.look()
    assert ends == [EXIT_STUCK]
    (line,) = caplog.messages
    assert "no progress for 10 s (watchdog_s): warm up, 2 of 9 done, step_D8_P0_F0_J1" in line
    stacks.seek(0)
    assert "test_what_takes_too_long" in stacks.read()


def test_progress_counts_and_so_does_waiting_for_others(watched):
    dog, clock, ends, _ = watched
    for n in range(5):
        dog.at(f"compile, {n} of 5 done")
        clock.now += 9.0
        dog.look()
    dog.idle()
    clock.now += 1e6
    dog.look()
    assert ends == []


def test_no_limit_is_no_thread():
    before = threading.active_count()
    Watchdog(0.0).at("a step")
    assert threading.active_count() == before


HELD = """
import ctypes, time
from jserve.engine import watchdog

watchdog.GRACE_S = 0.5
watchdog.Watchdog(1.0).at("a step")
time.sleep(0.2)
ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock
"""


def test_a_call_that_keeps_the_interpreters_lock_is_ended_too():
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert 'File "<string>", line 8' in done.stderr


def test_threads_are_named_after_what_they_do_and_then_again_as_before():
    name = threading.current_thread().name
    with working_on("slot_load"):
        assert at_work() == ["slot_load"]
    assert at_work() == []
    assert threading.current_thread().name == name


def engine_of(model: str, **options) -> AsyncEngine:
    config = EngineConfig.of(model=model, watchdog_s=1.0)
    return AsyncEngine(lambda: ProcClient(config, command=child.command), **options)


WHY = f"code {EXIT_STUCK} \\(no progress"


async def test_a_start_that_hangs_ends_and_says_so(capfd):
    with pytest.raises(EngineDead, match=f"did not start: it ended with {WHY}"):
        await engine_of("hang at start").start()
    said = capfd.readouterr().err
    assert "(watchdog_s): compile, 1 of 2 done" in said
    assert "fakes.py" in said, "the stacks"


async def test_a_step_that_hangs_ends_the_engine_and_its_requests(capfd):
    engine = engine_of("hang in a step", max_restarts=0)
    await engine.start()
    await asyncio.sleep(1.5)
    assert engine.ready, "an idle engine is no stuck one"
    *_, last = [output async for output in engine.generate(request("a"))]
    assert f"ended with code {EXIT_STUCK} (no progress" in last.error
    await engine.gave_up.wait()
    said = capfd.readouterr().err
    assert "(watchdog_s): a step" in said
    assert "in collect" in said
    await engine.close()


class Owner:
    def work(self) -> int:
        return 1


def test_a_point_may_hang(monkeypatch: pytest.MonkeyPatch):
    place = faults.FaultPoint(__name__, "Owner.work", RuntimeError)
    monkeypatch.setitem(faults.POINTS, "test.watchdog", [place])
    shot, disarm = faults.arm("test.watchdog", 2, hangs=True)
    try:
        assert Owner().work() == 1
        thread = threading.Thread(target=Owner().work, daemon=True)
        thread.start()
        thread.join(0.2)
        assert shot.fired
        assert thread.is_alive()
        assert Owner().work() == 1
    finally:
        disarm()


@pytest.mark.parametrize("text", ["runner.wait@1=hangs", "runner.wait@0=hang", "runner.wait=hang"])
def test_a_text_that_arms_nothing_is_refused(text: str):
    with pytest.raises(ValueError, match="must be a fault point"):
        faults.arm_all(text)


CHILD = """
import sys
from jserve import build, faults
from jserve.engine import process
import jserve.runner.runner
faults.arm_all("runner.wait@1=hang")
sys.exit(process.main(int(sys.argv[1]), build.engine))
"""


@pytest.mark.slow
async def test_a_first_run_that_never_returns_is_named(capfd):
    """A real engine whose first program hangs on the device."""
    options = {"load_format": "dummy", "max_num_seqs": 2, "max_num_batched_tokens": 32}
    config = EngineConfig.of(
        **options, max_model_len=160, compile_cache="", prompt_logprobs=False, watchdog_s=60.0
    )
    command = [sys.executable, "-c", CHILD]
    client = lambda: ProcClient(config, command=lambda fd: [*command, str(fd)])  # noqa: E731
    with pytest.raises(EngineDead, match=WHY):
        await AsyncEngine(client).start()
    said = capfd.readouterr().err
    assert "warm up, 0 of" in said
    assert ", step_D" in said
