"""Progress on stderr: bars on a terminal, a line per stage elsewhere. Owns looks only."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def start_progress(console: Any) -> Iterator[Show]:
    """Shows (stage, done, total) as bars on a terminal, as a line per stage elsewhere."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    tasks: dict[str, Any] = {}
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
                if not console.is_terminal:
                    console.print(f"{stage} ...", highlight=False)
            bar.update(tasks[stage], completed=done, total=total)

        yield show


SAY_EVERY_S = 10.0


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
