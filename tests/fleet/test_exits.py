"""A replica that is killed is left as soon as the kernel ends its process, whenever that closes its connections."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import time

import pytest

from jserve.fleet.exits import is_ending, machine_id
from tests.fleet.test_face import World, answers, begun, requests, undisturbed, until


@pytest.fixture
def child():
    """A process that does nothing; dead, it stays there until somebody waits for it."""
    found = subprocess.Popen(["sleep", "600"])
    yield found
    found.kill()
    found.wait()


def test_a_process_is_ending_from_its_end_to_that_of_its_name(child):
    assert not is_ending(child.pid)
    child.kill()
    end = time.monotonic() + 10.0
    while not is_ending(child.pid):
        assert time.monotonic() < end
    child.wait()
    assert not is_ending(child.pid)


def test_its_name_may_be_anything(tmp_path):
    """The line has it in brackets before the flags, unescaped."""
    program = tmp_path / ")4 4 4 4 4 4 4 "
    program.write_bytes(b"#!/bin/sh\nread line\n")
    program.chmod(0o755)
    with subprocess.Popen([program], stdin=subprocess.PIPE) as found:
        assert not is_ending(found.pid)
        found.kill()


def test_this_process_is_one_of_this_machine():
    assert not is_ending(os.getpid())
    assert machine_id() == machine_id() != ""


@pytest.mark.parametrize("case", ["ends", "lives", "is another machine's"])
async def test_what_a_process_that_ends_worked_on_goes_on_elsewhere(child, case, caplog):
    """Its connection stays open and says nothing. Only time tells of a process that lives or cannot be seen."""
    caplog.set_level(logging.CRITICAL)
    asked = requests(4)
    whole = await undisturbed(asked)
    async with World(2) as world:
        fleet, source = world.fleet, world.source
        running = asyncio.ensure_future(answers(fleet, asked))
        await begun(fleet, len(asked))
        busy = max(fleet.members, key=lambda one: one.n_open)
        busy.info["pid"] = child.pid
        if case == "is another machine's":
            busy.info["machine"] = "another"
        source.hold(busy.name, True)
        if case != "lives":
            child.kill()
        assert await asyncio.wait_for(running, 20.0) == whole
        ends = case == "ends"
        assert fleet.counters["engine_deaths"] == ends
        assert fleet.counters["silent"] == (not ends)
        source.hold(busy.name, False)
        await until(lambda: len(fleet.members) == 2)
