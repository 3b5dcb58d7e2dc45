"""Counts the processor cores available to this process.

It owns that one number, which is not the machine's where the process is pinned or in a container.
"""

from __future__ import annotations

import os


def n_cores() -> int:
    """Cores that this process may run on, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
