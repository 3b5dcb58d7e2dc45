"""Checks in a worker process whether a grammar can be compiled, with a time limit.

It owns the process, its time limit, the results so far and the order of checks. One check at a time, in a thread of
its own: nobody's tokens or templates wait for it. Tenants take turns, so that what one sends delays another by one
check at most, and none may fill the queue.
"""

from __future__ import annotations

import select
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256

import msgspec

from jserve.errors import BadRequest, Overloaded, RateLimited, RequestFailed
from jserve.faults import point
from jserve.grammar.spec import FIELD, bounded
from jserve.grammar.vocab import Vocabulary
from jserve.grammar.worker import Answer, VocabularyTable, read_frame, write_frame
from jserve.sampling import StructuredOutputs

TIME_LIMIT_S = 5.0
START_LIMIT_S = 60.0
MAX_QUEUED = 512
"""Different grammars that may wait. A grammar that many requests ask for at once counts as one."""
MAX_QUEUED_TENANT = 128
"""Of one tenant, where tenants are distinguished."""
MAX_VERDICTS = 4096


class GrammarChecker:
    """``check`` grammars before they are let in. ``close`` ends the process.

    Args:
        make_vocabulary: called once, when the first grammar comes.
        time_limit_s: seconds one compilation may take.
        command: arguments of the worker process.
    """

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        *,
        time_limit_s: float = TIME_LIMIT_S,
        command: tuple[str, ...] = (sys.executable, "-m", "jserve.grammar.worker"),
    ) -> None:
        self._make_vocabulary = make_vocabulary
        self._time_limit_s = time_limit_s
        self._command = command
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jserve-checker")
        self._process: subprocess.Popen[bytes] | None = None
        self._verdicts: OrderedDict[bytes, Answer] = OrderedDict()
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        """By tenant; the first one's turn is next."""
        self._asked: dict[str, Counter[bytes]] = {}
        """The number of a tenant's jobs in ``_waiting`` ask for the same grammar."""
        self.n_killed = 0

    def check(self, spec: StructuredOutputs, tenant: str = "") -> Future[None] | None:
        """None when ``spec`` is known to be fine; else a future that raises BadRequest if not.

        Raises:
            BadRequest: too large to be looked at, or known to be wrong.
            Overloaded: too many wait. RateLimited: too many of ``tenant`` do.
        """
        bounded(spec)
        payload = msgspec.msgpack.encode(spec)
        key = sha256(payload).digest()
        known = self._known(key)
        if known is not None:
            return _judge(known)
        job = _Job(key, payload)
        with self._lock:
            self._admit(key, tenant)
            self._waiting.setdefault(tenant, deque()).append(job)
        self._thread.submit(self._next)
        return job.done

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for job in (job for jobs in self._waiting.values() for job in jobs):
                job.done.cancel()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _admit(self, key: bytes, tenant: str) -> None:
        """Count ``key``, or raise if it is one grammar too many among those that wait."""
        own = self._asked.setdefault(tenant, Counter())
        if key not in own:
            if sum(map(len, self._asked.values())) >= MAX_QUEUED:
                raise Overloaded("too many grammars wait to be compiled", retry_after=1)
            if tenant and len(own) >= MAX_QUEUED_TENANT:
                raise RateLimited(
                    "too many grammars of this key wait to be compiled", retry_after=1
                )
        own[key] += 1

    def _take(self) -> _Job:
        """The first job of the tenant whose turn it is; that tenant's next turn comes last."""
        tenant, jobs = self._waiting.popitem(last=False)
        job, asked = jobs.popleft(), self._asked[tenant]
        asked[job.key] -= 1
        if not asked[job.key]:
            del asked[job.key]
        if jobs:
            self._waiting[tenant] = jobs
        if not asked:
            del self._asked[tenant]
        return job

    def _next(self) -> None:
        """Check the job whose turn it is."""
        with self._lock:
            job = self._take()
        if not job.done.set_running_or_notify_cancel():
            return  # whoever asked has left
        try:
            job.done.set_result(self._check(job.key, job.payload))
        except BaseException as error:
            job.done.set_exception(error)

    def _check(self, key: bytes, payload: bytes) -> None:
        said = self._known(key) or self._ask(payload)
        with self._lock:
            self._verdicts[key] = said
            while len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        _judge(said)

    def _known(self, key: bytes) -> Answer | None:
        with self._lock:
            found = self._verdicts.get(key)
            if found is not None:
                self._verdicts.move_to_end(key)
            return found

    @point("grammar.check")
    def _ask(self, payload: bytes) -> Answer:
        process = self._running()
        try:
            assert process.stdin is not None
            write_frame(process.stdin, payload)  # type: ignore[arg-type]
        except OSError:
            return self._given_up("ended")
        return self._answer(process, self._time_limit_s)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            vocab = self._make_vocabulary()
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            table = VocabularyTable(vocab.tokens, vocab.special_ids, vocab.eos_ids)
            assert self._process.stdin is not None
            write_frame(self._process.stdin, msgspec.msgpack.encode(table))  # type: ignore[arg-type]
            self._answer(self._process, START_LIMIT_S)
            if self._process is None:  # no grammar was at fault, so none is judged
                raise RequestFailed("the process that checks grammars does not start")
        return self._process

    def _answer(self, process: subprocess.Popen[bytes], limit_s: float) -> Answer:
        assert process.stdout is not None
        until = time.monotonic() + limit_s
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return self._given_up(f"took longer than {limit_s:g} s")
        payload = read_frame(process.stdout)  # type: ignore[arg-type]  # written in one piece
        if not payload:
            return self._given_up("needs too much memory")
        return msgspec.msgpack.decode(payload, type=Answer)

    def _given_up(self, why: str) -> Answer:
        """The grammar's fault: what killed the worker is not tried again."""
        process, self._process = self._process, None
        self.n_killed += 1
        if process is not None:
            process.kill()
            process.wait()
        return Answer(f"{FIELD}: compiling the grammar {why}", FIELD, "grammar_too_large")


@dataclass(slots=True)
class _Job:
    key: bytes
    payload: bytes
    done: Future[None] = field(default_factory=Future)


def _judge(said: Answer) -> None:
    if said.message:
        raise BadRequest(said.message, field=said.field, code=said.code)
