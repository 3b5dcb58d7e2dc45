"""Everything a handler needs in one value: the server's parts, its limits, a request's trace."""

from __future__ import annotations

import contextlib
import logging
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from jserve.api.http.auth import Keys, Tenant
from jserve.api.http.body import parse_object, read_body
from jserve.api.http.error_format import OPENAI, ErrorFormat
from jserve.api.http.errors import as_error
from jserve.api.http.quota import Account, Accounts
from jserve.api.http.repeated_refusals import HOLD_S, Refusals
from jserve.api.ops.metrics import Metrics
from jserve.api.reply.generate import Generation
from jserve.api.request.parsed import THOUGHT_NAMES, ModelCard, Served
from jserve.api.request.prepare import Preparer
from jserve.config import ServerOptions
from jserve.engine.face import EngineFace
from jserve.errors import where
from jserve.faults import point

log = logging.getLogger("jserve.api")

_ID = re.compile(r"[A-Za-z0-9._\-]{1,64}")
BIG_BODY = 64 << 10
"""Bodies above this are parsed in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one connection that are no options."""

    header_timeout_s: float = 10.0
    body_timeout_s: float = 20.0
    write_timeout_s: float = 30.0
    """A reader for whom something waits and who takes nothing at all for so long is hung up on."""
    idle_timeout_s: float = 75.0
    """The time that a connection may stay open between requests."""
    send_buffer: int = 128 << 10
    """Bytes of SO_SNDBUF: what a reader that does not read can hide from us."""
    max_connections: int = 4096
    refusal_hold_s: float = HOLD_S
    """The time for which a refusal by the engine is repeated to requests like it."""


@dataclass(slots=True, kw_only=True)
class Trace:
    """The facts of one HTTP request for headers, log and metrics."""

    id: str
    """The client's label, or ours; never a key."""
    arrival: float
    """Monotonic seconds."""
    error: str | None = None
    """Code of the error it ended with."""
    tenant: Tenant = field(default_factory=Tenant)
    """The tenant of its key."""
    account: Account = field(default_factory=Account)
    """The quota account of its tenant."""
    error_format: ErrorFormat = OPENAI
    """The shape of error bodies for its client."""


TRACE = web.RequestKey("trace", Trace)


class RunningRequests:
    """The HTTP requests being answered by the engine, by their labels; several may share one."""

    def __init__(self) -> None:
        self._runs: dict[str, list[Generation]] = {}

    @contextlib.contextmanager
    def entered(self, label: str, run: Generation) -> Iterator[None]:
        """``run`` is known under ``label`` inside."""
        runs = self._runs.setdefault(label, [])
        runs.append(run)
        try:
            yield
        finally:
            runs.remove(run)
            if not runs:
                del self._runs[label]

    def abort(self, label: str | None) -> int:
        """Ends those of ``label`` (None: all); how many there were."""
        found = [run for name, runs in self._runs.items() if label in (None, name) for run in runs]
        for run in found:
            run.abort()
        return len(found)


@dataclass(slots=True, kw_only=True)
class Front:
    """One server's parts. ``close`` ends its threads."""

    engine: EngineFace
    prepare: Preparer
    card: ModelCard
    options: ServerOptions
    keys: Keys
    metrics: Metrics
    accounts: Accounts = field(default_factory=Accounts)
    running: RunningRequests = field(default_factory=RunningRequests)
    refusals: Refusals = field(default_factory=Refusals)
    limits: Limits = field(default_factory=Limits)

    def close(self) -> None:
        self.prepare.close()

    @property
    def max_bytes(self) -> int:
        return int(self.options.max_body_mb * 2**20)

    @property
    def served(self) -> Served:
        """The model and server facts that dialects read requests against."""
        field = self.options.reasoning_field
        return Served(
            card=self.card,
            template=self.prepare.chat,
            strict=self.options.strict_params,
            thought_names=THOUGHT_NAMES if field == "both" else (field,),
        )

    @point("api.read")
    async def read(self, request: web.Request, make: Callable[[dict[str, Any]], Any]) -> Any:
        """``make`` of the JSON object in the body; big ones are worked on in a thread.

        Raises:
            JserveError: as ``read_body``, ``parse_object`` and ``make`` do.
        """
        raw = await read_body(
            request, max_bytes=self.max_bytes, timeout_s=self.limits.body_timeout_s
        )
        if len(raw) < BIG_BODY:
            return make(parse_object(raw))
        return await self.prepare.run(lambda: make(parse_object(raw)))


def reported(request: web.Request, exc: BaseException) -> Any:
    """The client's error for ``exc``; faults of ours are logged by place, without their words."""
    error = as_error(exc)
    if error.code == "internal_error":
        log.error("request %s failed: %s", request[TRACE].id, where(exc))
    request[TRACE].error = error.code
    return error


def request_id(given: str | None) -> str:
    """A client's label if it is short and plain, else one of ours. Never used as a key."""
    return given if given and _ID.fullmatch(given) else uuid.uuid4().hex


def ignored_header(ignored: tuple[str, ...]) -> dict[str, str]:
    """Tells a client which of its fields had no effect."""
    return {"x-jserve-ignored-params": ", ".join(ignored)} if ignored else {}


RESUMED = {"x-jserve-resumed": "1"}
"""A header, or a remark in a stream: another engine than the one that began went on with the answer."""


def json_response(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY),
        status=status,
        content_type="application/json",
        charset="utf-8",
        headers=headers,
    )
