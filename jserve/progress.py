"""Progress bars on a terminal, progress lines elsewhere, on stderr."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Show = Callable[[str, int, int], None]
"""(stage, done, total)."""


SAY_EVERY_S = 10.0


UNITS = {
    "load weights": "bytes",
    "quantize": "layers",
    "simulate": "layouts",
    "compile shardings": "shardings",
    "start replicas": "replicas",
    "score": "tokens",
    "score the reference": "tokens",
}
"""The things that stages count; stages that are not here count programs."""


def _unit(stage: str) -> str:
    return UNITS.get(stage, "programs")


class Lines:
    """Progress where there is no terminal: a line when a stage begins, one every ``every_s`` seconds and one
    when it is done, each with what is done and the seconds so far.

    Args:
        say: prints one line.
        notes: what else the first line of a stage says, by stage.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        notes: Mapping[str, str],
        every_s: float = SAY_EVERY_S,
    ) -> None:
        self._say, self._notes, self._every_s = say, notes, every_s
        self._lock, self._over = threading.Lock(), threading.Event()
        self._stage, self._done, self._total = "", 0, 0
        self._began = self._said = 0.0

    def show(self, stage: str, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` of ``stage`` are done; stages come one after the other."""
        with self._lock:
            if self._over.is_set():
                return
            if stage != self._stage:
                self._stage = stage
                self._began = self._said = time.monotonic()
                note = self._notes.get(stage, "")
                self._say(f"{stage}: {total} {_unit(stage)}{note and '; '}{note}")
            was_done = self._done == self._total
            self._done, self._total = done, total
            if done == total and not was_done:
                self._line()

    def run(self) -> None:
        """Says how far the stage is, in a thread of its own: one program may compile for long."""
        while not self._over.wait(self._every_s / 10):
            with self._lock:
                late = time.monotonic() - self._said >= self._every_s
                if late and self._done < self._total:
                    self._line()

    def stop(self) -> None:
        """No line comes after this."""
        with self._lock:
            self._over.set()

    def _line(self) -> None:
        self._said = time.monotonic()
        took = self._said - self._began
        self._say(
            f"{self._stage}: {self._done} of {self._total} {_unit(self._stage)}, {took:.0f} s"
        )


@contextlib.contextmanager
def start_progress(console: Any, notes: Mapping[str, str] | None = None) -> Iterator[Show]:
    """Shows (stage, done, total) as bars on a terminal, as lines elsewhere, the first of a stage with its
    note."""
    if not console.is_terminal:
        lines = Lines(
            lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True),
            notes or {},
        )
        threading.Thread(target=lines.run, name="jserve-progress", daemon=True).start()
        try:
            yield lines.show
        finally:
            lines.stop()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    tasks: dict[str, Any] = {}
    with Progress(*columns, console=console, transient=True) as bar:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield show


@contextlib.contextmanager
def batch_progress(console: Any, total: int) -> Iterator[Callable[[int, int], None]]:
    """Takes (answered, failed) of ``total`` lines: a bar on a terminal, a line now and then elsewhere."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    said_at = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("lines", total=total)

        def show(answered: int, failed: int) -> None:
            nonlocal said_at
            words = f"lines ({failed} failed)" if failed else "lines"
            bar.update(task, completed=answered, description=words)
            if not console.is_terminal and time.monotonic() - said_at > SAY_EVERY_S:
                said_at = time.monotonic()
                console.print(f"{answered} of {total} {words}", highlight=False)

        yield show


@contextlib.contextmanager
def progress_bar(title: str, total: int, *, shown: bool) -> Iterator[Callable[..., None]]:
    """A rich bar on stderr; the context's value takes (done[, total])."""
    if not shown:
        yield lambda *_: None
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done, total=total: bar.update(task, completed=done, total=total)
