"""Buffers a request's outputs for one consumer: one ``Stream`` per running request.

It owns the rule that every choice of a request gets exactly one terminal output, what was told of each so that
another engine can go on behind it, and what becomes of outputs whose consumer is slow. Used on one event loop only.

A sequence never waits for its reader: that would keep its pages from others. It runs on, and what its
reader has not taken is merged, so that a slow reader gets larger pieces and not more of them. What
waits is ids and log-probabilities, whose bytes are counted and bounded by whoever fills the stream::

    fast reader    [t1]                 [t2]                 [t3]
    slow reader    [t1]                 [t2 t3 ... t65]      [t66 ... t80]
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from jserve.faults import point
from jserve.ports import Clock
from jserve.types import Finish, Output, Request

if TYPE_CHECKING:
    from jserve.engine.replica import Replica

MERGED_TOKENS = 64
"""Most tokens in a merged output, so that no single write to a slow reader gets large."""
_BYTES_OUTPUT, _BYTES_TOKEN, _BYTES_LOGPROB, _BYTES_TOP = 96, 8, 64, 16


class Stream:
    """The outputs of ``request`` that its consumer has not taken yet.

    Attributes:
        request: as it was asked; of a fleet, with ``is_long`` decided.
        attempt: the number of the attempt whose outputs count.
        open: choices without a terminal output.
        said: for each choice the ids that came.
        weights: what they come from; None where nobody says.
        replica: works on it; None while nobody does.
        n_bytes: roughly what the outputs weigh that wait here.
    """

    def __init__(self, request: Request, *, clock: Clock) -> None:
        self.request = request
        self.attempt = 0
        self.open = set(range(request.params.n))
        self.said: list[list[int]] = [[] for _ in self.open]
        self.weights: Any = None
        self.replica: Replica | None = None
        self.n_bytes = 0
        self.n_idle = 0
        """Attempts in a row that were to go on, this one included, and have told nothing."""
        self._clock = clock
        self._outputs: deque[Output] = deque()
        self._waiting_since = 0.0
        self._arrived = asyncio.Event()

    @property
    def lag_s(self) -> float:
        """Seconds since the consumer took something, or since there is something to take; 0 when
        nothing waits."""
        return self._clock() - self._waiting_since if self._outputs else 0.0

    def excuse(self) -> None:
        """The attempt is given up, and its engine lives: nothing speaks against it."""
        self.n_idle = max(0, self.n_idle - 1)

    def next_attempt(self) -> Request:
        """The request that goes on behind what was told, as another attempt. Outputs of earlier ones are
        not taken any more."""
        self.attempt, self.n_idle = self.attempt + 1, self.n_idle + 1
        said = tuple(tuple(ids) if i in self.open else None for i, ids in enumerate(self.said))
        return replace(self.request, attempt=self.attempt, said=said)

    @point("stream.put")
    def put(self, output: Output) -> bool:
        """Queue an output. False, and nothing done, when its choice has ended or never was, or when it is
        of another attempt."""
        if output.index not in self.open or output.attempt != self.attempt:
            return False
        if output.finish is not None:
            self.open.discard(output.index)
        if output.token_ids:
            self.said[output.index] += output.token_ids
            self.n_idle = 0
        if not self._outputs:
            self._waiting_since = self._clock()
        last = self._outputs[-1] if self._outputs else None
        self.n_bytes += _weight(output)
        if last is not None and self._may_merge(last, output):
            self.n_bytes -= _BYTES_OUTPUT
            self._outputs[-1] = _merged(last, output)
        else:
            self._outputs.append(output)
        self._arrived.set()
        return True

    def _may_merge(self, last: Output, output: Output) -> bool:
        """True when both can be sent as one: the same choice, attempt and weights, neither in error. Where a stop
        string may cut, drafts stay with the tokens that they became, so that those cut off are not counted."""
        n_tokens = len(last.token_ids) + len(output.token_ids)
        good = output.finish in (None, Finish.STOP, Finish.LENGTH)
        cuts = bool(self.request.params.stop) and (last.n_drafted or output.n_drafted)
        same = last.index == output.index and last.attempt == output.attempt
        same = same and last.weights == output.weights
        return same and good and not cuts and n_tokens <= MERGED_TOKENS

    async def get(self) -> Output | None:
        """The next output, waiting for it; None when all choices have ended and all was taken."""
        while not self._outputs:
            if not self.open:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        output = self._outputs.popleft()
        self.n_bytes -= _weight(output)
        self._waiting_since = self._clock()
        return output

    def end(
        self,
        finish: Finish,
        message: str | None = None,
        code: str | None = None,
        *,
        index: int | None = None,
    ) -> bool:
        """Put the terminal output of all open choices, or of choice ``index``; False if none was
        open."""
        ended = sorted(self.open if index is None else self.open & {index})
        for i in ended:
            self.put(
                Output(
                    request_id=self.request.id,
                    index=i,
                    finish=finish,
                    error=message,
                    error_code=code,
                    attempt=self.attempt,
                )
            )
        return bool(ended)


def _merged(last: Output, output: Output) -> Output:
    """``output`` behind ``last``, which is not a terminal one."""
    logprobs = output.logprobs
    if last.logprobs is not None:
        logprobs = last.logprobs + (output.logprobs or ())
    extra = output.extra
    if last.extra is not None:
        extra = {
            name: values + (output.extra or {}).get(name, ()) for name, values in last.extra.items()
        }
    return msgspec.structs.replace(
        last,
        extra=extra,
        token_ids=last.token_ids + output.token_ids,
        logprobs=logprobs,
        finish=output.finish,
        stop_reason=output.stop_reason,
        n_cached=max(last.n_cached, output.n_cached),
        n_drafted=last.n_drafted + output.n_drafted,
        n_accepted=last.n_accepted + output.n_accepted,
    )


def _weight(output: Output) -> int:
    scored = [*(output.logprobs or ()), *(output.prompt_logprobs or ())]
    n_top = sum(len(entry.top_ids) for entry in scored if entry is not None)
    given = [*(output.extra or {}).values(), *(output.prompt_extra or {}).values()]
    values = [value for of_tokens in given for value in of_tokens]
    n_arrays = sum(value.nbytes for value in values if isinstance(value, np.ndarray))
    n_tokens = len(output.token_ids) + len(values)
    return (
        _BYTES_OUTPUT
        + _BYTES_TOKEN * n_tokens
        + _BYTES_LOGPROB * len(scored)
        + _BYTES_TOP * n_top
        + n_arrays
    )
