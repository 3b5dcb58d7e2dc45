"""Microseconds of packing a decode step (``Packer.pack``) by rows and contexts. No device is touched.

    python -m bench.host_pack [--rows 1,64,256,1024] [--contexts 1000] [--max-len 4096] [--page-size 16]

Beside it the bytes of the buffer that goes down every step, and the share of them that is page tables. The
scheduler's share (plan, commit) is measured in ``bench/host.py``; together they should stay below 300 us at 256
rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

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


def packer_for(n_rows: int, dims: StepDims) -> Packer:
    return Packer(
        dims=dims,
        n_pages=1 + n_rows * dims.M,
        ladder=Ladder.of(max_decode_rows=n_rows, max_prefill_tokens=512, max_prefill_rows=8),
        fields_of=lambda bucket: layout(bucket, dims, {}),
        plan_attention=lambda views, bucket, dims: None,
    )


def measure(
    n_rows: int, context: int, dims: StepDims, repeats: int = 200
) -> tuple[float, int, float]:
    """(median microseconds of one pack of n decode rows, bytes of the buffer, share of its page tables)."""
    packer, plan, times = packer_for(n_rows, dims), decode_plan(n_rows, dims, context), []
    batch = packer.pack(plan)
    for _ in range(repeats):
        start = time.perf_counter()
        batch = packer.pack(plan)
        times.append(time.perf_counter() - start)
    tables = batch.bucket.R * dims.M * 4
    return statistics.median(times) * 1e6, batch.buf.nbytes, tables / batch.buf.nbytes


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.host_pack", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", default="1,64,256,1024", help="row counts, comma-separated")
    parser.add_argument("--contexts", default="1000", help="tokens of each row, comma-separated")
    parser.add_argument("--max-len", type=int, default=4096, help="the model's context")
    parser.add_argument("--page-size", type=int, default=16)
    args = parser.parse_args(argv)
    print("rows   context   pack us (median of 200)   buffer KB   of it page tables")
    for n_rows in map(int, args.rows.split(",")):
        dims = StepDims(C=n_rows, M=-(-args.max_len // args.page_size), Z=args.page_size, V=32000)
        for context in map(int, args.contexts.split(",")):
            us, n_bytes, share = measure(n_rows, context, dims)
            print(f"{n_rows:4d} {context:9d}   {us:23.1f}   {n_bytes / 1e3:9.0f}   {share:17.0%}")


if __name__ == "__main__":
    main()
