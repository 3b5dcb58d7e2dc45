"""Shows what ``jserve bench shard`` found: a table, and a plot of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
"""The figures of one sharding, or why it is refused."""


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """A panel for each priced step, with its collectives apart, and one for what ran here."""
    from jserve.sim.plot import figure

    rows = [row for row in rows if not row["refused"]]
    specs, live = [row["spec"] for row in rows], _has(rows, "live")
    cost = _has(rows, "simulated")
    with figure(path, 2 + 3 * live + cost, title) as axes:
        for i, name in enumerate(("8 sequences", "256 prompt tokens")):
            steps = [row["steps"][i] if row["steps"] else None for row in rows]
            links = [step["collective_ms"] if step else 0.0 for step in steps]
            work = [step["step_ms"] - step["collective_ms"] if step else 0.0 for step in steps]
            axes[i].barh(specs, work, label="weights and products")
            axes[i].barh(specs, links, left=work, label="collectives")
            axes[i].set(xlabel=f"ms, {name}")
            axes[i].invert_yaxis()
        axes[0].legend()
        if live:
            axes[2].barh(specs, [row["live"]["step_ms"] for row in rows], color="grey")
            axes[2].set(xlabel="ms from token to token, 8 sequences, here")
            axes[2].invert_yaxis()
            for i in range(2):
                _draw_exposed(axes[3 + i], rows, i)
        if cost:
            _draw_cost(axes[-1], rows)


def _draw_exposed(axis: Any, rows: Sequence[Row], i: int) -> None:
    """Of the program of each sharding that takes a priced step, the time of its twin and the rest."""
    ran = [row for row in rows if row["live"]["programs"][i]["exposed_ms"] is not None]
    programs = [row["live"]["programs"][i] for row in ran]
    specs, exposed = [row["spec"] for row in ran], [p["exposed_ms"] for p in programs]
    work = [p["step_ms"] - p["exposed_ms"] for p in programs]
    axis.barh(specs, work, color="grey")
    axis.barh(specs, exposed, left=work, label="exposed collectives")
    axis.set(xlabel=f"ms, program of {('8 sequences', '256 prompt tokens')[i]}, here")
    axis.invert_yaxis()
    axis.legend()


def _draw_cost(axis: Any, rows: Sequence[Row]) -> None:
    made = [row["simulated"] for row in rows]
    priced = any(m["usd_per_m_tokens"] is not None for m in made)
    name = "usd_per_m_tokens" if priced else "device_hours_per_m_tokens"
    axis.barh([row["spec"] for row in rows], [m[name] or 0.0 for m in made], color="grey")
    axis.set(xlabel=f"{'$' if priced else 'device-hours'} a million output tokens, simulated")
    axis.invert_yaxis()


def _in_short(figures: dict[str, Any]) -> str:
    """Of a step as compiled."""
    n = sum(figures["collectives"].values())
    links = f"{n}, {figures['collective_mib']:.2f}, {figures['collective_ms']:.2f}"
    return f"{links}; {figures['nodes']}; {figures['temp_bytes'] / 2**20:.1f}"


def _has(rows: Sequence[Row], name: str) -> bool:
    return any(name in row for row in rows)


def as_text(rows: Sequence[Row], about: dict[str, Any], console: Console) -> None:
    """The table, what the order of its steps is worth, and which shardings are refused and why."""
    table = Table("spec", "weights MiB a device")
    table.add_column("KV of it: B a token, pages; sequences of so many tokens", justify="right")
    for step in ("8 sequences", "256 prompt tokens"):
        table.add_column(f"{step}: collectives, MiB, expected ms; step ms", justify="right")
    if _has(rows, "compiled"):
        table.add_column(
            "compiled: collectives, MiB, expected ms; nodes; scratch MiB of both steps",
            justify="right",
        )
    if _has(rows, "simulated"):
        table.add_column("simulated: first token p99 ms, between tokens p99 ms", justify="right")
        table.add_column("output tok/s; device-hours and $ a million", justify="right")
    if _has(rows, "live"):
        table.add_column("here: step ms", justify="right")
        table.add_column("its two programs: collectives, MiB, exposed ms; ms", justify="right")
        table.add_column("output tok/s", justify="right")
        table.add_column("other tokens than the first", justify="right")
    for row in rows:
        if "device_bytes" in row:
            table.add_row(*_cells(row, rows))
    console.print(table, highlight=False)
    console.print(
        f"[dim]Times of steps and collectives are a roofline's, of {about['device']}; what ran here says so.[/]",
        highlight=False,
    )
    if (agreement := about["rank_correlation"]) is not None:
        console.print(f"order of steps, priced and here: rank correlation {agreement:.2f}")
    for row in rows:
        if row["refused"]:
            console.print(
                f"{row['spec']} is refused: {row['refused']}", highlight=False, markup=False
            )


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """Of the table, in the order of its columns."""
    cells = [row["spec"], f"{row['device_bytes'] / 2**20:.1f}", _kv_in_short(row["kv"])]
    cells += [
        f"{s['collectives']}, {s['collective_mib']:.2f}, {s['collective_ms']:.2f}; {s['step_ms']:.2f}"
        for s in row["steps"]
    ] or ["XLA's, not known here"] * 2
    if _has(rows, "compiled"):
        cells.append("\n".join(map(_in_short, row.get("compiled", ()))))
    if _has(rows, "simulated"):
        seen = row.get("simulated")
        cells.append(f"{seen['ttft_p99_ms']:.1f}, {seen['itl_p99_ms']:.2f}" if seen else "")
        cells.append(_cost_in_short(seen) if seen else "")
    if live := row.get("live"):
        same = f"{live['other_requests']} of {live['requests']}"
        first = f", {live['first_other']} first" if live["first_other"] else ""
        programs = "\n".join(map(_program_in_short, live["programs"]))
        cells += [f"{live['step_ms']:.2f}", programs, f"{live['output_tok_s']:.0f}", same + first]
    return cells


def _cost_in_short(seen: dict[str, Any]) -> str:
    hours, usd = seen["device_hours_per_m_tokens"], seen["usd_per_m_tokens"]
    cost = "" if hours is None else f"; {hours:.3f} h" + ("" if usd is None else f", ${usd:.3f}")
    return f"{seen['output_tok_s']:.0f}{cost}"


def _program_in_short(p: dict[str, Any]) -> str:
    exposed = "-" if p["exposed_ms"] is None else f"{p['exposed_ms']:.2f}"
    return f"{p['collectives']}, {p['collective_mib']:.2f}, {exposed}; {p['step_ms']:.2f}"


def _kv_in_short(kv: dict[str, Any]) -> str:
    if kv["pages"] is None:
        return f"{kv['token_bytes']}, not known"
    held = ", ".join(f"{n} of {length}" for length, n in kv["sequences"].items())
    return f"{kv['token_bytes']}, {kv['pages']}; {held}"
