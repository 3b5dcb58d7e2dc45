"""Plans device memory: how many KV pages fit beside weights, slots and scratch.

On an accelerator the pool takes what ``memory_utilization`` leaves after weights and scratch. On a CPU the device
is the host's memory, which others use too: the pool takes at most a quarter of what is free, and never more than
twice what all slots can fill (the second half keeps prefixes).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jserve.config import SCRATCH_SHARE, CacheOptions
from jserve.errors import ConfigError
from jserve.kv_layout import KVLayout
from jserve.model.step import slot_shapes
from jserve.model.view import StepDims
from jserve.window import PageDemand

GIB = 2**30
CPU_SHARE = 0.25
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The KV pool and what it was sized from; bytes are per device."""

    n_pages: int
    page_bytes: int
    kv_bytes: int
    weight_bytes: int
    slot_bytes: int
    vocab_row_bytes: int
    """Of ``slot_bytes``, token counts and biases of sequences with penalties or biases."""
    total_bytes: int
    """Memory of the device (on a CPU: of the host)."""
    tokens: int
    """Tokens of KV the pool holds, of sequences of the full context where groups of layers differ."""

    def report(self) -> dict[str, float | int]:
        """Figures for the start banner; GiB rounded to 0.01."""

        def gib(n: int) -> float:
            return round(n / GIB, 2)

        return {
            "kv_pages": self.n_pages,
            "kv_tokens": self.tokens,
            "kv_gib": gib(self.kv_bytes),
            "weights_gib": gib(self.weight_bytes),
            "slots_gib": gib(self.slot_bytes),
            "device_gib": gib(self.total_bytes),
        }


def slot_bytes(dims: StepDims) -> int:
    """Bytes of all slots and vocab rows, which every device holds whole."""
    return _bytes_of(slot_shapes(dims))


def _bytes_of(shapes: Any) -> int:
    leaves = jax.tree.leaves(shapes)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Total and used memory of a device, in bytes; of a CPU, the host's memory."""

    total: int
    taken: int
    is_host: bool

    @classmethod
    def of(cls, device: Any) -> DeviceMemory:
        """Of a live jax device."""
        stats = device.memory_stats() if device.platform != "cpu" else None
        if not stats:
            return cls.of_host()
        total = stats["bytes_limit"]
        return cls(total=total, taken=stats.get("bytes_in_use", 0), is_host=False)

    @classmethod
    def of_host(cls) -> DeviceMemory:
        total, available = _host_memory()
        return cls(total=total, taken=total - available, is_host=True)

    def room(self, utilization: float, weights: int) -> int:
        """Bytes that slots and KV may take beside ``weights`` bytes of weights (on a CPU they are
        among what is taken)."""
        if self.is_host:
            share = int(self.total * min(utilization, CPU_SHARE))
            return min(share, int((self.total - self.taken) * utilization))
        return int(self.total * (utilization - SCRATCH_SHARE)) - max(self.taken, weights)


def _host_memory() -> tuple[int, int]:
    """Bytes of the host's memory, and those that can still be taken without swapping.

    Linux counts the latter. Elsewhere they are taken to be all: on a CPU the pool is bounded by
    ``CPU_SHARE`` of the whole too.
    """
    if not MEMINFO.exists():
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total
    fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    total, available = (int(fields[k].split()[0]) * 1024 for k in ("MemTotal", "MemAvailable"))
    return total, available


def plan_memory(
    *,
    kv: KVLayout,
    dims: StepDims,
    weight_bytes: int,
    options: CacheOptions,
    memory: DeviceMemory,
    demand: PageDemand | None = None,
    resting: PageDemand | None = None,
) -> MemoryPlan:
    """Size the KV pool; ``n_pages`` or ``kv_memory_gb`` of the options decide if they are given.

    Args:
        kv: what a page holds.
        weight_bytes: of one device, a drafter's too.
        demand: the pages that a sequence holds at once; None: those of all its tokens.
        resting: those that it holds once its prompt is computed; None: as ``demand``.

    Raises:
        ConfigError: not even one sequence of the full context fits; ``field`` is the option that
        limits it.
    """
    length = dims.M * dims.Z
    demand = demand or PageDemand(page_size=dims.Z)
    longest, held = demand.most(length), (resting or demand).most(length)
    one, slots = kv.page_bytes, slot_bytes(dims)
    free = memory.room(options.memory_utilization, weight_bytes)
    name, n_pages = "memory_utilization", _steady((free - slots) // one, is_host=memory.is_host)
    useful = 2 * dims.C * (dims.M if kv.groups is None else longest) + 1
    if options.n_pages:
        name, n_pages = "n_pages", options.n_pages
    elif options.kv_memory_gb:
        name, n_pages = "kv_memory_gb", int(options.kv_memory_gb * GIB) // one
    elif memory.is_host:
        n_pages = min(n_pages, useful)
    if n_pages < longest + 1:
        raise ConfigError(
            f"{name} leaves {max(n_pages, 0)} KV pages of {one} bytes; one sequence of "
            f"{length} tokens needs {longest + 1}",
            field=name,
        )
    return MemoryPlan(
        n_pages=n_pages,
        page_bytes=one,
        kv_bytes=n_pages * one,
        weight_bytes=weight_bytes,
        slot_bytes=slots,
        vocab_row_bytes=_bytes_of(slot_shapes(dims).vocab),
        total_bytes=memory.total,
        tokens=(n_pages - 1) * dims.Z if kv.groups is None else (n_pages - 1) * length // held,
    )


def host_pages(gib: float, page_bytes: int) -> int:
    """Pages of ``page_bytes`` (all devices together) that ``gib`` GiB of host memory hold."""
    return int(gib * GIB) // page_bytes


HOST_BITS, DEVICE_BITS = 4, 7


def _steady(n_pages: int, *, is_host: bool) -> int:
    """``n_pages`` down to a few significant bits: the pool's size is in the shape of every program, so
    a few free MiB more or less at the next start must not miss the whole compile cache. What is free of a
    host's memory changes by gigabytes, and few of its pages are used; of a device's, 1.6 % are left at most."""
    step = 1 << max(0, n_pages.bit_length() - (HOST_BITS if is_host else DEVICE_BITS))
    return n_pages // step * step
