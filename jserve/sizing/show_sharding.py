"""Formats what ``explain_sharding`` says as tables and as JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from jserve.sizing.explain import Explained, StepCollectives, WeightPlace


def as_json(explained: Explained) -> str:
    """All of it; bytes as their names say."""
    found = dataclasses.asdict(explained) | {
        "sharding": explained.sharding.as_mapping(),
        "device_bytes": explained.device_bytes,
    }
    return json.dumps(found, indent=1) + "\n"


def as_text(explained: Explained, console: Console) -> None:
    """Weights that are alike as one line, and the collectives of each program, on ``console``."""
    sizes = " x ".join(f"{axis} {size}" for axis, size in explained.sharding.mesh)
    mode, dp = explained.sharding.mode, explained.sharding.dp
    groups = f", {dp} such groups" if dp > 1 else ""
    title = f"{explained.model} on {sizes}{groups}, mode {mode}"
    console.print(title, style="bold", highlight=False)
    console.print(_weights(explained), highlight=False)
    for program in explained.programs:
        _print_program(program, console)
    console.print(
        "[dim]Bytes are those of one device, of collectives those of its results."
        " Nothing here is measured.[/]",
        highlight=False,
    )


def _weights(explained: Explained) -> Table:
    table = Table("weight", "shape", "PartitionSpec")
    for column in ("of them", "MiB a device, all"):
        table.add_column(column, justify="right")
    for (path, shape, axes), alike in _alike(explained.weights):
        total = sum(weight.device_bytes for weight in alike) / 2**20
        table.add_row(path, shape, axes, f"{len(alike)}", f"{total:.2f}")
    table.add_row(
        "all", "", "", f"{len(explained.weights)}", f"{explained.device_bytes / 2**20:.2f}"
    )
    return table


def _alike(
    weights: tuple[WeightPlace, ...],
) -> Iterator[tuple[tuple[str, str, str], list[WeightPlace]]]:
    """Weights of one place in their layers, one shape and one partition."""
    groups: dict[tuple[str, str, str], list[WeightPlace]] = {}
    for weight in weights:
        path = re.sub(r"\blayers/\d+", "layers/*", weight.path)
        axes = ", ".join(map(_axes, weight.partition))
        shape = "x".join(map(str, weight.shape))
        groups.setdefault((path, f"{shape} {weight.dtype}", axes), []).append(weight)
    yield from groups.items()


def _axes(axis: str | tuple[str, ...] | None) -> str:
    return "-" if axis is None else axis if isinstance(axis, str) else "+".join(axis)


def _print_program(program: StepCollectives, console: Console) -> None:
    what = [(program.decode_rows, "decode rows"), (program.prefill_tokens, "prefill tokens")]
    title = "a step of " + ", ".join(f"{n} {name}" for n, name in what if n)
    if program.collectives is None:
        why = "XLA chooses its collectives when it compiles it for as many devices"
        console.print(f"{title}: {why}", highlight=False)
        return
    table = Table("collective", "over", "result")
    for column in ("a step", "KiB"):
        table.add_column(column, justify="right")
    for c in program.collectives:
        shape = "x".join(map(str, c.shape))
        over = "+".join(c.axes) or "as XLA chose"
        row = c.op + " (few steps)" * c.rare, over, f"{shape} {c.dtype}", f"{c.count}"
        table.add_row(*row, f"{c.n_bytes / 1024:.1f}")
    console.print(title, style="bold", highlight=False)
    console.print(table, highlight=False)
