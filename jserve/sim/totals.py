"""Sums up the runs of several simulated engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq

from jserve.sched.stats import SchedStats
from jserve.sim.replica import SimReplica
from jserve.sim.simulate import Run

_MOST = ("overload_level", "overload_load")
_LEVELS = {*_MOST, "lanes"}


def together(replicas: Seq[SimReplica], began: float, ended: float) -> Run:
    """The run of ``replicas``, which served the same clients from ``began`` to ``ended``."""
    runs = [one.simulation.result() for one in replicas]
    replica_s = sum([one.ended - one.began for one in replicas])
    share = (ended - began) / replica_s if replica_s else 0.0
    return dataclasses.replace(
        runs[0],
        stats=_sum([run.stats for run in runs]),
        n_evicted=sum(run.n_evicted for run in runs),
        n_steps=sum(run.n_steps for run in runs),
        n_tokens=sum(run.n_tokens for run in runs),
        busy_s=sum(run.busy_s for run in runs) * share,
        counters={k: sum(run.counters[k] for run in runs) for k in runs[0].counters},
        moved_s=sum(run.moved_s for run in runs),
        began=began,
        ended=ended,
        by_replica=[run.n_tokens for run in runs],
        replica_s=replica_s,
    )


def _sum(all_stats: list[SchedStats]) -> SchedStats:
    """Those of all engines together."""
    names = [f.name for f in dataclasses.fields(SchedStats) if f.name not in _LEVELS]
    totals = {name: sum(getattr(stats, name) for stats in all_stats) for name in names}
    lanes = {k: sum(stats.lanes[k] for stats in all_stats) for k in all_stats[0].lanes}
    most = {name: max(getattr(stats, name) for stats in all_stats) for name in _MOST}
    return SchedStats(**totals, **most, lanes=lanes)
