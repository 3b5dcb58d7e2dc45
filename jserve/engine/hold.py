"""Holds work back at an operator's command: requests that wait outside the scheduler, steps that are not planned.

It owns what is paused and asleep, and the one command that waits for running requests to end::

    abort    requests are ended, new ones wait                     command answered at once
    finish   new ones wait, those of before go on to their end     answered when the last has ended
    keep     new ones wait, no step is planned                     answered at once
"""

from __future__ import annotations

from collections import deque

from jserve.engine.wire import Control, Create, Submit
from jserve.errors import BadRequest

PAUSES = ("abort", "finish", "keep")
PARTS = ("kv", "weights")
"""What ``sleep`` gives back."""


class Hold:
    """What an engine holds back.

    Attributes:
        paused: True from ``pause`` to ``resume``.
        still: no step is planned: paused with ``keep``.
        asleep: the ``PARTS`` that are not on the device.
        pending: a command that waits until all that runs has ended.
    """

    def __init__(self) -> None:
        self.paused = self.still = False
        self.asleep: set[str] = set()
        self.pending: Control | None = None
        self._aside: deque[Submit | Create] = deque()

    @property
    def closed(self) -> bool:
        """New requests wait."""
        return self.paused or bool(self.asleep) or self.pending is not None

    @property
    def stopped(self) -> bool:
        """No step may be planned."""
        return self.still or bool(self.asleep)

    def __len__(self) -> int:
        return len(self._aside)

    def put(self, message: Submit | Create) -> None:
        """Let a request wait until nothing holds it back."""
        self._aside.append(message)

    def cancel(self, request_id: str) -> Submit | Create | None:
        """Take out a request that waits here."""
        for message in self._aside:
            if message.request.id == request_id:
                self._aside.remove(message)
                return message
        return None

    def take(self) -> list[Submit | Create]:
        """The requests that nothing holds back any more, in their order."""
        if self.closed:
            return []
        freed, self._aside = list(self._aside), deque()
        return freed

    def wait(self, command: Control) -> None:
        """Let ``command`` wait for what runs.

        Raises:
            BadRequest: another one waits, or nothing can end because no step is planned.
        """
        self.refuse_pending()
        if self.stopped:
            raise BadRequest(
                "running requests cannot end while no step is planned: resume first",
                field="running",
                code="paused",
            )
        self.pending = command

    def refuse_pending(self) -> None:
        """Raises BadRequest while a command waits for requests to end."""
        if self.pending is not None:
            why = f"{self.pending.action} waits for running requests to end"
            raise BadRequest(f"not now: {why}", code="operation_pending", field="action")

    def pause(self, mode: str) -> None:
        self.paused, self.still = True, mode == "keep"

    def resume(self) -> None:
        """Raises BadRequest while something is asleep."""
        if self.asleep:
            raise BadRequest(
                f"{', '.join(sorted(self.asleep))} asleep: wake first",
                field="action",
                code="asleep",
            )
        self.paused = self.still = False

    def info(self) -> dict[str, object]:
        return {"paused": self.paused, "asleep": sorted(self.asleep), "held": len(self)}
