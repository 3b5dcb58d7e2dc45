"""Formats a plan as tables and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from jserve.sizing.plan import DecodeRate, LayerGroups, Plan
from jserve.sizing.speculation import DraftRate, Speculated

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
    if plan.speculation:
        yield _drafted(plan, plan.speculation)
    yield _programs(plan)
    if any(p.compiled for p in plan.programs):
        yield _compiled(plan)
    yield _notes(plan)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for at, name in enumerate(columns):
        table.add_column(name, justify="left" if at == 0 else "right", no_wrap=at == 0)
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
    if len(plan.form_bytes) > 1:
        forms = ", ".join(f"{form} {n / 1e9:.2f}" for form, n in plan.form_bytes.items())
        table.add_row("  by form", "", f"{forms} GB in all")
    for form, taken in plan.paths.items():
        table.add_row(f"  {form} by", "", _paths(taken))
    active = f"{plan.active_parameters / 1e9:.2f} B parameters"
    read = f"{active}, {plan.active_bytes_total / 1e9:.2f} GB in all"
    table.add_row("  one token reads", "", read)
    if plan.speculation and plan.speculation.drafter:
        table.add_row("  of these", _gib(plan.speculation.weight_bytes), _drafter(plan))
        own = plan.speculation.kv_bytes_per_token / 1024
        per_token += f", {own:g} of them the drafter's"
    table.add_row("KV pool", _gib(m.kv_bytes), pool + per_token)
    for g in plan.kv_groups:
        table.add_row("  of these", "", _group(g))
    table.add_row("slots", _gib(m.slot_bytes), f"{plan.max_num_seqs} sequences at once")
    penalised = f"counts and biases of {plan.max_penalized_seqs} of them (--max-penalized-seqs)"
    table.add_row("  of these", _gib(m.vocab_row_bytes), penalised)
    table.add_row("scratch and rest", _gib(others), "")
    table.add_row("taken", _gib(m.total_bytes), "")
    return table


def _paths(taken: Mapping[str, Sequence[int]]) -> str:
    """The paths of a form, and the tokens of programs that take them."""
    ranges = {path: f"{a} to {b}" if a < b else f"{a}" for path, (a, b) in taken.items()}
    return ", ".join(f"{path} ({tokens} tokens)" for path, tokens in ranges.items())


def _residents(plan: Plan) -> Table:
    limit = f"run at once (--max-num-seqs {plan.max_num_seqs})"
    title, over = "sequences in the pool", "bytes / what is read"
    table = _table(title, "tokens each", "pages each", over, "fit", limit)
    for r in plan.residents:
        cells = (r.length, r.pages, f"{r.over:.2f}", r.sequences, r.admitted)
        table.add_row(*(f"{x}" for x in cells))
    return table


def _group(g: LayerGroups) -> str:
    """A line on groups of layers of one reach."""
    reads = "read all tokens"
    if g.reads:
        reads = f"read {'chunks' if g.chunked else 'windows'} of {g.reads}"
    groups = f"{g.groups} group{'s' * (g.groups > 1)}"
    padded = f" ({g.arrays - g.layers} of {g.arrays} places empty)" if g.arrays > g.layers else ""
    return f"{g.layers} layers {reads}: {groups} of {g.arrays // g.groups}{padded}"


def _rates(plan: Plan) -> Table:
    """A row a batch, a column a context."""
    contexts = list(dict.fromkeys(r.context for r in plan.rates))
    title = "decoding, tokens a second: expected (limit of the hardware)"
    table = _table(title, "batch", *(f"context {c}" for c in contexts))
    for batch in dict.fromkeys(r.batch for r in plan.rates):
        table.add_row(f"{batch}", *(_rate(r) for r in plan.rates if r.batch == batch))
    return table


def _rate(r: DecodeRate) -> str:
    return f"{r.expected_tok_s:,.0f} ({r.limit_tok_s:,.0f})" if r.fits else "no room"


def _drafter(plan: Plan) -> str:
    s = plan.speculation
    assert s is not None
    whole = "whole on each device" if plan.devices > 1 else "whole"
    held = f"split over {s.devices} devices" if s.devices > 1 else whole
    shape = f"{s.n_drafts} drafts"
    if s.tree:
        shape = f"a tree of {shape} {list(s.tree)}"
    return f"the drafter ({s.method} {s.drafter}), {held}, {shape}"


def _drafted(plan: Plan, s: Speculated) -> Table:
    """A row a batch, a column a context."""
    contexts = list(dict.fromkeys(r.context for r in s.rates))
    title = (
        f"with drafts by {s.method} at acceptance {s.acceptance:g}: tokens a second (gain), being batch x"
        " tokens of a row / ms of verifying + drafting"
    )
    table = _table(title, "batch", *(f"context {c}" for c in contexts))
    for batch in dict.fromkeys(r.batch for r in s.rates):
        table.add_row(f"{batch}", *(_draft_rate(r) for r in s.rates if r.batch == batch))
    return table


def _draft_rate(r: DraftRate) -> str:
    if not r.fits:
        return "no room"
    if r.width == 1:
        return f"{r.expected_tok_s:,.0f} (no drafts)"
    gain = f"{r.expected_tok_s:,.0f} ({r.speed_up:.2f})"
    return f"{gain} {r.tokens_per_step:.2f} / {r.verify_ms:.2f} + {r.draft_ms:.2f}"


def _programs(plan: Plan) -> Table:
    title = f"{len(plan.programs)} programs, each row at {plan.context} tokens of context"
    columns = (
        "program",
        "weights GB",
        "KV GB",
        "TFLOP",
        "logits MiB",
        "bound",
        "limit ms",
        "links ms",
        "expected ms",
        "of it drafts",
    )
    table = _table(title, *columns)
    for p in plan.programs:
        bytes_ = (f"{p.weight_bytes / 1e9:.2f}", f"{p.kv_bytes / 1e9:.2f}")
        scratch = f"{p.logits_bytes / 2**20:.0f}"
        times = (f"{t:.2f}" for t in (p.limit_ms, p.collectives_ms, p.expected_ms, p.draft_ms))
        table.add_row(p.name, *bytes_, f"{p.flops / 1e12:.2f}", scratch, p.bound, *times)
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
    drafts = _drafting_notes(plan.speculation) if plan.speculation else ""
    return (
        f"collectives: {links}\n{drafts}"
        "limit: weights once, KV once and all flops at the device's rates. expected: what engines"
        " reach of that, and a step's other costs (jserve/sim/roofline.py). Nothing here is measured."
    )


def _drafting_notes(s: Speculated) -> str:
    by_rank = ", ".join(f"{c:.2f}" for c in s.chances)
    text = f"drafts: chances by rank {by_rank} (--acceptance, speculative.tree_chances); "
    if not s.drafter:
        return (
            text + "they are taken to be found in every step, and looking for them is not counted\n"
        )
    return text + (
        "a step reads the drafter's weights once to see its tokens and its layers and unembedding once"
        f" for each level of drafts; above {s.draft_rows} rows it does not draft\n"
    )


def _gib(n: int) -> str:
    return f"{n / GIB:.2f}"
