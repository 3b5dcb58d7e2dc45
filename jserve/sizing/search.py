"""Searches the layout of a model that serves a load within its targets on the fewest devices.

A layout is how many devices share a model (tensor and expert parallel), what these exchange (``Exchange``) and how many
such engines there are. Each is laid out as an engine would be, then the scheduler that serves runs the load on it, over
a device that takes the roofline's time for each step. ::

    devices   tp x ep x engines      4: 4x1x1  2x1x2  1x1x4  2x2x1 ...
    exchange  sums x logits x residual  (``exchange``), but for those that another one is never dearer than

A layout that cannot win any more is not simulated to its end (``bounds``), which leaves the winner what it is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.model.arch import Moe
from jserve.ports import StepCosts
from jserve.sharding import LOGITS, RESIDUAL, SUMS, Sharding
from jserve.sim.costs import GPU_HOST_S, Device
from jserve.sim.fleet import simulated
from jserve.sim.report import ALL, Slo, summarise
from jserve.sim.roofline import CHIPS, Chip
from jserve.sim.simulate import Setup
from jserve.sim.trace import TraceItem
from jserve.sizing.bounds import GOOD, Bounds, too_slow
from jserve.sizing.exchange import Cheapest, exchanges, lines_of, no_dearer
from jserve.sizing.layout import Layout, lay_out
from jserve.sizing.models import Model, find
from jserve.sizing.plan import roofline_of

MOST_DEVICES = 64
MACHINE = 8
"""Devices of a machine: engines beyond them are in other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedLayout:
    """One layout, and what became of it."""

    tp: int
    ep: int
    replicas: int
    sums: str = SUMS[0]
    logits: str = LOGITS[0]
    residual: str = RESIDUAL[0]
    refused: str = ""
    """The reason why no engine starts so; empty: one does."""
    dropped: str = ""
    """The reason why it was not simulated to its end though no fewer devices serve; empty: it was, or they do."""
    n_over: int = 0
    """Requests that were over when it was dropped."""
    good_share: float | None = None
    """Of the requests, those that kept the targets; None: it was not simulated to its end."""
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
        mesh = {k: n for k, n in sizes.items() if n > 1 or k == "tp"}
        return Sharding.of({"mesh": mesh} | self.exchange)

    @property
    def exchange(self) -> dict[str, str]:
        """The way in which its devices exchange, by the keys of a sharding."""
        return {"sums": self.sums, "logits": self.logits, "residual": self.residual}

    @property
    def shape(self) -> tuple[int, int, int]:
        """All that is the same whatever the devices exchange."""
        return self.tp, self.ep, self.replicas

    @property
    def processes(self) -> int:
        """One a machine, each with as many engines as it has devices for."""
        return max(1, self.devices // MACHINE) if self.tp * self.ep <= MACHINE else self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All layouts that were looked at, the best first: of the same devices each way in which they may exchange."""

    model: str
    device: str
    devices: int
    candidates: tuple[TriedLayout, ...]

    @property
    def winner(self) -> TriedLayout | None:
        """The one that serves on the fewest devices; None: no layout does."""
        first = self.candidates[0]
        return first if first.serves else None

    @property
    def shapes(self) -> tuple[TriedLayout, ...]:
        """The best of each ``TriedLayout.shape``, the best first."""
        best: dict[tuple[int, int, int], TriedLayout] = {}
        for candidate in self.candidates:
            best.setdefault(candidate.shape, candidate)
        return tuple(best.values())

    def why_not(self, lost: TriedLayout) -> str:
        """The reason why another one is better."""
        if lost.refused or lost.dropped:
            return lost.refused or lost.dropped
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
        ConfigError: an unknown device, or one without memory of its own, a load of no requests, a number of devices out
            of range, a model that cannot be read, a layout stated beside the search; ``field`` is the option.
    """
    chip = CHIPS.get(device)
    if chip is None or not chip.memory:
        known = ", ".join(name for name, chip in CHIPS.items() if chip.memory)
        raise ConfigError(f"device must be one of {known}, not {device!r}", field="device")
    if not trace:
        raise ConfigError("search: the load has no requests", field="search")
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
    # A mixture has tens of thousands of tensors, and each layout asks for their specs several times.
    family = dataclasses.replace(model.family, specs=functools.cache(model.family.specs))
    model = dataclasses.replace(model, family=family)
    laid_out = functools.cache(functools.partial(_laid_out, model, config, chip))
    groups = [
        [
            TriedLayout(tp=tp, ep=ep, replicas=n, **exchange)  # type: ignore[arg-type]
            for exchange in exchanges(tp * ep, model.dtype.itemsize)
        ]
        for tp, ep, n in layouts(model, n_devices)
    ]

    @functools.cache
    def prefill_s(c: TriedLayout) -> float:
        return _prefill_s(c, laid_out(c.tp, c.ep), chip, trace)

    # Of as many devices the one with the shortest prefill first: the others have to beat it.
    order = sorted(groups, key=lambda group: (group[0].devices, min(map(prefill_s, group))))
    found = list[TriedLayout]()
    for done, group in enumerate(order):
        progress("simulate", done, len(order))
        best = min([c for c in found if c.serves], key=_rank, default=None)
        if best is None or best.devices == group[0].devices:
            laid = laid_out(group[0].tp, group[0].ep)
            group = _tried_all(sorted(group, key=prefill_s), laid, chip, trace, slo, best)
        found += group
    progress("simulate", len(order), len(order))
    found.sort(key=_rank)
    if (near := found[0]).dropped and near.n_over:  # how near it comes is worth its end
        laid = laid_out(near.tp, near.ep)
        found[0] = _tried(near, laid, _costs([near], laid, chip), chip, trace, slo)
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
    """The best first: those that serve, on few devices, with early first tokens and few parts; then those that nearly
    do."""
    if c.serves:
        return (0, c.devices, c.ttft_ms, *_parts(c))
    return (2 if c.refused else 1, -(c.good_share or 0.0), -c.n_over, c.devices, *_parts(c))


def _parts(c: TriedLayout) -> tuple[int, ...]:
    """Of layouts that do as well, the one with the least comes first."""
    chosen = (SUMS.index(c.sums), LOGITS.index(c.logits), RESIDUAL.index(c.residual))
    return (c.tp, c.ep, *chosen)


def _prefill_s(
    made: TriedLayout, laid: Layout | ConfigError, chip: Chip, trace: Sequence[TraceItem]
) -> float:
    """Seconds of a step that computes a prompt of the load's mean length."""
    mean = sum(item.n_prompt for item in trace) // len(trace)
    return _costs([made], laid, chip).seconds(0, max(1, mean), mean)


def _costs(group: Sequence[TriedLayout], laid: Layout | ConfigError, chip: Chip) -> Cheapest:
    """Of an engine that exchanges, at each step, in the cheapest way of those of ``group``."""
    if isinstance(laid, ConfigError):
        return Cheapest(())
    ways = [one.exchange for one in group]
    return Cheapest(lines_of(roofline_of(laid, chip), laid.model.dtype.itemsize, ways))


def _laid_out(
    model: Model, config: EngineConfig, chip: Chip, tp: int, ep: int
) -> Layout | ConfigError:
    """As an engine would be, or why none starts so."""
    split = dataclasses.replace(config.device, tensor_parallel_size=tp, expert_parallel_size=ep)
    try:
        return lay_out(model, dataclasses.replace(config, device=split), chip)
    except ConfigError as error:
        return error


def _tried_all(
    group: Sequence[TriedLayout],
    laid: Layout | ConfigError,
    chip: Chip,
    trace: Sequence[TraceItem],
    slo: Slo,
    best: TriedLayout | None,
) -> list[TriedLayout]:
    """``group``, which differ in what they exchange, with what became of each beside ``best``; all are dropped at once
    where even the cheapest exchange at each step cannot win, and those that cost no less than another at any step."""
    kept, tried = group, list[TriedLayout]()
    if len(group) > 1 and (bounds := _bounds(best, trace, slo)) is not None:
        kept, tried = _apart(group, laid, chip)
        least = _tried(group[0], laid, _costs(kept, laid, chip), chip, trace, slo, bounds)
        if least.dropped:
            fate = {"dropped": least.dropped, "n_over": least.n_over}
            return [dataclasses.replace(one, **fate) for one in group]
    for one in kept:
        bounds, costs = _bounds(best, trace, slo), _costs([one], laid, chip)
        tried.append(one := _tried(one, laid, costs, chip, trace, slo, bounds))
        if one.serves:
            best = one if best is None else min(best, one, key=_rank)
    return tried


def _apart(
    group: Sequence[TriedLayout], laid: Layout | ConfigError, chip: Chip
) -> tuple[list[TriedLayout], list[TriedLayout]]:
    """(those of ``group`` that exchange in less time than each other one at some step, those that do not)."""
    if isinstance(laid, ConfigError):
        return [*group], []
    sizes = laid.config.scheduler
    rows, tokens = sizes.max_num_seqs, sizes.max_num_batched_tokens + sizes.max_num_seqs
    others = no_dearer(_costs(group, laid, chip).lines, rows, tokens)
    kept = [one for one, i in zip(group, others, strict=True) if i is None]
    dearer = [
        dataclasses.replace(one, dropped=f"no step takes less time than under {group[i].sharding}")
        for one, i in zip(group, others, strict=True)
        if i is not None
    ]
    return kept, dearer


def _bounds(best: TriedLayout | None, trace: Sequence[TraceItem], slo: Slo) -> Bounds | None:
    return Bounds(slo=slo, n=len(trace), latest_ms=math.inf if best is None else best.ttft_ms)


def _tried(
    made: TriedLayout,
    laid: Layout | ConfigError,
    costs: StepCosts,
    chip: Chip,
    trace: Sequence[TraceItem],
    slo: Slo,
    bounds: Bounds | None = None,
) -> TriedLayout:
    """``made`` with its figures, or with the reason why it cannot win; without ``bounds`` with its figures."""
    if isinstance(laid, ConfigError):
        return dataclasses.replace(made, refused=laid.message)
    device = _device(laid, costs, chip)
    if bounds is not None and (why := too_slow(device.costs.seconds(1, 0, 0), trace, slo)):
        return dataclasses.replace(made, dropped=why)
    setup = Setup(config=laid.config, device=device, replicas=made.replicas, watch=bounds)
    run = simulated(trace, setup)
    if bounds is not None and bounds.why:
        return dataclasses.replace(made, dropped=bounds.why, n_over=bounds.n_over)
    report = summarise(run, slo)
    lane: dict[str, Any] = report["lanes"][ALL]
    return dataclasses.replace(
        made,
        dropped="",
        n_over=len(trace),
        good_share=lane["good_share"] or 0.0,
        ttft_ms=(lane["ttft_ms"] or {}).get("p99", 0.0),
        itl_ms=(lane["itl_ms"] or {}).get("p99", 0.0),
        output_tok_s=lane["output_tok_s"] or 0.0,
        busy_share=report["device_busy_share"] or 0.0,
    )


def _device(laid: Layout, costs: StepCosts, chip: Chip) -> Device:
    line, sizes = roofline_of(laid, chip), laid.sizes
    return Device(
        name=f"{laid.model.name} on {laid.tp} x {chip.name} (roofline)",
        costs=costs,
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
