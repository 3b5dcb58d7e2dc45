"""Converts a live engine's journal to a trace, and replays it through the simulator.

It owns the way from recorded token ids to streams, and the comparison of decisions.

A trace made from a journal holds no text. Prompts and answers are cut into chunks of 8 tokens (the
smallest page); a chunk behind the same tokens as before becomes a piece of the same
stream, anything else begins a new one. So prefixes are shared to the page as they were::

    recorded   a: P P P P x x | y y      b: P P P P x x | y y z      (each letter one chunk)
    streams    a: 1.......... | 1..      b: 1.......... | 1.. 2
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

from jserve.errors import ConfigError
from jserve.ports import RunnerLimits
from jserve.sched import sampled
from jserve.sched.record import journal
from jserve.sched.record.journal import Arrival, Cancelled, Committed, Decision, Event, Planned
from jserve.sched.record.replay import Diverged
from jserve.sim.clients import Clients
from jserve.sim.device import SimClock
from jserve.sim.simulate import Setup, Simulation
from jserve.sim.trace import PromptPiece, TraceItem
from jserve.types import Finish, Request, Sequence, StepPlan, StepResult

CHUNK = 8
MOST_LINE = 1 << 24
"""Bytes of the first line of a batch file at most."""
SPARE = 512
"""Tokens beyond those seen that a choice without an end and without a limit would still say."""


def is_journal(path: Path) -> bool:
    """True for a file of ``--journal``, by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(8) == b'{"type":'
    except OSError:
        return False


def is_batch(path: Path) -> bool:
    """True for an OpenAI batch file, by its first line."""
    try:
        with path.open("rb") as file:
            first = json.loads(file.readline(MOST_LINE))
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and {"custom_id", "url", "body"} <= {*first}


@dataclass(slots=True)
class _LoggedRequest:
    """A recorded request and what was drawn for it."""

    request: Request
    now: float
    drawn: list[dict[int, int]]
    """Per choice, position -> token."""
    cancels: list[tuple[float, int | None]] = field(default_factory=list)

    @property
    def at(self) -> float:
        """The time at which its client sent it, as far as it was written down."""
        return self.request.arrival if 0 < self.request.arrival <= self.now else self.now


def convert(path: Path) -> list[TraceItem]:
    """The requests of a journal as a trace: same lengths, times, lanes and shared prefixes.

    Raises:
        ConfigError: no journal, or one with requests that a trace cannot hold.
    """
    logged = _logged_requests(path)
    weaver = _Weaver()
    return [_item(h, weaver) for h in logged]


def of_requests(requests: Iterable[Request], max_model_len: int) -> list[TraceItem]:
    """Requests that have not run, as a trace: all at once, with the prefixes that they share, each choice as long as it
    may be; of those without ``max_tokens``, ``SPARE`` tokens as far as the context goes.

    Raises:
        ConfigError: a request that a trace cannot hold.
    """
    weaver, found = _Weaver(), []
    for request in requests:
        _check(request, "trace")
        params, n = request.params, len(request.prompt_ids)
        if params.max_tokens is None:
            params = dataclasses.replace(params, max_tokens=min(SPARE, max_model_len - n))
        asked = dataclasses.replace(request, params=params)
        found.append(_item(_LoggedRequest(asked, 0.0, [{} for _ in range(params.n)]), weaver))
    return found


def _check(request: Request, where: str) -> None:
    """Refuse what a trace does not hold."""
    name, why = request.id[:64], None
    if request.cache is not None or request.adapter is not None:
        why = "uses a cache handle or adapter, which a trace does not hold"
    elif request.said:
        why = "goes on behind what another engine said, which a trace does not hold"
    elif request.params.guided:
        why = "has structured output, which is not simulated"
    if why is not None:
        raise ConfigError(f"{where}: request {name!r} {why}", field="trace")


def _logged_requests(path: Path) -> list[_LoggedRequest]:
    logged: dict[str, _LoggedRequest] = {}
    rows: dict[int, Decision] = {}
    for event in journal.read_events(path, field="trace"):
        if isinstance(event, Arrival):
            request = event.request
            if request.id in logged:
                raise ConfigError(
                    f"journal {path}: id {request.id[:64]!r} is reused", field="trace"
                )
            _check(request, f"journal {path}")
            logged[request.id] = _LoggedRequest(
                request, event.now, [{} for _ in range(request.params.n)]
            )
        elif isinstance(event, Cancelled) and event.id in logged:
            h = logged[event.id]
            h.cancels.append((max(0.0, event.now - h.at), event.index))
        elif isinstance(event, Planned) and event.decision is not None:
            rows[event.decision.id] = event.decision
        elif isinstance(event, Committed):
            _draw(logged, rows.pop(event.step), event, path)
    return list(logged.values())


def _draw(
    logged: dict[str, _LoggedRequest], decision: Decision, event: Committed, path: Path
) -> None:
    tokens_RJ, n_ok_R = event.tokens.numpy(), event.n_ok.numpy()
    for r, row in enumerate(decision.rows):
        if row.drafts:
            raise ConfigError(
                f"journal {path}: it holds speculation, which is not simulated", field="trace"
            )
        if row.emits and n_ok_R[r]:
            drawn = logged[row.request_id].drawn[row.index]
            drawn[row.start + row.count] = int(tokens_RJ[r, 0])


def _item(h: _LoggedRequest, weaver: _Weaver) -> TraceItem:
    request, params = h.request, h.request.params
    answers = [_answer(h, index) for index in range(params.n)]
    prompt, outputs = weaver.weave(list(request.prompt_ids), answers)
    return TraceItem(
        id=request.id,
        at=h.at,
        prompt=prompt,
        outputs=outputs,
        max_tokens=params.max_tokens,
        cancels=tuple(h.cancels),
        lane=request.lane,
        tenant=request.tenant,
        priority=request.priority,
        ttft_deadline_ms=request.ttft_deadline_ms,
        tpot_deadline_ms=request.tpot_deadline_ms,
        deadline_ms=request.deadline_ms,
        cache_salt=request.cache_salt,
        session=request.session,
        retain=request.retain,
        skip_prefix_cache=request.skip_prefix_cache,
        scored=params.prompt_logprobs is not None,
        loaded=params.loaded,
        vocab_row=params.needs_vocab_row,
    )


def _answer(h: _LoggedRequest, index: int) -> tuple[list[int], int]:
    """The tokens of a choice and how many it has in all, beyond those seen where it did not end."""
    request, params = h.request, h.request.params
    n_prompt, drawn = len(request.prompt_ids), h.drawn[index]
    known = list(itertools.takewhile(drawn.__contains__, range(n_prompt, n_prompt + len(drawn))))
    most = len(known) + SPARE if params.max_tokens is None else params.max_tokens
    seq = Sequence(
        request=request,
        index=index,
        seed=0,
        tokens=list(request.prompt_ids),
        n_prompt=n_prompt,
        max_len=n_prompt + most,
        stop_ids=sampled.stop_ids(request.eos_ids, params.stop_token_ids, params.ignore_eos),
        min_len=n_prompt + params.min_tokens,
    )
    for at in known:
        if sampled.accept(seq, [drawn[at]]) and seq.finish is not None:
            break
    answer = seq.tokens[n_prompt:]
    ended = seq.finish is Finish.STOP or len(answer) >= most
    return answer, max(1, len(answer) if ended else most)


class _Weaver:
    """Turns token ids into pieces of streams, so that equal beginnings get equal pieces."""

    def __init__(self) -> None:
        self._streams = itertools.count(1)
        self._nodes: dict[tuple[int, tuple[int, ...]], int] = {}
        """(node before, chunk) -> node; 0 is the beginning of everything."""
        self._texts: list[tuple[PromptPiece, ...]] = [()]
        """Per node, the pieces of a text that runs through it."""

    def weave(
        self, prompt: list[int], answers: list[tuple[list[int], int]]
    ) -> tuple[tuple[PromptPiece, ...], tuple[tuple[PromptPiece, ...], ...]]:
        n = len(prompt)
        head: tuple[PromptPiece, ...] | None = None
        outputs = []
        for answer, total in answers:
            text = prompt + answer
            pieces = self._match(text, n + total)
            head = head or cut(pieces, 0, n)
            tail = cut(pieces, n, n + total)
            outputs.append(tail)
            self._learn(text, (*head, *tail))
        return head or (), tuple(outputs)

    def _match(self, text: list[int], total: int) -> tuple[PromptPiece, ...]:
        """Pieces of ``total`` tokens: those of the longest known beginning, then a new stream."""
        node, at = 0, 0
        while at + CHUNK <= len(text):
            found = self._nodes.get((node, tuple(text[at : at + CHUNK])))
            if found is None:
                break
            node, at = found, at + CHUNK
        known = cut(self._texts[node], 0, at)
        return (*known, (next(self._streams), 0, total - at)) if total > at else known

    def _learn(self, text: list[int], pieces: tuple[PromptPiece, ...]) -> None:
        node = 0
        for at in range(0, len(text) - CHUNK + 1, CHUNK):
            key = (node, tuple(text[at : at + CHUNK]))
            if key not in self._nodes:
                self._nodes[key] = len(self._texts)
                self._texts.append(pieces)
            node = self._nodes[key]


def cut(pieces: tuple[PromptPiece, ...], start: int, end: int) -> tuple[PromptPiece, ...]:
    """The pieces of tokens ``start .. end``."""
    found, at = [], 0
    for stream, first, count in pieces:
        low, high = max(start - at, 0), min(end - at, count)
        if low < high:
            found.append((stream, first + low, high - low))
        at += count
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A replay that decided as the journal says."""

    n_requests: int
    n_steps: int


def verify(path: Path, setup: Setup, limits: RunnerLimits) -> Verified:
    """Send a journal's requests, as a trace, through the simulator at the recorded times.

    Raises:
        Diverged: a decision differs, page tables included; names the event.
        ConfigError: see ``convert``; or the run had a fault, which the simulator does not repeat.
    """
    trace = {item.id: item for item in convert(path)}
    tape = _Tape(
        [e for e in journal.read_events(path, field="trace") if not isinstance(e, journal.Started)],
        path,
    )
    setup = dataclasses.replace(setup, journal=tape)
    claims = {e.step: e.device_us for e in tape.events if isinstance(e, Committed)}
    clients = Clients((), setup)
    simulation = Simulation(
        setup, limits, clients, clock=SimClock(), readings=tape.reading, claims=claims
    )
    while not tape.over:
        before = tape.at
        for event in tape.inputs():
            if isinstance(event, Arrival):
                simulation.send(trace[event.request.id], event.request.arrival)
            else:
                simulation.engine.cancel(event.id, event.index)
        clients.receive(simulation.engine.step(), simulation.clock.now)
        if tape.at == before:
            raise Diverged(f"event {before + 1}: the engine makes no progress")
    return Verified(n_requests=len(trace), n_steps=simulation.scheduler.n_steps)


class _Tape:
    """``ports.Journal`` that compares what happens with what is recorded, and tells the time.

    ``Engine.step`` reads the clock once per message of its inbox, once to expire, once to plan and
    once to commit; every reading is written down with its event, but for an expiry of nobody. That
    one gets the time of the event before: nobody's time was up later, so nobody's is then.
    """

    def __init__(self, recorded: list[Event], path: Path) -> None:
        self.events, self.path, self.at = recorded, path, 0
        self._until_expiry = 0

    @property
    def over(self) -> bool:
        return self.at >= len(self.events)

    def reading(self) -> float:
        """The clock as the engine read it then."""
        self._until_expiry -= 1
        at = min(self.at, len(self.events) - 1)
        if self._until_expiry == -1 and not isinstance(self.events[at], journal.Expired):
            at = max(0, at - 1)
        event = self.events[at]
        assert not isinstance(event, journal.Guided | journal.Started), (
            "guided requests are refused"
        )
        return event.now

    def inputs(self) -> list[Arrival | Cancelled]:
        """The messages of the inbox at the next step."""
        ahead = itertools.islice(self.events, self.at, None)
        found = []
        for event in ahead:
            if not isinstance(event, Arrival | Cancelled):
                break
            found.append(event)
        self._until_expiry = len(found)
        return found

    def _next(self, kind: type) -> Event | None:
        """The event that must be of ``kind``; None behind the end of the journal."""
        if self.over:
            return None
        event = self.events[self.at]
        self.at += 1
        if isinstance(event, journal.Recovered | journal.Operated):
            raise ConfigError(
                f"journal {self.path}: event {self.at} is a fault, a swap of weights or an operator's pause,"
                " which the simulator does not repeat",
                field="trace",
            )
        if not isinstance(event, kind):
            made, was = kind.__name__, type(event).__name__
            raise Diverged(f"event {self.at}: the journal has {was}, the simulator {made}")
        return event

    def arrival(self, request: Request, now: float) -> None:
        self._next(Arrival)

    def cancel(self, request_id: str, now: float, index: int | None) -> None:
        self._next(Cancelled)

    def plan(self, now: float, plan: StepPlan | None, *, waited: bool = False) -> None:
        event = self._next(Planned)
        made = Decision.of(plan)
        if isinstance(event, Planned) and event.decision != made:
            raise Diverged(
                f"event {self.at}: the journal has {event.decision}, the simulator {made}"
            )

    def commit(self, now: float, plan: StepPlan, result: StepResult) -> None:
        event = self._next(Committed)
        if isinstance(event, Committed) and event.step != plan.id:
            raise Diverged(f"event {self.at}: the journal has step {event.step}, not {plan.id}")

    def expire(self, now: float) -> None:
        self._next(journal.Expired)

    def recover(self, now: float, error: str) -> None:
        raise Diverged(f"event {self.at}: the simulator has a fault: {error}")

    def operated(self, now: float, action: str, running: str, parts: Seq[str]) -> None:
        raise Diverged(f"event {self.at}: the simulator has no operator, and there was {action}")

    def weights(
        self, now: float, version: str, name: str, keep: bool, beside: bool, directory: str
    ) -> None:
        raise Diverged(f"event {self.at}: the simulator has no weights, and they became {version}")
