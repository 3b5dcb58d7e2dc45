"""Measures every step program of a live runner with synthetic plans (``jserve bench steps``).

Per bucket and context: decode rows at that context in all decode slots, and one prompt chunk that
fills the prefill tokens. Steps are kept one ahead, as the engine does, and the time of a step is
the median from one collect to the next; what a step costs more when nothing is ahead is the host's
share::

    one ahead    launch 2 | collect 1 | launch 3 | collect 2 | ...     step = collect 2 - collect 1
    alone        launch | collect                                      host = alone - step
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from jserve.errors import ConfigError
from jserve.ports import Clock, InFlight, RunnerLimits, StepTime
from jserve.sampling import SamplingParams
from jserve.sim.costs import FORMAT, TableFile
from jserve.types import Choice, Request, RowPlan, StepPlan, StepResult


class StepShape(Protocol):
    """A bucket: decode rows and prefill tokens."""

    @property
    def D(self) -> int: ...

    @property
    def P(self) -> int: ...


class Timed(Protocol):
    """A runner whose ``launch`` takes the bucket."""

    @property
    def limits(self) -> RunnerLimits: ...

    def launch(self, plan: StepPlan, bucket: Any) -> InFlight: ...

    def collect(self, flight: InFlight) -> StepResult: ...


def measure(
    runner: Timed,
    buckets: Iterable[StepShape],
    *,
    repeats: int,
    about: dict[str, Any],
    page_bytes: int = 0,
    progress: Callable[[int, int], None] = lambda *_: None,
    clock: Clock = time.perf_counter,
) -> TableFile:
    """The step times of ``buckets`` at short, middling and long contexts.

    ``repeats`` steps are timed each; ``about`` goes into the file for its readers, ``page_bytes`` too.
    """
    limits = runner.limits
    jobs = [(bucket, c) for bucket in buckets for c in _contexts(limits, bucket, repeats)]
    steps, alone = [], []
    for done, (bucket, context) in enumerate(jobs):
        progress(done, len(jobs))
        plans = _Plans(limits, bucket, context)
        for plan in plans.prime():
            runner.collect(runner.launch(plan, None))
        one_ahead, waited = _time(runner, plans, bucket, repeats, clock)
        alone.append(waited - one_ahead)
        steps.append(
            StepTime(
                n_decode=bucket.D,
                n_prefill=bucket.P,
                n_context=plans.mean_context,
                seconds=one_ahead,
            )
        )
    progress(len(jobs), len(jobs))
    return TableFile(
        format=FORMAT,
        about=about,
        host_seconds=max(0.0, statistics.median(alone)),
        n_slots=limits.n_slots,
        n_pages=limits.n_pages,
        page_size=limits.page_size,
        max_model_len=limits.max_model_len,
        window=limits.window,
        reaches=limits.reaches,
        page_bytes=page_bytes,
        page_move_s=limits.page_move_s,
        steps=tuple(steps),
    )


def _contexts(limits: RunnerLimits, bucket: StepShape, repeats: int) -> list[int]:
    """Starts that leave room for the chunk and for the steps that are timed."""
    room = limits.max_model_len - max(1, bucket.P) - 2 * repeats - 4
    longest = max(1, room)
    return sorted({min(limits.page_size, longest), max(1, longest // 4), longest})


def _time(
    runner: Timed, plans: _Plans, bucket: StepShape, repeats: int, clock: Clock
) -> tuple[float, float]:
    """Median seconds of a step with one ahead of it, and of a step alone."""
    flights = [runner.launch(plans.step(), bucket)]
    ends = []
    for _ in range(repeats + 1):
        flights.append(runner.launch(plans.step(), bucket))
        runner.collect(flights.pop(0))
        ends.append(clock())
    runner.collect(flights.pop())
    alone = []
    for _ in range(min(3, repeats)):
        began = clock()
        runner.collect(runner.launch(plans.step(), bucket))
        alone.append(clock() - began)
    return statistics.median(np.diff(ends).tolist()), statistics.median(alone)


class _Plans:
    """Plans of one bucket: as many decode rows as slots allow beside one prompt chunk."""

    def __init__(self, limits: RunnerLimits, bucket: StepShape, context: int) -> None:
        self.limits, self.context, self.n_steps = limits, context, 0
        self.chunk = min(bucket.P, limits.max_model_len - context)
        n_decode = min(bucket.D, limits.n_slots - (bucket.P > 0), limits.max_rows - (bucket.P > 0))
        if bucket.P and n_decode < 1 and limits.n_slots == 1:
            n_decode = 0
        self.choices = [_choice(i) for i in range(n_decode + (bucket.P > 0))]
        self.n_decode = n_decode

    @property
    def mean_context(self) -> int:
        ends = [self.context + 1] * self.n_decode + [self.context + self.chunk] * bool(self.chunk)
        return sum(ends) // len(ends)

    def prime(self) -> Iterator[StepPlan]:
        """Steps that bring the decode slots to the context: one token each, at its last place."""
        most = max(1, min(self.limits.max_prefill_rows, self.limits.max_prefill_tokens))
        for at in range(0, self.n_decode, most):
            slots = range(at, min(at + most, self.n_decode))
            yield self._plan([self._chunk(slot, self.context - 1, 1) for slot in slots])

    def step(self) -> StepPlan:
        """The next step: each decode row is one token further, the chunk where it was."""
        rows = [
            RowPlan(
                choice=self.choices[slot],
                slot=slot,
                start=self.context + self.n_steps,
                count=1,
                from_slot=True,
            )
            for slot in range(self.n_decode)
        ]
        if self.chunk:
            rows.append(self._chunk(self.n_decode, self.context, self.chunk))
        self.n_steps += 1
        return self._plan(rows)

    def _chunk(self, slot: int, start: int, count: int) -> RowPlan:
        return RowPlan(
            choice=self.choices[slot],
            slot=slot,
            start=start,
            count=count,
            from_slot=False,
            tokens=[1] * count,
        )

    def _plan(self, rows: list[RowPlan]) -> StepPlan:
        """Pages wrap around a pool too small for all rows at once: what is read matters to nobody."""
        limits = self.limits
        width = -(-max(row.start + row.count for row in rows) // limits.page_size)
        at_RM = np.array([row.slot for row in rows])[:, None] * width + np.arange(width)
        table_RM = (1 + at_RM % (limits.n_pages - 1)).astype(np.int32)
        return StepPlan(
            id=self.n_steps,
            rows=tuple(rows),
            page_table_RM=table_RM,
            group_tables=self._groups(table_RM),
        )

    def _groups(self, table_RM: np.ndarray) -> tuple[np.ndarray, ...]:
        """The tables of groups of layers, where there are some: the same pages, or as many as fit their columns."""
        widths = (table_RM.shape[1], *self.limits.group_columns[1:])
        return tuple(
            np.resize(table_RM, (reach.n_groups, len(table_RM), width))
            for reach, width in zip(self.limits.reaches, widths, strict=False)
        )


def _choice(slot: int) -> Choice:
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    request = Request(id=f"steps-{slot}", prompt_ids=(1,), params=params)
    return Choice(request=request, index=0, seed=0)


def write(table: TableFile, path: Path) -> None:
    """Raises ConfigError if the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    except OSError as e:
        raise ConfigError(f"steps {path}: {e.strerror}", field="out") from None


def shown(table: TableFile) -> str:
    """The table as text."""
    text = Table(title="milliseconds of a step")
    for name in ("decode rows", "prefill tokens", "context", "ms"):
        text.add_column(name, justify="right")
    for step in table.steps:
        ms = f"{step.seconds * 1e3:.3f}"
        text.add_row(str(step.n_decode), str(step.n_prefill), str(step.n_context), ms)
    console = Console(file=io.StringIO(), width=80)
    console.print(text)
    console.print(f"host, when nothing is ahead: {table.host_seconds * 1e3:.3f} ms")
    return console.file.getvalue()  # type: ignore[attr-defined]
