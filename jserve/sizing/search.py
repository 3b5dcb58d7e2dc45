"""Searches the layout of a model that serves a load within its targets on the fewest devices.

A layout is how many devices share a model (tensor and expert parallel) and how many such engines there are. Each is
laid out as an engine would be, then the scheduler that serves runs the load on it, over a device that takes the
roofline's time for each step. ::

    devices   tp x ep x engines      4: 4x1x1  2x1x2  1x1x4  2x2x1 ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.model.arch import Moe
from jserve.sharding import Sharding
from jserve.sim.costs import GPU_HOST_S, Device
from jserve.sim.fleet import simulated
from jserve.sim.report import ALL, Slo, summarise
from jserve.sim.roofline import CHIPS, Chip
from jserve.sim.simulate import Setup
from jserve.sim.trace import TraceItem
from jserve.sizing.layout import Layout, lay_out
from jserve.sizing.models import Model, find
from jserve.sizing.plan import roofline_of

MOST_DEVICES = 64
MACHINE = 8
"""Devices of a machine: engines beyond them are in other processes."""
GOOD = 0.99
"""Share of requests that have to keep the targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedLayout:
    """One layout, and what became of it."""

    tp: int
    ep: int
    replicas: int
    refused: str = ""
    """The reason why no engine starts so; empty: one does."""
    good_share: float | None = None
    """Of the requests, those that kept the targets; None: it was not simulated, since fewer devices do."""
    ttft_ms: float = 0.0
    """Of 99 % of the requests at most."""
    itl_ms: float = 0.0
    """Of 99 % of the gaps at most."""
    output_tok_s: float = 0.0
    busy_share: float = 0.0

    @property
    def devices(self) -> int:
        return self.tp * self.ep * self.replicas

    @property
    def serves(self) -> bool:
        return not self.refused and (self.good_share or 0.0) >= GOOD

    @property
    def sharding(self) -> Sharding:
        """Of one process: its engines are axis ``dp``."""
        sizes = {"dp": self.replicas // self.processes, "ep": self.ep, "tp": self.tp}
        return Sharding.of({"mesh": {k: n for k, n in sizes.items() if n > 1 or k == "tp"}})

    @property
    def processes(self) -> int:
        """One a machine, each with as many engines as it has devices for."""
        return max(1, self.devices // MACHINE) if self.tp * self.ep <= MACHINE else self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All layouts that were looked at, the best first."""

    model: str
    device: str
    devices: int
    candidates: tuple[TriedLayout, ...]

    @property
    def winner(self) -> TriedLayout | None:
        """The one that serves on the fewest devices; None: no layout does."""
        first = self.candidates[0]
        return first if first.serves else None

    def why_not(self, lost: TriedLayout) -> str:
        """The reason why another one is better."""
        if lost.refused:
            return lost.refused
        best = self.candidates[0]
        if lost.good_share is None:
            return f"takes {lost.devices} devices instead of {best.devices}"
        if not lost.serves:
            return f"{lost.good_share:.1%} of the requests keep the targets, {GOOD:.0%} have to"
        return f"its last percent of first tokens comes after {lost.ttft_ms:.0f} ms, not {best.ttft_ms:.0f}"


def search(
    name: str,
    device: str,
    n_devices: int,
    trace: Sequence[TraceItem],
    slo: Slo,
    config: EngineConfig,
    progress: Callable[[str, int, int], None],
) -> Found:
    """Every layout of ``name`` over up to ``n_devices`` devices of a kind, under ``trace``.

    Raises:
        ConfigError: an unknown device, or one without memory of its own, a number of devices out of range, a model that
            cannot be read, a layout stated beside the search; ``field`` is the option.
    """
    chip = CHIPS.get(device)
    if chip is None or not chip.memory:
        known = ", ".join(name for name, chip in CHIPS.items() if chip.memory)
        raise ConfigError(f"device must be one of {known}, not {device!r}", field="device")
    if not 1 <= n_devices <= MOST_DEVICES:
        raise ConfigError(f"devices must be in [1, {MOST_DEVICES}]", field="devices")
    for option in ("tensor_parallel_size", "expert_parallel_size", "sharding"):
        if getattr(config.device, option) not in (1, ""):
            raise ConfigError(f"{option}: the search chooses it", field=option)
    options = config.model
    forms = (options.quantization, options.quantization_config)
    model = find(
        name,
        options.revision,
        options.dtype,
        quantization=forms,
        max_model_len=options.max_model_len,
    )
    shapes, found = list(layouts(model, n_devices)), list[TriedLayout]()
    for done, (tp, ep, replicas) in enumerate(shapes):
        progress("simulate", done, len(shapes))
        one = TriedLayout(tp=tp, ep=ep, replicas=replicas)
        fewer = any(c.serves and c.devices < one.devices for c in found)
        found.append(one if fewer else _tried(one, model, config, chip, trace, slo))
    progress("simulate", len(shapes), len(shapes))
    found.sort(key=_rank)
    return Found(model=model.name, device=chip.name, devices=n_devices, candidates=tuple(found))


def layouts(model: Model, n_devices: int) -> Iterator[tuple[int, int, int]]:
    """(tp, ep, engines) over powers of two of devices, up to as many as there are; ep only where there are experts."""
    has_experts = any(isinstance(layer.ffn, Moe) for layer in model.arch.layers)
    powers = [1 << i for i in range(n_devices.bit_length()) if 1 << i <= n_devices]
    for n in powers:
        for tp in powers:
            for ep in powers if has_experts else (1,):
                if n % (tp * ep) == 0:
                    yield tp, ep, n // (tp * ep)


def _rank(c: TriedLayout) -> tuple[float, ...]:
    """The best first: those that serve, on few devices, with early first tokens; then those that nearly do."""
    if c.serves:
        return (0, c.devices, c.ttft_ms)
    return (2 if c.refused else 1, -(c.good_share or 0.0), c.devices)


def _tried(
    made: TriedLayout,
    model: Model,
    config: EngineConfig,
    chip: Chip,
    trace: Sequence[TraceItem],
    slo: Slo,
) -> TriedLayout:
    tp, ep, replicas = made.tp, made.ep, made.replicas
    split = dataclasses.replace(config.device, tensor_parallel_size=tp, expert_parallel_size=ep)
    try:
        laid = lay_out(model, dataclasses.replace(config, device=split), chip)
    except ConfigError as error:
        return dataclasses.replace(made, refused=error.message)
    setup = Setup(config=laid.config, device=_device(laid, chip), replicas=replicas)
    report = summarise(simulated(trace, setup), slo)
    lane: dict[str, Any] = report["lanes"][ALL]
    return dataclasses.replace(
        made,
        good_share=lane["good_share"] or 0.0,
        ttft_ms=(lane["ttft_ms"] or {}).get("p99", 0.0),
        itl_ms=(lane["itl_ms"] or {}).get("p99", 0.0),
        output_tok_s=lane["output_tok_s"] or 0.0,
        busy_share=report["device_busy_share"] or 0.0,
    )


def _device(laid: Layout, chip: Chip) -> Device:
    line, sizes = roofline_of(laid, chip), laid.sizes
    return Device(
        name=f"{laid.model.name} on {laid.tp} x {chip.name} (roofline)",
        costs=line,
        n_pages=sizes.memory.n_pages,
        max_model_len=laid.model.arch.max_position,
        window=line.kv.window,
        reaches=() if sizes.dims.groups is None else sizes.dims.groups.reaches,
        page_bytes=sizes.kv.page_bytes,
        move_s=sizes.kv.page_bytes / chip.copy_bytes_per_s,
        host_s=GPU_HOST_S,
    )


def as_mapping(found: Found) -> dict[str, Any]:
    """Ready for JSON."""
    rows = [
        dataclasses.asdict(c)
        | {"devices": c.devices, "sharding": str(c.sharding), "processes": c.processes}
        | {"serves": c.serves, "lost": found.why_not(c)}
        for c in found.candidates
    ]
    if found.winner is not None:
        rows[0]["lost"] = ""
    return {"model": found.model, "device": found.device, "devices": found.devices, "layouts": rows}
