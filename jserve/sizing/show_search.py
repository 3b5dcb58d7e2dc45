"""Formats what the search for a layout found, as a table, as JSON and as the file of the one that won."""

from __future__ import annotations

import json
import shlex

import yaml
from rich.console import Console
from rich.table import Table

from jserve.sizing.search import Found, TriedLayout, as_mapping


def as_json(found: Found) -> str:
    return json.dumps(as_mapping(found), indent=1) + "\n"


def as_text(found: Found, console: Console) -> None:
    """One line for each way to use the devices, the best first; what these exchange is what serves best."""
    table = Table("sharding", "engines", "devices", "good", "first token p99 ms")
    for column in ("between tokens p99 ms", "output tok/s", "busy", "why not"):
        table.add_column(column, justify="left" if column == "why not" else "right")
    for candidate in found.shapes:
        won = candidate is found.winner
        table.add_row(*_cells(found, candidate), style="bold" if won else None)
    console.print(f"{found.model} on up to {found.devices} x {found.device}", style="bold")
    console.print(table, highlight=False)
    winner = found.winner
    console.print(
        "no layout keeps the targets" if winner is None else f"the cheapest: {command(winner)}",
        highlight=False,
    )
    console.print("[dim]Simulated over a roofline: nothing here is measured.[/]", highlight=False)


def _cells(found: Found, c: TriedLayout) -> tuple[str, ...]:
    layout, counts = str(c.sharding), (f"{c.replicas}", f"{c.devices}")
    if c.refused or c.good_share is None:
        return (layout, *counts, "", "", "", "", "", found.why_not(c))
    figures = (f"{c.good_share:.1%}", f"{c.ttft_ms:.0f}", f"{c.itl_ms:.1f}")
    rest = (f"{c.output_tok_s:.0f}", f"{c.busy_share:.0%}")
    return (layout, *counts, *figures, *rest, "" if c is found.winner else found.why_not(c))


def command(winner: TriedLayout) -> str:
    """The command that serves like this: several engines of one machine are groups (dp) of one process."""
    replicas = f" --replicas {winner.processes}" if winner.processes > 1 else ""
    return f"jserve serve MODEL --sharding {shlex.quote(str(winner.sharding))}{replicas}"


def as_spec(winner: TriedLayout) -> str:
    """The file for ``--sharding``; its first line has the number of processes, which is no part of it."""
    return f"# {command(winner)}\n" + yaml.safe_dump(winner.sharding.as_mapping(), sort_keys=False)
