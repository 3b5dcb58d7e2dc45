"""Runs a batch file of requests through the HTTP application and writes the answers to a file.

It owns how many lines run at once, what is tried again and how a run ends. ::

    lines -> workers (at most ``concurrency``) -> POST over a unix socket -> app -> engine
                 '-> one record per line, appended as soon as it is known

    first signal    no new lines; those that run are given ``grace_s``
    second signal   everything ends now; what has no answer yet is asked by the next run
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson
from aiohttp import web

from jserve.api.batch.answers import Answered, AnswerFile, answer_of, is_failure, refusal_of
from jserve.api.batch.lines import Json, Line, read_lines
from jserve.api.http.app import FRONT
from jserve.api.http.routes import PUBLIC
from jserve.errors import BadRequest, EngineDead, RequestFailed
from jserve.types import Lane

TRY_AGAIN = frozenset({"overloaded", "queue_full", "queue_full_tenant"})
"""Codes of refusals for lack of room: the line is posted again later."""
LANED = frozenset(
    r.path for r in PUBLIC if r.fields is not None and "lane" in r.fields.model_fields
)
"""Paths whose requests name a lane."""
MOST_WAIT_S = 30.0
TRIES = 3
"""The number of times that a line is posted whose connection breaks."""
BROKEN_WAIT_S = 1.0
OnProgress = Callable[[int, int], None]
"""Called with (lines answered, of which failed), earlier runs included."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The counts of a run, and its exit code."""

    total: int
    answered: int = 0
    """Lines with an answer, those of earlier runs included."""
    failed: int = 0
    """Of these, answers that are errors."""
    signal: int | None = None
    """The first signal that came."""
    fault: str = ""
    """The reason why the engine stopped before the end."""

    @property
    def exit_code(self) -> int:
        """0: every line has a good answer. 1: a line failed, or the engine did. 128 + signal: not
        finished."""
        if self.answered < self.total and self.signal is not None:
            return 128 + self.signal
        return int(self.failed > 0 or self.answered < self.total)


def tally(source: Path, total: int, known: Answered) -> Outcome:
    """Counts the answers of earlier runs: ``total`` lines of which some have an answer in ``known``.

    Raises:
        ConfigError: ``source`` cannot be read.
    """
    names = [line.name for line in read_lines(source)]
    answered = sum(name in known.names for name in names)
    failed = sum(name in known.failed for name in names)
    return Outcome(total=total, answered=answered, failed=failed)


async def run_batch(
    app: web.Application,
    source: Path,
    answers: AnswerFile,
    outcome: Outcome,
    *,
    concurrency: int,
    grace_s: float,
    on_progress: OnProgress = lambda answered, failed: None,
) -> Outcome:
    """Answers every line of ``source`` that ``answers`` does not hold yet; cleans ``app`` up.

    Args:
        outcome: from ``tally``; goes on from there and is returned.
        grace_s: seconds that running lines get after the first signal.

    Raises:
        ConfigError: a file cannot be read or written any more.
    """
    lines = (line for line in read_lines(source) if line.name not in answers.answered.names)
    on_progress(outcome.answered, outcome.failed)
    async with _posting(app) as post:
        run = _Run(post, app[FRONT].engine.gave_up, lines, answers, outcome, on_progress)
        work = asyncio.ensure_future(run.work(concurrency))
        with _signals(lambda number: _stop(number, run, work, grace_s)):
            try:
                await work
            except EngineDead as e:
                outcome.fault = f"{e.message}: {app[FRONT].engine.gave_up_reason}"
            except asyncio.CancelledError:
                if outcome.signal is None:
                    raise
    return outcome


Reply = tuple[int, Mapping[str, str], Json]
"""(status, headers, JSON)."""
Post = Callable[[str, bytes], Awaitable[Reply]]
"""(path, body) -> what the application says."""


class _Run:
    """The workers of one run and what they share."""

    def __init__(
        self,
        post: Post,
        gave_up: asyncio.Event,
        lines: Iterator[Line],
        answers: AnswerFile,
        outcome: Outcome,
        on_progress: OnProgress,
    ) -> None:
        self._post, self._gave_up, self._lines = post, gave_up, lines
        self._answers, self.outcome, self._on_progress = answers, outcome, on_progress
        self.stopping = asyncio.Event()

    async def work(self, concurrency: int) -> None:
        """Answers lines until there are none, with ``concurrency`` at once.

        Raises:
            EngineDead: the engine is gone for good.
            ConfigError: a file cannot be read or written any more.
        """
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(concurrency):
                    workers.create_task(self._worker())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _worker(self) -> None:
        while not self.stopping.is_set():
            line = next(self._lines, None)
            if line is None:
                return
            record = await self._answer(line)
            self._answers.write(record)
            self.outcome.answered += 1
            self.outcome.failed += is_failure(record)
            self._on_progress(self.outcome.answered, self.outcome.failed)

    async def _answer(self, line: Line) -> Json:
        """The record of ``line``. Raises EngineDead, and the line stays without an answer."""
        if line.error is not None or line.body is None:
            return refusal_of(line, line.error or BadRequest("the line asks nothing"))
        laned = {"lane": Lane.BULK.value} if line.url in LANED else {}
        payload = orjson.dumps(laned | line.body)
        while True:
            try:
                status, headers, body = await self._reach(line.url, payload)
            except ValueError:
                wrong = BadRequest("url leads to nothing that answers in JSON", field="url")
                return refusal_of(line, wrong)
            except RequestFailed as e:
                return refusal_of(line, e)
            if self._gave_up.is_set():
                raise EngineDead("the engine is gone")
            if status not in (429, 503) or body["error"]["code"] not in TRY_AGAIN:
                return answer_of(line, status, headers.get("x-request-id", ""), body)
            await asyncio.sleep(min(float(headers.get("Retry-After", "1")), MOST_WAIT_S))

    async def _reach(self, path: str, body: bytes) -> Reply:
        """Posts a line and returns the application's answer, over as many connections as it takes.

        Raises:
            ValueError: the answer is no JSON.
            RequestFailed: ``TRIES`` connections broke.
            EngineDead: one broke, and the engine is gone.
        """
        for n_broken in range(1, TRIES + 1):
            try:
                return await self._post(path, body)
            except aiohttp.ClientError as e:
                if self._gave_up.is_set():
                    raise EngineDead("the engine is gone") from None
                if n_broken == TRIES:
                    reason = f"{TRIES} connections broke, the last by {type(e).__name__}"
                    raise RequestFailed(reason, code="no_answer") from None
            await asyncio.sleep(BROKEN_WAIT_S)
        raise AssertionError("unreachable")


def _stop(number: int, run: _Run, work: asyncio.Future[None], grace_s: float) -> None:
    if run.stopping.is_set():
        work.cancel()
        return
    run.outcome.signal = number
    run.stopping.set()
    asyncio.get_running_loop().call_later(grace_s, work.cancel)


@contextlib.asynccontextmanager
async def _posting(app: web.Application) -> AsyncIterator[Post]:
    """A way to ask ``app``, over a socket of ours; cleans ``app`` up."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    with tempfile.TemporaryDirectory(prefix="jserve-batch-") as directory:
        socket = f"{directory}/socket"
        try:
            await web.UnixSite(runner, socket).start()
            connector = aiohttp.UnixConnector(socket, limit=0)
            timeout = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
                yield lambda path, body: _posted(http, path, body)
        finally:
            await runner.cleanup()


async def _posted(http: aiohttp.ClientSession, path: str, body: bytes) -> Reply:
    headers = {"Content-Type": "application/json"}
    async with http.post(f"http://batch{path}", data=body, headers=headers) as response:
        return response.status, response.headers, orjson.loads(await response.read())


@contextlib.contextmanager
def _signals(on_signal: Callable[[int], None]):
    """Calls ``on_signal`` in the loop for every SIGINT and SIGTERM."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, int(number))
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
