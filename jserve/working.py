"""Names threads after the program they compile or wait for, so that stack dumps and the watchdog name it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "at "
"""Begins the name of a thread that works on a program."""


@contextmanager
def working_on(what: str) -> Iterator[None]:
    """This thread is named ``at WHAT`` meanwhile."""
    thread = threading.current_thread()
    before, thread.name = thread.name, PREFIX + what
    try:
        yield
    finally:
        thread.name = before


def at_work() -> list[str]:
    """The work of this process's threads now."""
    names = (thread.name for thread in threading.enumerate())
    return [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
