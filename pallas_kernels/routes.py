"""Which kernels the served step calls, which wait for a measurement, and why.

Owns the decision, which a record of ``bench.gpu`` changes: a kernel is served once it is right on a
device and takes less than 1 / 1.05 of XLA's time at every shape of ``bench/gpu_candidates.py``; one
that does not is deleted. Anybody may import a kernel that is not served. ``tests/pallas_kernels/test_routes.py``
keeps jserve from calling one.
"""

from __future__ import annotations

from typing import NamedTuple


class Route(NamedTuple):
    """``served``: jserve may call it. ``why``: the evidence so far."""

    served: bool
    why: str


ROUTES: dict[str, Route] = {
    "paged_attention": Route(True, "XLA has nothing to the same end; behind backend hopper"),
    "ragged_prefill": Route(True, "XLA has nothing to the same end; behind backend hopper"),
    "sample_threshold": Route(
        False, "not timed: 6 kernels for XLA's 60 and more, 21 of them a sort"
    ),
    "kv_write": Route(
        False, "not timed: 1 kernel for XLA's 3, or 7 with norms of queries and keys"
    ),
    "quant_matmul": Route(False, "not timed, and no checkpoint of 4 bits is read yet"),
}
"""Of every package of kernels here."""
