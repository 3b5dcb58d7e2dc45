"""Asserts what a device may assume of any plan.

It owns the promises of a ``StepPlan`` that can be checked from the plan and the limits alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from jserve.ports import RunnerLimits
from jserve.types import RowPlan, StepPlan


def check_plan(plan: StepPlan, limits: RunnerLimits) -> None:
    """Raises AssertionError where ``plan`` is one that no scheduler may make."""
    assert plan.rows, "an empty plan"
    assert len(plan.page_table_RM) == len(plan.rows), "the page table has other rows than the plan"
    decode = [row for row in plan.rows if row.from_slot]
    prefill = plan.rows[len(decode) :]
    assert all(row.from_slot for row in plan.rows[: len(decode)]), "decode rows must come first"
    _check_slots(plan, limits)
    assert len(decode) <= limits.max_decode_rows, f"{len(decode)} decode rows"
    assert len(prefill) <= limits.max_prefill_rows, f"{len(prefill)} prefill rows"
    n_prefill = sum(row.count for row in prefill)
    assert n_prefill <= limits.max_prefill_tokens, f"{n_prefill} prefill tokens"
    _check_drafting(plan, limits, decode, prefill)
    for row in plan.rows:
        _check_row(row, limits)


def _check_slots(plan: StepPlan, limits: RunnerLimits) -> None:
    """One row a slot, except for rows that only backfill drafter KV."""
    own = [row for row in plan.rows if not row.backfill]
    assert len(own) <= limits.max_rows, f"{len(own)} rows"
    assert len({row.slot for row in own}) == len(own), "two rows share a slot"
    loaded = {load.slot for load in plan.loads}
    assert loaded <= {row.slot for row in plan.rows}, "a load without a row"
    for load in plan.loads:
        needs = load.params.needs_vocab_row
        assert needs == (load.vocab_row >= 0), f"vocab row {load.vocab_row}, needed: {needs}"
    held = [load.vocab_row for load in plan.loads if load.vocab_row >= 0]
    assert len({*held}) == len(held), "two loads share a vocab row"
    assert max(held, default=-1) < min(limits.n_vocab_rows, limits.n_slots), f"vocab rows {held}"


def _check_drafting(
    plan: StepPlan, limits: RunnerLimits, decode: Seq[RowPlan], prefill: Seq[RowPlan]
) -> None:
    """There are fewer programs with a drafter than without."""
    assert 0 <= plan.n_draft <= limits.device_drafts, f"{plan.n_draft} drafts of the device"
    if not plan.n_draft:
        assert not any(row.backfill for row in plan.rows), "an idle drafter is backfilled"
        return
    width = max([1 + plan.n_draft, *(row.count for row in decode)])
    assert len(decode) <= (limits.draft_rows or len(decode)), f"{len(decode)} rows draft"
    widest = limits.prefill_width
    assert not prefill or not widest or width <= widest, f"prompts beside {width} tokens a row"


def _check_row(row: RowPlan, limits: RunnerLimits) -> None:
    n_given = 1 + len(row.drafts) if row.from_slot else len(row.tokens)
    assert row.count == n_given > 0, f"count {row.count}, {n_given} tokens"
    assert len(row.drafts) <= limits.max_drafts, f"{len(row.drafts)} drafts"
    assert len({d < 0 for d in row.drafts}) < 2, "drafts of the host and of the device"
    if row.mask is not None:
        shape = (1 + len(row.drafts), -(-limits.vocab_size // 32))
        assert row.mask.shape == shape, f"mask {row.mask.shape}, wanted {shape}"
    if row.redraw:
        assert row.mask is not None, "redraws without a mask"
        assert len(row.redraw) == row.mask.shape[0], "a redraw for every draw"
        assert -1 <= min(row.redraw) <= max(row.redraw) < limits.vocab_size, f"{row.redraw}"
    assert row.start + row.count <= limits.max_model_len, "a row leaves the context"
