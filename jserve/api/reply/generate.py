"""Runs prepared requests on the engine and yields pieces of text.

It owns one HTTP request's generations: which choice an output belongs to, ids to text, stop strings, when a choice
is over, what is counted. Several prompts run side by side and their pieces are merged in order of arrival. Leaving
the iterator, in whatever way, cancels everything still running.

Choices are numbered as OpenAI does::

    prompt 0        prompt 1                (n = 2)
    choice 0, 1     choice 2, 3             choice = prompt * n + Output.index
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from jserve.api.http.errors import Aborted
from jserve.api.request.parsed import Usage
from jserve.engine.face import EngineFace
from jserve.errors import (
    EngineDead,
    JserveError,
    NotReady,
    RequestFailed,
    StepFeatureFailed,
    error_of,
)
from jserve.faults import point
from jserve.text.stream import TextStream
from jserve.text.tokenizer import TextTokenizer
from jserve.types import FIRST_WEIGHTS, Finish, Output, Request, TokenLogprob

if TYPE_CHECKING:
    from jserve.api.ops.metrics import RequestTimer

T = TypeVar("T")
Json = dict[str, Any]
Counts = Callable[[], Usage]
Named = Callable[[JserveError], JserveError]
MERGED_BUFFER = 64
"""Items of several prompts that may wait for the reader of their merged stream."""
_END: Any = object()


@dataclass(slots=True, kw_only=True)
class TextPiece:
    """The part of one choice that one output added. The last piece of a choice carries ``finish``."""

    choice: int
    prompt: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    extra: dict[str, tuple[Any, ...]] | None = None
    """By step feature that the request names, a value for each token."""
    prompt_extra: dict[str, tuple[Any, ...]] | None = None
    """Likewise, a value for each token of the prompt."""
    finish: Finish | None = None
    stop_reason: int | str | None = None
    first: bool = False
    seed: int | None = None
    weights: str = FIRST_WEIGHTS
    """The version of the weights that drew it."""
    at: int = 0
    """Tokens of the choice before it."""

    @property
    def weight_versions(self) -> list[Json]:
        """The tokens of the piece that its weights drew, as places in those of the choice."""
        span = {"version": self.weights, "start": self.at, "end": self.at + len(self.token_ids)}
        return [span] if self.token_ids else []


@dataclass(slots=True, kw_only=True)
class _Choice:
    text: TextStream
    started: bool = False
    done: bool = False
    attempt: int = 0
    """The one that began it."""


class Generation:
    """The requests of one HTTP request, on the engine.

    Args:
        engine: runs the requests.
        tokenizer: turns ids into text.
        requests: one per prompt, all with the same parameters.
        timer: watches every piece, for the metrics.
        named: puts the engine's errors into the client's words.
    """

    def __init__(
        self,
        engine: EngineFace,
        tokenizer: TextTokenizer,
        requests: Sequence[Request],
        timer: RequestTimer | None = None,
        named: Named = lambda error: error,
    ) -> None:
        self.requests = list(requests)
        self.params = self.requests[0].params
        self._engine = engine
        self._timer = timer
        self._named = named
        self._aborted = False
        self._prompts = {request.id: i for i, request in enumerate(self.requests)}
        self._cached = [0] * len(self.requests)
        self._drafted = self._accepted = 0
        self.resumed = False
        """Part of what was told comes from an engine that is gone."""
        self._choices = [
            _Choice(text=TextStream.of(tokenizer, r.params, r.prompt_ids))
            for r in self.requests
            for _ in range(self.params.n)
        ]

    @property
    def n_choices(self) -> int:
        return len(self._choices)

    @property
    def usage(self) -> Usage:
        """Counts so far; exact when the pieces are through."""
        return Usage(
            prompt=sum(len(r.prompt_ids) for r in self.requests),
            completion=sum(c.text.n_tokens for c in self._choices),
            cached=sum(self._cached),
            drafted=self._drafted,
            accepted=self._accepted,
        )

    def abort(self) -> None:
        """End every choice from outside; ``pieces`` then raises ``Aborted``."""
        self._aborted = True
        for request in self.requests:
            self._engine.abort(request.id)

    async def pieces(self) -> AsyncGenerator[TextPiece, None]:
        """Every piece of every choice until all have finished.

        Raises:
            JserveError: the engine refused a request or failed; nothing follows.
        """
        left = self.n_choices
        try:
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    piece = self._piece(output)
                    if piece is None:
                        continue
                    if self._timer is not None:
                        self._timer.piece(piece)
                    left -= piece.finish is not None
                    yield piece
                    if not left:
                        return
            raise EngineDead("the engine ended the request without an answer")
        except JserveError as e:
            raise self._named(e) from None
        finally:
            for request in self.requests:
                self._engine.abort(request.id)

    def _outputs(self) -> AsyncGenerator[Output, None]:
        """The engine's own generator where there is one request: nothing re-yields its outputs."""
        streams = [self._engine.generate(request) for request in self.requests]
        return streams[0] if len(streams) == 1 else merged(streams)

    @point("api.piece")
    def _piece(self, output: Output) -> TextPiece | None:
        prompt = self._prompts[output.request_id]
        number = prompt * self.params.n + output.index
        choice = self._choices[number]
        if choice.done:
            return None
        if self._aborted:  # also before the engine knew of it
            raise Aborted("the request was ended by an operator")
        if output.finish in (Finish.ERROR, Finish.ABORT):
            raise failure(output)
        self._cached[prompt] = max(self._cached[prompt], output.n_cached)
        if not choice.started:
            choice.attempt = output.attempt
        self.resumed = self.resumed or output.attempt != choice.attempt
        at = choice.text.n_tokens
        text, n_tokens, finish, reason = _advance(choice.text, output)
        self._drafted += output.n_drafted
        self._accepted += min(
            output.n_accepted, n_tokens
        )  # a stop string may cut an accepted block
        first, choice.started, choice.done = not choice.started, True, finish is not None
        if choice.text.stopped is not None:
            self._engine.abort(self.requests[prompt].id, output.index)
        return TextPiece(
            choice=number,
            prompt=prompt,
            text=text,
            token_ids=output.token_ids[:n_tokens],
            logprobs=None if output.logprobs is None else output.logprobs[:n_tokens],
            prompt_logprobs=output.prompt_logprobs,
            extra=output.extra and {k: values[:n_tokens] for k, values in output.extra.items()},
            prompt_extra=output.prompt_extra,
            finish=finish,
            stop_reason=reason,
            first=first,
            seed=output.seed,
            weights=output.weights,
            at=at,
        )


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all sources in order of arrival; the first error ends it."""
    queue: asyncio.Queue[Any] = asyncio.Queue(MERGED_BUFFER)

    async def pump(source: AsyncGenerator[T, None]) -> None:
        last: Any = _END
        try:
            async with aclosing(source):
                async for item in source:
                    await queue.put(item)
        except Exception as e:
            last = e
        await queue.put(last)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is _END:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _advance(
    stream: TextStream, output: Output
) -> tuple[str, int, Finish | None, int | str | None]:
    """(text, tokens used, finish, stop reason) after ``output`` went through its choice's text."""
    delta = stream.push(output.token_ids, terminator=output.finish is Finish.STOP)
    text = delta.text
    if output.finish is not None and delta.stop is None:
        text += stream.flush().text
    if stream.stopped is not None:
        return text, delta.n_tokens, Finish.STOP, stream.stopped
    return text, delta.n_tokens, output.finish, output.stop_reason


def failure(output: Output) -> JserveError:
    """The error an output with finish ERROR or ABORT stands for. Faults keep their details."""
    if output.finish is Finish.ABORT or output.error_code == "draining":
        return NotReady("the server is shutting down", code="draining", retry_after=5)
    error = error_of(
        output.error_code,
        output.error or "the request failed",
        field=output.error_field,
        retry_after=output.retry_after,
    )
    return hidden(error) if error.status == 500 else error


def hidden(error: JserveError) -> JserveError:
    """A fault in words for a client: its own may name files or hold a prompt."""
    if isinstance(error, EngineDead | StepFeatureFailed):
        return error
    return RequestFailed("the engine failed on this request", code=error.code)
