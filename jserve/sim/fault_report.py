"""Summarises what lost replicas cost: those whose requests went on elsewhere, and those who came meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jserve.sim.faults import Outage
from jserve.sim.records import Done
from jserve.sim.simulate import Run
from jserve.sim.spread import spread


def fault_report(run: Run, is_good: Callable[[Done], bool]) -> dict[str, Any]:
    """The figures of ``run``, ready for JSON; {}: no replica was lost.

    A request came meanwhile where it arrived between a fault and the time at which another replica was ready.
    """
    if not run.outages:
        return {}
    resumed = [one for one in run.records.done if one.n_resumed]
    meanwhile = [d for d in run.records.done if any(one.lasts(d.at) for one in run.outages)]
    n_good, gaps = sum(map(is_good, meanwhile)), run.records.resumed_gaps
    return {
        "outages": [_outage(one) for one in run.outages],
        "resumed": {
            "requests": len(resumed),
            "itl_ms": spread(np.concatenate(gaps) if gaps else ()),
            "longest_itl_ms": spread([float(each.max()) for each in gaps]),
        },
        "meanwhile": {
            "requests": len(meanwhile),
            "ttft_ms": spread([d.ttft for d in meanwhile if d.ttft is not None]),
            "good_share": round(n_good / len(meanwhile), 4) if meanwhile else None,
        },
        "remote_prefills_failed": run.n_remote_failed,
    }


def fault_line(report: dict[str, Any], all_itl_ms: dict[str, float] | None) -> str:
    """``fault_report`` as a sentence, beside the waits between tokens of all requests."""
    lost = ", ".join(
        f"{one['kind']}={one['at']:g} of replica {one['replica']}" for one in report["outages"]
    )
    resumed, meanwhile = report["resumed"], report["meanwhile"]
    longest, itl, ttft = resumed["longest_itl_ms"], resumed["itl_ms"], meanwhile["ttft_ms"]
    return (
        f"{lost}: {resumed['requests']} requests went on elsewhere,"
        f" longest wait between tokens {_ms(longest, 'max')} (p99 of their waits {_ms(itl, 'p99')};"
        f" of all {_ms(all_itl_ms, 'max')}, p99 {_ms(all_itl_ms, 'p99')});"
        f" {meanwhile['requests']} came before another was ready: TTFT p50 {_ms(ttft, 'p50')},"
        f" p99 {_ms(ttft, 'p99')}, good {_percent(meanwhile['good_share'])}"
    )


def _outage(one: Outage) -> dict[str, Any]:
    """``noticed_s`` and ``ready_s`` are seconds after the fault; None: that has not come."""
    after = [at - one.fault.at for at in (one.noticed_at, one.ready_at)]
    noticed_s, ready_s = [None if s == math.inf else round(s, 4) for s in after]
    return {
        "kind": one.fault.kind,
        "at": one.fault.at,
        "replica": one.replica,
        "noticed_s": noticed_s,
        "ready_s": ready_s,
        "requests": one.n_requests,
    }


def _ms(spread_ms: dict[str, float] | None, point: str) -> str:
    return "-" if spread_ms is None else f"{spread_ms[point]:.4g} ms"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
