"""Every fault point, fired at its k-th call while a fixed set of requests runs (SQLite's loop).

After each run: every client got exactly one end, what others got is what they get without a fault,
pages and slots are back, the engine is alive or was restarted, and a request asked alone is answered
as before. A point whose fault is one request's own may cost that one only; a step that raises once
costs nobody; a fault of the engine itself may cost all that run, with an error each.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import logging
from pathlib import Path
from typing import Any

import pytest

from jserve import faults
from tests.hardening.world import BROKEN, CUT, GOOD, REFUSED, Got, checker, play, probe, world

HARMLESS = {"grammar.mask", "runner.launch", "runner.collect"}
"""A step that raises once is computed again; masks that fail together are computed one by one."""
OF_ONE = {
    "api.piece",
    "api.prepare",
    "api.read",
    "engine.open",
    "grammar.check",
    "grammar.compile",
    "grammar.follow",
    "grammar.take",
    "sse.end",
    "sse.write",
    "stream.put",
    "template.render",
    "text.decode",
    "text.encode",
}
OF_ENGINE = {
    "kv.extend",
    "kv.publish",
    "sched.commit",
    "sched.plan",
    "sched.submit",
    "wire.receive",
    "wire.send",
}
ELSEWHERE = {"disk.read", "disk.write", "runner.reset", "runner.wait"}
"""Exercised in the tests below, in tests/kv/test_disk.py with real files, or in engine/test_watchdog.py."""
HERE = sorted(HARMLESS | OF_ONE | OF_ENGINE)
CODES = {
    *("internal_error", "engine_step_failed", "engine_dead", "grammar_failed"),
    *("starting", "invalid_value", "invalid_schema"),
}


ROOT = Path(__file__).parent.parent.parent


def declared() -> set[str]:
    """The names of all points in the source, whichever modules are loaded."""
    found = set()
    for path in (ROOT / "jserve").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "point":
                assert isinstance(node.args[0], ast.Constant), f"{path}: a name must be a literal"
                found.add(node.args[0].value)
    return found


def test_every_point_is_exercised():
    assert declared() == {*HERE, *ELSEWHERE}
    for name in ELSEWHERE:
        armed = (f'faults.armed("{name}"', f'faults.arm_all("{name}@')
        texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
        assert any(a in text for a in armed for text in texts), name


def test_a_point_that_is_not_armed_costs_nothing():
    """Its method is what stands in the source: no wrapper, no flag, no look-up."""
    import jserve.runner.disk
    import jserve.runner.runner  # noqa: F401

    assert set(faults.POINTS) == declared()
    for places in faults.POINTS.values():
        for place in places:
            owner: Any = importlib.import_module(place.module)
            for part in place.name.split("."):
                owner = inspect.getattr_static(owner, part)
            assert inspect.isfunction(owner)
            assert not hasattr(owner, "__wrapped__")
            assert owner.__code__.co_name == place.name.rsplit(".", 1)[1]
            assert owner.__code__.co_filename.endswith(place.module.replace(".", "/") + ".py")


_clean: list[list[Got]] = []


async def clean() -> list[Got]:
    """What the clients get without a fault."""
    if not _clean:
        async with world() as made:
            told = await play(made)
            assert await play(made) == told, "the workload must repeat"
            assert all(got.kind == GOOD for got in told)
            _clean.append(told)
    return _clean[0]


async def fire(name: str, at: int) -> bool:
    """One run with ``name`` armed at its ``at``-th call, and all checks; False if it did not fire."""
    wanted = await clean()
    if name == "grammar.check":
        checker()._verdicts.clear()
    async with world() as made:
        with faults.armed(name, at) as shot:
            told = await asyncio.wait_for(play(made), 20.0)
        await made.idle()
        hurt = [i for i, (got, want) in enumerate(zip(told, wanted, strict=True)) if got != want]
        for i in hurt:
            check_end(told[i], wanted[i], name)
        if name in HARMLESS:
            assert not hurt
        if name in OF_ONE:
            assert len(hurt) <= 1, [told[i] for i in hurt]
        if name.startswith("grammar."):
            assert set(hurt) <= {3, 4}
        if name in OF_ENGINE:
            assert made.face.counters["engine_deaths"] == shot.fired
        else:
            assert made.face.counters["engine_deaths"] == 0
        assert await probe(made) == wanted[0]
        await made.idle()
        return shot.fired


def check_end(got: Got, want: Got, name: str) -> None:
    """One end, an error of a known kind, and nothing before it that was not true."""
    assert got.kind in (REFUSED, BROKEN, CUT)
    if got.kind == CUT:
        assert name in ("sse.end", "sse.write"), "a connection ends without a word"
    else:
        assert got.code in CODES, got
    for said, whole in zip(got.texts, want.texts, strict=False):
        assert whole.startswith(said), "what came before the error is part of the answer"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", HERE)
async def test_a_fault_early_and_a_fault_late(name, caplog):
    caplog.set_level(logging.CRITICAL)
    assert await fire(name, 1)
    await fire(name, 6)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", HERE)
async def test_a_fault_at_every_call(name, caplog):
    caplog.set_level(logging.CRITICAL)
    at = 1
    while await fire(name, at):
        at += 1
    assert at > 1, "the workload never reaches this point"


async def test_a_step_that_raises_and_a_reset_that_raises_end_the_engine_once(caplog):
    caplog.set_level(logging.CRITICAL)
    wanted = await clean()
    async with world() as made:
        with faults.armed("runner.collect", 5), faults.armed("runner.reset", 1) as shot:
            told = await asyncio.wait_for(play(made), 20.0)
        assert shot.fired
        for got, want in zip(told, wanted, strict=True):
            if got != want:
                check_end(got, want, "runner.reset")
        await made.idle()
        assert made.face.counters["engine_deaths"] == 1
        assert await probe(made) == wanted[0]


def test_arming_leaves_no_trace():
    from jserve.text.stream import TextStream

    before = TextStream.push
    with faults.armed("text.decode", 10**9) as shot:
        assert TextStream.push is not before
    assert TextStream.push is before
    assert not shot.fired


@pytest.mark.parametrize("text", ["text.decode", "text.decode@0", "text.decode@x", "@"])
def test_a_wrong_list_of_points_is_refused(text):
    with pytest.raises(ValueError, match=r"fault point"):
        faults.arm_all(text)


def test_a_list_of_points_arms_those_that_are_here():
    from jserve.text.stream import TextStream

    before = TextStream.push
    try:
        assert faults.arm_all("text.decode@3, of.another.process@1") == ["text.decode@3"]
        assert TextStream.push is not before
    finally:
        TextStream.push = before  # type: ignore[method-assign]
