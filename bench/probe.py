"""What the machine can do right now: memory bandwidth, foreign load, and what it is.

It owns the physical limits printed beside the results. A guest's bandwidth can double from one minute to the next,
so the probe runs before every turn and each figure keeps its own.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

MIB = 1 << 20
VECTOR_UNITS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16")
PACKAGES = ("jax", "jaxlib", "numpy", "transformers", "torch", "aiohttp")


def usable_cores() -> set[int]:
    """The cores that this process and its children may run on (``taskset``, a container's limits)."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def bandwidth(threads: int = 0, mib: int = 96, repeats: int = 7) -> dict[str, float]:
    """GB/s of ``a = b + s * c`` in numpy, ``threads`` slices at once (0: one per usable core).

    Two passes over arrays of ``mib`` MiB: ``a = s * c`` moves two arrays, ``a += b`` three. Reads
    that a store causes are not counted, so this is a little below what a copy in C would show.
    """
    threads = threads or len(usable_cores())
    n = mib * MIB // 4
    parts = [_Triad(n // threads) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_Triad.run, parts))
        seconds = []
        for _ in range(repeats):
            begin = time.perf_counter()
            list(pool.map(_Triad.run, parts))
            seconds.append(time.perf_counter() - begin)
    moved = 5 * 4 * (n // threads) * threads / 1e9
    return {
        "threads": threads,
        "gb_s_best": round(moved / min(seconds), 2),
        "gb_s_median": round(moved / statistics.median(seconds), 2),
    }


class _Triad:
    """One thread's slices."""

    def __init__(self, n: int) -> None:
        self.a, self.b, self.c = (np.full(n, v, np.float32) for v in (0.0, 1.0, 2.0))

    def run(self) -> None:
        np.multiply(self.c, 3.0, out=self.a)
        np.add(self.a, self.b, out=self.a)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """CPU seconds spent so far: by the machine, by this process, by a server's process tree."""

    wall: float
    machine: float
    client: float
    server: float

    @classmethod
    def read(cls, pid: int | None) -> Clock:
        t = psutil.cpu_times()
        idle = t.idle + getattr(t, "iowait", 0.0)
        own = psutil.Process().cpu_times()
        return cls(
            wall=time.perf_counter(),
            machine=sum(t[:8]) - idle,
            client=own.user + own.system,
            server=_tree_seconds(pid) if pid else 0.0,
        )

    def until(self, later: Clock) -> dict[str, float]:
        """Cores in use between two readings; ``foreign_cores`` is everybody else's: the noise."""
        wall = max(later.wall - self.wall, 1e-9)
        machine, client, server = (
            (getattr(later, k) - getattr(self, k)) / wall for k in ("machine", "client", "server")
        )
        return {
            "server_cores": round(server, 2),
            "client_cores": round(client, 2),
            "foreign_cores": round(max(0.0, machine - client - server), 2),
        }


def _tree_seconds(pid: int) -> float:
    """User and system seconds of a process and its living descendants."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    total = 0.0
    for process in family:
        try:
            t = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += t.user + t.system
    return total


def tree_memory_gib(pid: int) -> float:
    """Resident GiB of a process and its descendants, shared pages counted once per process."""
    total = 0
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            total += process.memory_info().rss
    except psutil.NoSuchProcess:
        pass
    return round(total / 2**30, 2)


def machine() -> dict[str, Any]:
    """Device and versions, for the head of a result file; no host name and no paths."""
    return {
        "cpu": _cpu_name(),
        "vectors": _vector_units(),
        "cores": len(usable_cores()),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "load_1m": round(os.getloadavg()[0], 2),
        "packages": {name: v for name in PACKAGES if (v := _version(name))},
    }


def record(kind: str, options: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """A result file of a measurement without a server: what it is, where and how it ran, its figures."""
    head = {"format": 1, "kind": kind, "machine": machine(), "options": options}
    return head | {"lines": lines}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _vector_units() -> list[str]:
    """Those that decide which native kernels can run, as Linux names them; empty where it does not say."""
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return []
    return [unit for unit in VECTOR_UNITS if unit in words]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
