"""Microseconds of packing a decode step (``Packer.pack``), by number of rows. No device is touched.

    python -m bench.host_pack

The scheduler's share (plan, commit) is measured beside it in ``bench/host.py``; together they
should stay below 300 us at 256 rows.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from jserve.model.view import StepDims, layout
from jserve.runner.batch import Packer
from jserve.runner.buckets import Ladder
from jserve.sampling import SamplingParams
from jserve.types import Choice, Request, RowPlan, StepPlan


def decode_plan(n_rows: int, dims: StepDims, context: int = 1000) -> StepPlan:
    """n decode rows of ``context`` tokens each, with pages of their own."""
    pages = -(-(context + 1) // dims.Z)
    rows = tuple(_row(slot, context) for slot in range(n_rows))
    table = 1 + np.arange(n_rows * pages, dtype=np.int32).reshape(n_rows, pages)
    return StepPlan(id=0, rows=rows, page_table_RM=table)


def _row(slot: int, context: int) -> RowPlan:
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=None)
    request = Request(id=str(slot), prompt_ids=(1,), params=params, eos_ids=(2,))
    choice = Choice(request=request, index=0, seed=slot)
    return RowPlan(choice=choice, slot=slot, start=context, count=1, from_slot=True)


def pack_us(n_rows: int, repeats: int = 200) -> float:
    """Median microseconds of one pack of n decode rows."""
    dims = StepDims(C=n_rows, M=256, Z=16, V=32000)
    packer = Packer(
        dims=dims,
        n_pages=1 + n_rows * 256,
        ladder=Ladder.of(max_decode_rows=n_rows, max_prefill_tokens=512, max_prefill_rows=8),
        fields_of=lambda bucket: layout(bucket, dims, {}),
        plan_attention=lambda views, bucket, dims: None,
    )
    plan = decode_plan(n_rows, dims)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        packer.pack(plan)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    print("rows   pack us (median of 200)")
    for n_rows in (1, 64, 256, 1024):
        print(f"{n_rows:4d}   {pack_us(n_rows):7.1f}")


if __name__ == "__main__":
    main()
