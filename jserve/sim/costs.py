"""Step costs for simulation: from a measured table or from a device's roofline.

``n_context`` is the mean number of KV tokens that the rows of a step read.

A table has one measured step per bucket and context. A step takes the cheapest bucket that holds
it, as the runner does, and a straight line between the contexts; the bucket is priced as if full.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jserve.config import CacheOptions
from jserve.errors import ConfigError
from jserve.kv_layout import Reach
from jserve.model.arch import Arch, with_kv_forms
from jserve.ports import StepCosts, StepTime
from jserve.sim.roofline import CHIPS, GIB, Roofline

FORMAT = "jserve-steps-1"
MAX_PREFILL_ROWS = 8
"""Prefill rows of one step, as in ``jserve.runner.runner``."""
GPU_HOST_S = 3e-4
"""Host seconds per step assumed beside a GPU (plan, pack and commit at 256 rows)."""


class TableFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of ``jserve bench steps``."""

    format: str
    about: dict[str, Any]
    """Model, machine, versions and options, for a reader."""
    host_seconds: float
    """The seconds that a step costs the host when nothing is hidden behind the device."""
    n_slots: int
    n_pages: int
    page_size: int
    max_model_len: int
    window: int = 0
    """``RunnerLimits.window``."""
    reaches: tuple[Reach, ...] = ()
    """``RunnerLimits.reaches``."""
    page_bytes: int = 0
    """Bytes of a page of ``page_size``; 0 in files that were measured before this was written down."""
    page_move_s: float = 0.0
    """``RunnerLimits.page_move_s``; 0 where it was measured without host memory."""
    steps: tuple[StepTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """The model whose steps a roofline prices."""

    name: str
    arch: Arch
    itemsize: int
    """Bytes of a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A simulated device: its prices and what fits."""

    name: str
    costs: StepCosts
    n_pages: int
    max_model_len: int
    host_s: float = 0.0
    window: int = 0
    """``RunnerLimits.window`` of the model."""
    reaches: tuple[Reach, ...] = ()
    """``RunnerLimits.reaches`` of the model."""
    page_bytes: int = 0
    """Of a KV page; 0: unknown."""
    move_s: float = 0.0
    """Seconds to move a page between device and host memory, one way; 0: unknown."""

    def copying(self, bytes_per_s: float) -> Device:
        """This device, with another bandwidth between its memory and the host's."""
        return dataclasses.replace(self, move_s=self.page_bytes / bytes_per_s)

    def n_host_pages(self, gib: float) -> int:
        """Pages that so much host memory holds.

        Raises:
            ConfigError: what a page or its move takes is not known.
        """
        if gib and not (self.page_bytes and self.move_s):
            raise ConfigError(
                f"host_memory_gb: {self.name} does not say what moving a page costs; measure again"
                " with host_memory_gb, or set copy_gb_s",
                field="host_memory_gb",
            )
        return int(gib * GIB) // self.page_bytes if gib else 0


class StepTimeTable:
    """``ports.StepCosts`` over measured steps.

    Raises:
        ConfigError: there is nothing in it, or a time is not positive.
    """

    def __init__(self, steps: Iterable[StepTime], name: str = "step table") -> None:
        self.name = name
        self._lines: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for step in steps:
            if not step.seconds > 0 or min(step.n_decode, step.n_prefill, step.n_context) < 0:
                raise ConfigError(f"{name}: {step} makes no sense", field="costs")
            line = self._lines.setdefault((step.n_decode, step.n_prefill), [])
            bisect.insort(line, (step.n_context, step.seconds))
        if not self._lines:
            raise ConfigError(f"{name}: no steps", field="costs")
        self._buckets = sorted(self._lines, key=lambda b: (b[0] + b[1], b[0]))
        self._chosen: dict[tuple[int, int], list[tuple[int, float]]] = {}

    def seconds(self, n_decode: int, n_prefill: int, n_context: int) -> float:
        """Raises ConfigError for a step that no bucket holds."""
        line = self._chosen.get((n_decode, n_prefill))
        if line is None:
            line = self._chosen[n_decode, n_prefill] = self._choose(n_decode, n_prefill)
        return _interpolated(line, n_context)

    def _choose(self, n_decode: int, n_prefill: int) -> list[tuple[int, float]]:
        for bucket in self._buckets:
            if bucket[0] >= n_decode and bucket[1] >= n_prefill:
                return self._lines[bucket]
        raise ConfigError(
            f"{self.name} has no step of {n_decode} decode rows and {n_prefill} prefill tokens;"
            " measure with larger limits or lower max_num_seqs and max_num_batched_tokens",
            field="costs",
        )


def _interpolated(line: list[tuple[int, float]], n_context: int) -> float:
    """On the straight lines between the points; beyond the last one, on its rising continuation."""
    if len(line) == 1 or n_context <= line[0][0]:
        return line[0][1]
    at = min(bisect.bisect_left(line, (n_context, 0.0)), len(line) - 1)
    (x0, y0), (x1, y1) = line[at - 1], line[at]
    slope = (y1 - y0) / (x1 - x0)
    return (
        y0 + slope * (n_context - x0)
        if n_context <= x1
        else y1 + max(0.0, slope) * (n_context - x1)
    )


def from_table(path: Path, options: CacheOptions) -> Device:
    """The device that a file of ``jserve bench steps`` describes.

    Raises:
        ConfigError: the file, or an option that only sizes memory and has no meaning here.
    """
    file = read_table(path, "costs")
    for name in ("memory_utilization", "kv_memory_gb", "kv_cache_dtype", "kv_groups"):
        if getattr(options, name) != getattr(CacheOptions(), name):
            raise ConfigError(
                f"{name} has no meaning with a measured table; set n_pages", field=name
            )
    page_size = options.on("cpu").page_size
    in_tokens, pages = (file.n_pages - 1) * file.page_size, page_size / file.page_size
    return Device(
        name=str(file.about.get("model", path.name)),
        costs=StepTimeTable(file.steps, str(path)),
        n_pages=options.n_pages or 1 + in_tokens // page_size,
        max_model_len=file.max_model_len,
        window=file.window,
        reaches=file.reaches,
        page_bytes=round(file.page_bytes * pages),
        move_s=file.page_move_s * pages,
        host_s=file.host_seconds,
    )


def read_table(path: Path, field: str) -> TableFile:
    """A file of ``jserve bench steps``.

    Raises:
        ConfigError: it is none; ``field`` is the option that named it.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=TableFile)
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(f"{field} {path}: {e}", field=field) from None
    if file.format != FORMAT:
        raise ConfigError(f"{field} {path}: format {file.format!r}, not {FORMAT}", field=field)
    return file


def from_roofline(model: SimulatedModel, gpu: str, options: CacheOptions) -> Device:
    """One ``gpu`` that serves ``model``.

    Raises:
        ConfigError: an unknown GPU, or weights that leave no room for KV.
    """
    if gpu not in CHIPS:
        raise ConfigError(f"no roofline for {gpu!r}, only {', '.join(CHIPS)}", field="gpu")
    form, skipped = options.kv_cache_dtype, options.kv_cache_dtype_skip_layers
    arch = with_kv_forms(
        model.arch, form, skipped, "bfloat16" if model.itemsize == 2 else "float32"
    )
    itemsizes = {"auto": model.itemsize, "float32": 4, "fp8_e4m3": 1}
    kv_itemsize = 1 if arch.kv_forms else itemsizes.get(form, 2)
    costs = Roofline(arch=arch, itemsize=model.itemsize, chip=CHIPS[gpu], kv_itemsize=kv_itemsize)
    groups = costs.groups(options)
    return Device(
        name=f"{model.name} on one {CHIPS[gpu].name} (roofline)",
        costs=costs,
        n_pages=costs.n_pages(options),
        max_model_len=model.arch.max_position,
        window=costs.kv.window,
        reaches=() if groups is None else groups.reaches,
        page_bytes=costs.page_bytes(options),
        move_s=costs.page_bytes(options) / CHIPS[gpu].copy_bytes_per_s,
        host_s=GPU_HOST_S,
    )


def ladder(costs: StepCosts, *, rows: int, tokens: int, context: int) -> tuple[StepTime, ...]:
    """The step times that the scheduler gets before the first step: a rung per doubling."""
    decode = [0, *_doubling(2, rows)]
    return tuple(
        StepTime(n_decode=d, n_prefill=p, n_context=c, seconds=costs.seconds(d, p, c))
        for d in decode
        for p in [0, *_doubling(32, tokens)]
        for c in _doubling(256, context)
        if d + p
    )


def _doubling(first: int, last: int) -> list[int]:
    top = max(0, math.ceil(math.log2(last / first)) if last > first else 0)
    return [first << i for i in range(top)] + [last]
