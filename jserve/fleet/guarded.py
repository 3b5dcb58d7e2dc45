"""Calls what has to be done again and again, whatever becomes of it: an error is logged once, and the rest is done."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)


class GuardedCalls:
    """Knows which errors it has logged: those of one type from one line of code are of one kind."""

    def __init__(self) -> None:
        self._kinds: set[tuple[type[Exception], str, int | None]] = set()

    def run(self, calls: Iterable[Callable[[], object]]) -> None:
        """Call each of ``calls``; one that raises keeps none of the others from it."""
        for call in calls:
            try:
                call()
            except Exception as error:  # whatever it is: who calls again and again must not end
                self._log_once(error)

    def _log_once(self, error: Exception) -> None:
        at = traceback.extract_tb(error.__traceback__)[-1]
        kind = type(error), at.filename, at.lineno
        if kind not in self._kinds:
            self._kinds.add(kind)
            log.error("the fleet goes on; an error of this kind is logged once", exc_info=error)
