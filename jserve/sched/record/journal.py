"""Writes and reads the scheduler's inputs as JSON lines.

One line per event, in order; ``plan`` lines hold the decision, which a replay compares::

    {"type": "start", "options": {...}, "limits": {...}, "weights": "...", "sharding": "tp=1"}
    {"type": "arrival", "now": 1.0, "request": {...}}
    {
        "type": "plan",
        "now": 2.0,
        "decision": {"id": 0, "rows": [["r1", 0, 3, 0, 16, false, ...]], "loads": [], "pages": 123},
    }
    {"type": "commit", "now": 3.0, "step": 0, "tokens": {...}, "n_ok": {...}, "device_us": 812.0}
    {"type": "cancel", "now": 4.0, "id": "r1", "index": null}
    {"type": "expire", "now": 4.5}
    {"type": "create", "now": 4.0, "request": {...}, "ttl_s": 60.0}
    {"type": "renew", "now": 4.0, "tenant": "", "name": "manual", "ttl_s": 60.0}
    {"type": "drop", "now": 4.0, "tenant": "", "name": "manual"}
    {"type": "stored", "now": 0.0, "digests": ["..."]}
    {"type": "fetched", "now": 4.5, "answers": [[1, true]]}
    {"type": "guided", "id": "r1", "index": 0, "forced": [5, 6], "ended": false, ...}
    {"type": "recover", "now": 5.0, "error": "..."}
    {"type": "weights", "now": 6.0, "version": "step-7", "keep": false, "name": "...", "directory": "..."}
    {"type": "operated", "now": 7.0, "action": "pause", "running": "keep", "parts": []}
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence as Seq
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from jserve.errors import ConfigError
from jserve.ports import Verdict
from jserve.types import PromptLogprobs, Request, RowPlan, StepPlan, StepResult


class Array(msgspec.Struct, frozen=True):
    """A numpy array: bytes travel as base64, so NaN and -inf survive JSON."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray | None) -> Array | None:
        if array is None:
            return None
        return cls(dtype=array.dtype.str, shape=array.shape, data=array.tobytes())

    def numpy(self) -> np.ndarray:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class DecidedRow(msgspec.Struct, frozen=True, array_like=True):
    """A row of a plan; in the file a list of its fields in this order."""

    request_id: str
    index: int
    slot: int
    start: int
    count: int
    from_slot: bool
    emits: bool
    scored: bool
    drafts: tuple[int, ...]
    backfill: bool

    @classmethod
    def of(cls, row: RowPlan) -> DecidedRow:
        return cls(
            request_id=row.choice.request.id,
            index=row.choice.index,
            slot=row.slot,
            start=row.start,
            count=row.count,
            from_slot=row.from_slot,
            emits=row.emits,
            scored=bool(row.targets),
            drafts=tuple(row.drafts),
            backfill=row.backfill,
        )


class Decision(msgspec.Struct, frozen=True):
    """The decision of a plan."""

    id: int
    rows: tuple[DecidedRow, ...]
    loads: tuple[int, ...]
    pages: int
    """Checksum of the page table."""
    moves: tuple[tuple[int, int, bool], ...] = ()
    """(page, host page, out) each."""
    n_draft: int = 0
    old_weights: bool = False
    vocab_rows: tuple[int, ...] = ()
    """Of the loads, each as ``SlotLoad.vocab_row``."""

    @classmethod
    def of(cls, plan: StepPlan | None) -> Decision | None:
        if plan is None:
            return None
        return cls(
            id=plan.id,
            rows=tuple(DecidedRow.of(row) for row in plan.rows),
            loads=tuple(load.slot for load in plan.loads),
            pages=_checksum(plan),
            moves=tuple((move.page, move.host, move.out) for move in plan.moves),
            n_draft=plan.n_draft,
            old_weights=plan.old_weights,
            vocab_rows=tuple(load.vocab_row for load in plan.loads),
        )


def _checksum(plan: StepPlan) -> int:
    """Of all page tables."""
    found = 0
    for table in plan.group_tables or (plan.page_table_RM,):
        found = zlib.crc32(np.ascontiguousarray(table).tobytes(), found)
    return found


class Started(msgspec.Struct, frozen=True, tag="start"):
    """The makings of the engine, as ``record.start`` reads it. A journal that no engine wrote has none."""

    options: dict[str, Any]
    limits: dict[str, Any]
    weights: str = ""
    """Stamp of their files; empty: they were of no files."""
    sharding: str = ""
    """Name of the layout of the weights."""


class Arrival(msgspec.Struct, frozen=True, tag="arrival"):
    now: float
    request: Request


class Cancelled(msgspec.Struct, frozen=True, tag="cancel"):
    now: float
    id: str
    index: int | None


class Created(msgspec.Struct, frozen=True, tag="create"):
    now: float
    request: Request
    ttl_s: float


class Renewed(msgspec.Struct, frozen=True, tag="renew"):
    now: float
    tenant: str
    name: str
    ttl_s: float


class Dropped(msgspec.Struct, frozen=True, tag="drop"):
    now: float
    tenant: str
    name: str


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """The disk's pages at the start."""

    now: float
    digests: list[bytes]


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """Reads from disk were answered: (ticket, found)."""

    now: float
    answers: list[tuple[int, bool]]


class Planned(msgspec.Struct, frozen=True, tag="plan"):
    now: float
    decision: Decision | None
    waited: bool = False
    """True when nothing was planned for the sake of drafts, whatever could have run."""


class LoggedScores(msgspec.Struct, frozen=True):
    start: int
    logprob: Array
    rank: Array
    top_ids: Array
    top_logprobs: Array


class Committed(msgspec.Struct, frozen=True, tag="commit"):
    now: float
    step: int
    tokens: Array
    n_ok: Array
    finite: Array
    logprob: Array
    top_ids: Array | None
    top_logprobs: Array | None
    prompt: dict[int, LoggedScores]
    device_us: float = 0.0
    rank: Array | None = None
    picked: Array | None = None
    extra: dict[str, dict[int, list[Any]]] = {}
    prompt_extra: dict[str, dict[int, list[Any]]] = {}
    faults: dict[int, tuple[str, str]] = {}

    def result(self) -> StepResult:
        return StepResult(
            tokens_RJ=self.tokens.numpy(),
            n_ok_R=self.n_ok.numpy(),
            finite_R=self.finite.numpy(),
            logprob_RJ=self.logprob.numpy(),
            top_ids_RJL=None if self.top_ids is None else self.top_ids.numpy(),
            top_logprobs_RJL=None if self.top_logprobs is None else self.top_logprobs.numpy(),
            rank_RJ=None if self.rank is None else self.rank.numpy(),
            picked_RJK=None if self.picked is None else self.picked.numpy(),
            prompt={r: _scores_of(s) for r, s in self.prompt.items()},
            extra=self.extra,
            prompt_extra=self.prompt_extra,
            faults=self.faults,
            device_us=self.device_us,
        )


class Expired(msgspec.Struct, frozen=True, tag="expire"):
    """Some sequences' time was up; a look at the clock that changed nothing is not written."""

    now: float


_SAID = tuple(f.name for f in dataclasses.fields(Verdict))


class Guided(msgspec.Struct, frozen=True, tag="guided"):
    """A guide's verdict on the tokens of the preceding commit."""

    id: str
    index: int
    forced: tuple[int, ...]
    ended: bool
    free: bool
    error: str | None
    code: str | None = None
    field: str | None = None

    def verdict(self) -> Verdict:
        said = {name: getattr(self, name) for name in _SAID}
        return Verdict(**said)


class Recovered(msgspec.Struct, frozen=True, tag="recover"):
    """A step raised; every plan in flight was lost."""

    now: float
    error: str


class Reweighed(msgspec.Struct, frozen=True, tag="weights"):
    """The weights were replaced; running sequences kept their KV or were requeued."""

    now: float
    version: str
    keep: bool
    name: str = ""
    """In the names of pages."""
    beside: bool = False
    """All sequences of before end under the old weights."""
    directory: str = ""
    """Of the files that have all of them, whose stamp is ``name`` or, where that is empty, the start's; empty: there
    are none."""


class Operated(msgspec.Struct, frozen=True, tag="operated"):
    """An operator paused the engine, let it go on, put parts to sleep or woke them."""

    now: float
    action: str
    running: str = ""
    """Of a pause: the fate of running requests."""
    parts: list[str] = []
    """Of sleep and wake: what was on the device, or was not."""


Handled = Created | Renewed | Dropped
Disk = Stored | Fetched
Ended = Expired | Recovered | Reweighed | Operated
Event = Started | Arrival | Cancelled | Handled | Disk | Planned | Committed | Guided | Ended


def read_events(path: Path, *, field: str = "journal") -> Iterator[Event]:
    """The events of a file in their order; a last line that was cut off (the process died) is left out.

    Args:
        field: the option that named the file.

    Raises:
        ConfigError: the file cannot be read or a line is no event.
    """
    decoder = msgspec.json.Decoder(Event)
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"journal {path}: {error.strerror}", field=field) from None
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ConfigError(f"journal {path} line {number}: {error}", field=field) from None


class JournalFile:
    """``ports.Journal`` into a binary file; each event is one line, written at once."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()

    def start(
        self, options: dict[str, Any], limits: dict[str, Any], weights: str, sharding: str
    ) -> None:
        self._write(Started(options=options, limits=limits, weights=weights, sharding=sharding))

    def arrival(self, request: Request, now: float) -> None:
        self._write(Arrival(now=now, request=request))

    def cancel(self, request_id: str, now: float, index: int | None) -> None:
        self._write(Cancelled(now=now, id=request_id, index=index))

    def create(self, request: Request, ttl_s: float, now: float) -> None:
        self._write(Created(now=now, request=request, ttl_s=ttl_s))

    def renew(self, tenant: str, name: str, ttl_s: float, now: float) -> None:
        self._write(Renewed(now=now, tenant=tenant, name=name, ttl_s=ttl_s))

    def drop(self, tenant: str, name: str, now: float) -> None:
        self._write(Dropped(now=now, tenant=tenant, name=name))

    def stored(self, digests: Seq[bytes], now: float) -> None:
        self._write(Stored(now=now, digests=list(digests)))

    def fetched(self, answers: Seq[tuple[int, bool]], now: float) -> None:
        self._write(Fetched(now=now, answers=list(answers)))

    def plan(self, now: float, plan: StepPlan | None, *, waited: bool = False) -> None:
        self._write(Planned(now=now, decision=Decision.of(plan), waited=waited))

    def commit(self, now: float, plan: StepPlan, result: StepResult) -> None:
        self._write(
            Committed(
                now=now,
                step=plan.id,
                tokens=_array(result.tokens_RJ),
                n_ok=_array(result.n_ok_R),
                finite=_array(result.finite_R),
                logprob=_array(result.logprob_RJ),
                top_ids=Array.of(result.top_ids_RJL),
                top_logprobs=Array.of(result.top_logprobs_RJL),
                rank=Array.of(result.rank_RJ),
                picked=Array.of(result.picked_RJK),
                prompt={r: _logged_scores(s) for r, s in result.prompt.items()},
                extra=_listed(result.extra),
                prompt_extra=_listed(result.prompt_extra),
                faults=dict(result.faults),
                device_us=result.device_us,
            )
        )

    def expire(self, now: float) -> None:
        self._write(Expired(now=now))

    def guided(self, request_id: str, index: int, verdict: Verdict) -> None:
        said = {name: getattr(verdict, name) for name in _SAID}
        self._write(Guided(request_id, index, **said))

    def recover(self, now: float, error: str) -> None:
        self._write(Recovered(now=now, error=error))

    def weights(
        self, now: float, version: str, name: str, keep: bool, beside: bool, directory: str
    ) -> None:
        event = Reweighed(
            now=now, version=version, name=name, keep=keep, beside=beside, directory=directory
        )
        self._write(event)

    def operated(self, now: float, action: str, running: str, parts: Seq[str]) -> None:
        self._write(Operated(now=now, action=action, running=running, parts=list(parts)))

    def _write(self, event: Event) -> None:
        self._file.write(self._encoder.encode(event) + b"\n")


def _listed(extra: Mapping[str, Mapping[int, Seq[Any]]]) -> dict[str, dict[int, list[Any]]]:
    """As JSON has them: arrays as nested lists."""

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, np.ndarray) else value

    return {
        name: {r: [plain(value) for value in values] for r, values in rows.items()}
        for name, rows in extra.items()
    }


def _array(array: np.ndarray) -> Array:
    made = Array.of(array)
    assert made is not None
    return made


def _logged_scores(chunk: PromptLogprobs) -> LoggedScores:
    return LoggedScores(
        start=chunk.start,
        logprob=_array(chunk.logprob_n),
        rank=_array(chunk.rank_n),
        top_ids=_array(chunk.top_ids_nL),
        top_logprobs=_array(chunk.top_logprobs_nL),
    )


def _scores_of(scored: LoggedScores) -> PromptLogprobs:
    return PromptLogprobs(
        start=scored.start,
        logprob_n=scored.logprob.numpy(),
        rank_n=scored.rank.numpy(),
        top_ids_nL=scored.top_ids.numpy(),
        top_logprobs_nL=scored.top_logprobs.numpy(),
    )
