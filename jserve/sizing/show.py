"""A plan as tables for people, and as JSON for programs. Owns looks only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from jserve.sizing.plan import Plan, Rate

WIDTH = 132
GIB = 2**30


def as_json(plan: Plan) -> str:
    """All figures; bytes, milliseconds and tokens a second as their names say."""
    return json.dumps(dataclasses.asdict(plan), indent=1) + "\n"


def as_text(plan: Plan, console: Console) -> None:
    """All figures as tables on ``console``."""
    for part in _parts(plan):
        # A table's own title would be wrapped at the table's width.
        if isinstance(part, Table):
            console.print(part.title, style="bold", highlight=False)
            part.title = None
        console.print(part, highlight=False)


def _parts(plan: Plan) -> Iterator[RenderableType]:
    yield _memory(plan)
    yield _residents(plan)
    yield _rates(plan)
    yield _programs(plan)
    if any(p.compiled for p in plan.programs):
        yield _compiled(plan)
    yield _notes(plan)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for at, name in enumerate(columns):
        table.add_column(name, justify="left" if at == 0 else "right")
    return table


def _memory(plan: Plan) -> Table:
    m, n = plan.memory, f"{plan.devices} x {plan.device}"
    table = _table(f"{plan.model} on {n}", "memory of one device", "GiB")
    table.add_column("")
    others = m.total_bytes - m.weight_bytes - m.kv_bytes - m.slot_bytes
    billions = f"{plan.parameters / 1e9:.2f} B parameters, {plan.dtype}"
    share = f", {plan.weight_bytes_total / 1e9:.2f} GB in all"
    pool = f"{m.n_pages} pages of {plan.page_size} = {m.tokens} tokens, {plan.kv_dtype}"
    per_token = f", {plan.kv_bytes_per_token / 1024:g} KiB a token"
    table.add_row("weights", _gib(m.weight_bytes), billions + share)
    table.add_row("KV pool", _gib(m.kv_bytes), pool + per_token)
    table.add_row("slots", _gib(m.slot_bytes), f"{plan.max_num_seqs} sequences at once")
    table.add_row("scratch and rest", _gib(others), "")
    table.add_row("taken", _gib(m.total_bytes), "")
    return table


def _residents(plan: Plan) -> Table:
    limit = f"run at once (--max-num-seqs {plan.max_num_seqs})"
    table = _table("sequences in the pool", "tokens each", "pages each", "fit", limit)
    for r in plan.residents:
        table.add_row(*(f"{x}" for x in (r.length, r.pages, r.sequences, r.admitted)))
    return table


def _rates(plan: Plan) -> Table:
    """A row a batch, a column a context."""
    contexts = list(dict.fromkeys(r.context for r in plan.rates))
    title = "decoding, tokens a second: expected (limit of the hardware)"
    table = _table(title, "batch", *(f"context {c}" for c in contexts))
    for batch in dict.fromkeys(r.batch for r in plan.rates):
        table.add_row(f"{batch}", *(_rate(r) for r in plan.rates if r.batch == batch))
    return table


def _rate(r: Rate) -> str:
    return f"{r.expected_tok_s:,.0f} ({r.limit_tok_s:,.0f})" if r.fits else "no room"


def _programs(plan: Plan) -> Table:
    title = f"{len(plan.programs)} programs, each row at {plan.context} tokens of context"
    columns = (
        "program",
        "weights GB",
        "KV GB",
        "TFLOP",
        "bound",
        "limit ms",
        "links ms",
        "expected ms",
    )
    table = _table(title, *columns)
    for p in plan.programs:
        bytes_ = (f"{p.weight_bytes / 1e9:.2f}", f"{p.kv_bytes / 1e9:.2f}")
        times = (f"{t:.2f}" for t in (p.limit_ms, p.collectives_ms, p.expected_ms))
        table.add_row(p.name, *bytes_, f"{p.flops / 1e12:.2f}", p.bound, *times)
    return table


def _compiled(plan: Plan) -> Table:
    title = "compiled for sm_90a: what XLA's programs do beside reading KV"
    columns = (
        "program",
        "GB moved",
        "/ weights",
        "TFLOP",
        "scratch MiB",
        "launches",
        "nodes",
        "collectives",
    )
    table = _table(title, *columns)
    for p in plan.programs:
        if p.compiled:
            table.add_row(p.name, *_compiled_cells(p.compiled))
    return table


def _compiled_cells(c: dict[str, Any]) -> Iterator[str]:
    yield f"{c['bytes_without_kv'] / 1e9:.2f}"
    yield f"{c['bytes_over_weights']:.2f}"
    yield f"{c['flops'] / 1e12:.2f}"
    yield f"{c['temp_bytes'] / 2**20:.0f}"
    yield f"{c['launches']}"
    yield f"{c['nodes']}"
    yield f"{sum(c['collectives'].values())}"


def _notes(plan: Plan) -> str:
    links = "none"
    if plan.devices > 1:
        c = plan.collectives
        links = f"{c.all_reduces} all-reduces and {c.all_gathers} all-gather a step"
        links += f", {c.bytes_per_token / 1e6:.2f} MB sent by a device per decoded token"
    return (
        f"collectives: {links}\n"
        "limit: weights once, KV once and all flops at the device's rates. expected: what engines"
        " reach of that, and a step's other costs (jserve/sim/roofline.py). Nothing here is measured."
    )


def _gib(n: int) -> str:
    return f"{n / GIB:.2f}"
