"""Keeps requests that lost their engine until another one goes on with them, behind what was told already.

It owns who may go on, and where. A draw is a function of (seed, position), penalties and structures are functions of
the tokens alone, so what follows is what the lost engine would have said. One that ends every engine it meets must not
end them all: who was taken up again and is lost, so many times in a row, before it told anything new ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from jserve.engine.replica import Replica
from jserve.engine.streams import Stream
from jserve.errors import JserveError, WeightsChanged
from jserve.types import Finish


class Resumption:
    """Streams between two engines.

    Args:
        patience: attempts to go on, in a row, that may be lost with their engine before they told something.
            Whoever used them up may be what ends engines.

    Attributes:
        n_resumed: attempts that went on behind another one.
    """

    def __init__(self, patience: int = 0) -> None:
        self.n_resumed = 0
        self._patience = patience
        self._waiting: dict[str, Stream] = {}

    def park(self, streams: Iterable[Stream], message: str, code: str | None) -> None:
        """Keep those of ``streams`` that may go on; the others end in error with ``message`` and ``code``."""
        for stream in streams:
            if stream.n_idle <= self._patience and stream.request.cache is None:
                self._waiting[stream.request.id] = stream
            else:  # a cache handle is gone with its engine
                stream.end(Finish.ERROR, message, code)

    def forget(self, request_id: str) -> None:
        """Nobody waits for this request any more."""
        self._waiting.pop(request_id, None)

    def take(self) -> list[Stream]:
        """All that wait and are open, oldest first; they wait no more."""
        streams, self._waiting = list(self._waiting.values()), {}
        return [stream for stream in streams if stream.open]

    def go_on(self, stream: Stream, replica: Replica) -> None:
        """``replica`` goes on where ``stream`` is; one that cannot be gone on with ends in error."""
        told = any(stream.said)
        try:
            if told and stream.weights != replica.weights:
                raise WeightsChanged("the engine that could go on has other weights")
            replica.work_on(stream, stream.next_attempt())
        except JserveError as error:
            stream.end(Finish.ERROR, error.message, error.code)
            return
        self.n_resumed += 1
