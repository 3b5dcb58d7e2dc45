"""A kernel beside XLA at a shape: right or wrong, and the time of both, for stages of ``bench.gpu``.

It owns the verdict: a kernel stays if it takes less than 1 / 1.05 of XLA's time at every shape of its stage. Of XLA's
ways to the same result the fastest counts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench.gpu_kernels import L2_BYTES, READ_BANDWIDTH, seconds
from bench.gpu_record import Record
from pallas_kernels.launch import interpreter

Call = Callable[..., Any]
NEEDED = 1.05


class Comparison(NamedTuple):
    """One shape of one kernel. ``inputs`` makes a fresh set of arguments from a seed; ``link`` gives
    the next call's arguments some dependence on the last call's result."""

    kernel: str
    shape: str
    inputs: Callable[[int], tuple[Any, ...]]
    ours: Call
    by_xla: dict[str, Call]
    link: Callable[[tuple[Any, ...], Any], tuple[Any, ...]]
    n_bytes: int
    """Fewest bytes that a call must move."""


def interpreted(tiny: bool) -> dict[str, Any]:
    return {"interpret": interpreter()} if tiny else {}


Check = Callable[[Comparison, int, bool], dict[str, Any]]
"""(comparison, seed of its inputs, whether shapes are tiny) -> figures, ``ok`` among them."""


def numerics(
    record: Record, comparisons: Sequence[Comparison], checks: Mapping[str, Check]
) -> None:
    """Every shape on fresh inputs, whose seed the record holds, by the check of its kernel."""
    for comparison in comparisons:
        measure = functools.partial(_on_fresh, checks[comparison.kernel], comparison, record.tiny)
        record.attempt(f"{comparison.kernel} {comparison.shape}", measure)


def _on_fresh(check: Check, comparison: Comparison, tiny: bool) -> dict[str, Any]:
    seed = time.time_ns() % 2**31
    return {"seed": seed, **check(comparison, seed, tiny)}


def times(record: Record, comparisons: Sequence[Callable[[bool], Iterator[Comparison]]]) -> None:
    """Each shape by the kernel and by XLA, cold, and a verdict a kernel. Shares are of the read bandwidth, for the
    fewest bytes that a call must move."""
    limit = record.figure("facts", "read bandwidth", "bytes_per_s", READ_BANDWIDTH)
    for some in comparisons:
        wanted = list(some(record.tiny))
        for comparison in wanted:
            measure = functools.partial(_measured, comparison, record.tiny, limit)
            record.attempt(f"{comparison.kernel} {comparison.shape}", measure)
        names = {f"{c.kernel} {c.shape}": c.shape for c in wanted}
        ratios = {
            names[x["name"]]: x["ratio"]
            for x in record.cases()
            if "ratio" in x and x["name"] in names
        }
        record.add(wanted[0].kernel, **verdict(ratios, len(wanted)))


def verdict(ratios: dict[str, float], wanted: int) -> dict[str, Any]:
    """What becomes of a kernel: XLA's time over its own at each shape decides."""
    if len(ratios) < wanted:
        return {"verdict": "open", "shapes": f"{len(ratios)} of {wanted}"}
    lost = [shape for shape, ratio in ratios.items() if ratio < NEEDED]
    found = {"verdict": "goes" if lost else "stays", "least": min(ratios.values())}
    return {**found, "lost": "; ".join(lost)} if lost else found


def _measured(c: Comparison, tiny: bool, limit: float) -> dict[str, Any]:
    calls = 1 if tiny else 8
    sets = sets_of(c, tiny)
    mine = duration(c, c.ours, sets, calls, tiny)
    others = {name: duration(c, call, sets, calls, tiny) for name, call in c.by_xla.items()}
    best = min(others, key=lambda name: others[name])
    ratio = others[best] / mine
    return {
        "us": mine * 1e6,
        "xla_us": others[best] * 1e6,
        "ratio": ratio,
        "xla": best,
        "bytes_per_s": c.n_bytes / mine,
        "share": c.n_bytes / mine / limit,
        "verdict": "stays" if ratio >= NEEDED else "goes",
    }


def timed(c: Comparison, call: Call, tiny: bool) -> dict[str, Any]:
    """The time of a call."""
    spent = duration(c, call, sets_of(c, tiny), 1 if tiny else 8, tiny)
    return {"us": spent * 1e6, "bytes_per_s": c.n_bytes / spent}


def sets_of(c: Comparison, tiny: bool) -> list[tuple[Any, ...]]:
    """Arguments that together are far larger than the L2, or eight of them."""
    copies = 1 if tiny else max(1, min(8, 4 * L2_BYTES // c.n_bytes))
    return [c.inputs(seed) for seed in range(copies)]


def duration(
    c: Comparison,
    call: Call,
    sets: Sequence[Any],
    calls: int,
    tiny: bool,
    options: dict[str, Any] | None = None,
) -> float:
    """Seconds of a call in a chain of ``calls``, compiled with these options of XLA."""

    def chain(sets: Sequence[tuple[Any, ...]]) -> Any:
        """Each call reads the next set, so that small ones are not in the L2 either."""
        sets, out = list(sets), None
        for i in range(calls):
            at = i % len(sets)
            args = sets[at] if out is None else c.link(sets[at], out)
            out = call(*args)
        return out

    return seconds(chain, (sets,), calls, 1 if tiny else 7, options)
