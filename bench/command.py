"""The command line of a benchmark: of one jserve what it asks about the server, and how any ends.

It owns the options and the ending that benchmarks share.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import report
from bench.engines import EngineError
from bench.serving import ending_unwinds

Result = dict[str, Any]


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """With the model; options of the benchmark come next, those of ``add_server`` last."""
    p = argparse.ArgumentParser(prog=f"python -m {name}", description=doc)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("model", type=Path, nargs="?", help="model directory")
    return p


def add_server(p: argparse.ArgumentParser) -> None:
    """The options about the server and the result."""
    add = p.add_argument
    add("--json", type=Path, help="result file to write")
    add("--compile-cache", type=Path, help="compile cache; default a new, empty one")
    add("--jserve-args", default="", help="more arguments for jserve, quoted as one")
    add("--url", default="", help="this running server instead")
    add("--served-model", default="bench", help="model name for --url")
    add("--ready-timeout", type=float, default=600.0, help="seconds until ready (600)")
    add("--log-dir", type=Path, help="where server logs go; kept there after a failure")


def measured(
    p: argparse.ArgumentParser,
    args: argparse.Namespace,
    work: Callable[[argparse.Namespace], Result],
    show: Callable[[Result, Console], None],
) -> Result:
    """What ``work`` found, written and shown; exits with 2 where no server can be started or asked."""
    if not args.url and args.model is None:
        p.error("a model directory or --url is needed")
    try:
        with ending_unwinds():
            result = work(args)
    except (EngineError, OSError, ValueError) as e:
        p.error(str(e))
    tell(result, args.json, show)
    return result


def tell(result: Result, file: Path | None, show: Callable[[Result, Console], None]) -> None:
    """Write a result, where there is a file for it, and show it."""
    if file:
        report.write(result, file)
    show(result, Console(width=None if sys.stdout.isatty() else 120))
