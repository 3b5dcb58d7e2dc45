"""Ends a process that makes no progress, with a dump of its stacks and the work that it was doing.

The engine calls ``at(what)`` when it begins something and ``idle()`` when it waits for others. A kernel whose
barriers do not match, a compiler that never returns or a driver that hangs leave a process that is not dead and
answers nobody; only its end can be noticed, by whoever restarts it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from jserve.ports import Clock
from jserve.working import at_work

log = logging.getLogger(__name__)

EXIT_STUCK = 4
"""Exit code of a process that its watchdog ended."""
LOOKS_S = 1.0
"""Between two looks at the clock, or a tenth of the limit where that is shorter."""
GRACE_S = 60.0
"""Beyond the limit, after which a process whose interpreter stands still ends, too."""


class Watchdog:
    """Looks from a thread of its own whether what was begun has ended. Where a call keeps the interpreter's lock that
    thread stands as well: then ``faulthandler`` ends the process, with exit code 1.

    Args:
        limit_s: seconds that one thing may take; 0: any time.
        end: called with ``EXIT_STUCK``; does not return.
        stacks: where all threads' stacks go; needs a file descriptor.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        end: Callable[[int], None] = os._exit,
        stacks: TextIO | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.limit_s = limit_s
        self._end, self._stacks, self._clock = end, stacks, clock
        self._now: tuple[str, float] | None = None
        """The work under way and its start; None: nothing runs."""
        if limit_s:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def at(self, what: str) -> None:
        """Something begins, or has come further: its time counts from now."""
        self._now = (what, self._clock())

    def idle(self) -> None:
        """Nothing is being done: whatever is waited for may take any time."""
        self._now = None

    def look(self) -> None:
        """End the process if what is being done takes longer than the limit."""
        now = self._now
        took = 0.0 if now is None else self._clock() - now[1]
        if now is None or took < self.limit_s:
            return
        what = ", ".join([now[0], *at_work()])
        log.error("no progress for %.0f s (watchdog_s): %s; code %d", took, what, EXIT_STUCK)
        faulthandler.dump_traceback(file=self._stacks or sys.stderr, all_threads=True)
        self._end(EXIT_STUCK)

    def _watch(self) -> None:
        while True:
            self._put_off()
            time.sleep(min(LOOKS_S, self.limit_s / 10))
            self.look()

    def _put_off(self) -> None:
        """The end by ``faulthandler``, whose thread needs no interpreter: not while nothing is done, nor where stderr
        is no file."""
        if self._now is None:
            faulthandler.cancel_dump_traceback_later()
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stacks = self._stacks or sys.stderr
            faulthandler.dump_traceback_later(self.limit_s + GRACE_S, exit=True, file=stacks)
