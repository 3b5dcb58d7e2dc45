"""A measurement of one live jserve: start it, do the work, judge what was found, say so.

It owns the options that name a server, its start and end, the printing and the exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.engines import EngineError, Paths, Running, build
from bench.serving import ending_unwinds
from jserve.build import shipped

Found = dict[str, Any]
Work = Callable[[Running, argparse.Namespace], Awaitable[Found]]
Gates = Callable[[Found], list[tuple[str, bool]]]
"""What must hold of what was found, and whether it does."""
err = Console(stderr=True, highlight=False)


def add_options(parser: argparse.ArgumentParser, *, extra: str) -> None:
    """Which model the server has, its further options (``extra`` by default), where results go."""
    parser.add_argument("--model", type=Path, default=None, help="default: the shipped model")
    parser.add_argument("--compile-cache", type=Path, default=None)
    parser.add_argument("--extra", default=extra, help="options of jserve serve")
    parser.add_argument("--out", type=Path, default=None)


def against_server(args: argparse.Namespace, ready_s: float, work: Work, gates: Gates) -> int:
    """Start jserve as ``args`` say, do the work and judge it. 0: every gate holds. 1: one does not.
    2: no server within ``ready_s`` seconds."""
    with contextlib.ExitStack() as stack:
        cache = args.compile_cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cache.mkdir(parents=True, exist_ok=True)
        paths = Paths(
            model=args.model or shipped(), compile_cache=cache, extra={"jserve": args.extra}
        )
        stack.enter_context(ending_unwinds())
        try:
            engine = build("jserve", paths)
            assert not isinstance(engine, str)
            server = stack.enter_context(Running(engine))
            server.wait_ready(ready_s)
            found = asyncio.run(_whole(work(server, args)))
        except EngineError as e:
            err.print(f"[red]error:[/] {e}")
            return 2
    return told(found, gates(found), args.out)


async def _whole(work: Awaitable[Found]) -> Found:
    return await work


def told(found: Found, checked: list[tuple[str, bool]], out: Path | None) -> int:
    """Print the figures and the gates; the exit code."""
    print(json.dumps(found, indent=1))
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    for name, holds in checked:
        err.print(f"{'[green]holds[/]' if holds else '[red]FAILS[/]'}  {name}")
    return 0 if all(holds for _, holds in checked) else 1
