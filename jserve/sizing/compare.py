"""Prices the steps of several shardings on a device that need not be there, and simulates engines over such prices.

A device multiplies its share of the weights with all tokens of a step and reads them once; then come the collectives,
one after the other. Attention, whose share of these two steps is small, is left out. Devices that share a machine work
one after the other, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jserve.config import DEVICE_SHARE, SCRATCH_SHARE, EngineConfig
from jserve.errors import ConfigError
from jserve.model.arch import with_kv_forms
from jserve.model.mesh import n_parts
from jserve.model.shard import ShardRules
from jserve.model.view import StepDims
from jserve.runner.sizes import kv_dtype, page_demand
from jserve.sharding import Sharding
from jserve.sim.costs import GPU_HOST_S, Device
from jserve.sim.roofline import CHIPS, GIB, Chip, Roofline
from jserve.sim.simulate import Setup
from jserve.sizing.explain import Collective, Explained, explain_sharding
from jserve.sizing.models import Model, find
from jserve.sizing.plan import LENGTHS

FEW, MANY = 0, 1
"""Numbers of the two programs that ``explain_sharding`` shows."""
SENT = {"all-reduce": 2.0, "all-gather": 1.0, "all-to-all": 1.0}
"""Bytes that a device sends of a collective's result, times (n - 1) / n. Of a reduce-scatter's, one of n parts, n."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrice:
    """One program of a sharding."""

    decode_rows: int
    prefill_tokens: int
    collectives: int
    collective_mib: float
    """Of their results on a device. Those of branches that few steps take are left out."""
    collective_ms: float
    step_ms: float
    """Collectives among it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRoom:
    """The KV of one device, and what of it fits beside the weights."""

    token_bytes: int
    """Of one token in all layers."""
    pages: int | None
    """None: the kind of device has no memory of its own, and no option says how many."""
    sequences: dict[int, int] | None
    """Tokens of a sequence -> as many as a group holds at once; None where ``pages`` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A sharding, and what its steps take on a kind of device."""

    sharding: Sharding
    devices: int
    device_bytes: int
    """Of weights."""
    steps: tuple[StepPrice, ...]
    """() where mode auto has more devices than this process."""
    kv: KVRoom


def priced(
    model: str,
    sharding: Sharding | Mapping[str, Any] | str | Path,
    device: str,
    config: EngineConfig | None = None,
    *,
    lengths: Sequence[int] = (),
) -> Priced:
    """Prices a step of eight sequences and one of 256 prompt tokens under ``sharding``.

    Args:
        lengths: of the sequences that are counted; (): those of ``jserve plan``.

    Raises:
        ConfigError: an unknown device, a length beyond the context, or as ``explain_sharding``.
    """
    config = config or EngineConfig()
    chip, explained = _chip(device), explain_sharding(model, sharding, dtype=config.model.dtype)
    found = find(model, dtype=config.model.dtype)
    return Priced(
        kv=_room(found, explained, chip, config, lengths),
        sharding=explained.sharding,
        devices=explained.sharding.n_devices,
        device_bytes=explained.device_bytes,
        steps=tuple(_steps(explained, chip)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedCosts:
    """``ports.StepCosts`` of one engine under a sharding: the roofline of devices that share its heads, with the
    weights that a device has of it, and the collectives of its programs."""

    line: Roofline
    share: float
    """Of all weights those on a device, times the devices that share heads."""
    link_s: float
    """Of a step of no tokens: collectives cost something however little they carry."""
    link_token_s: float
    turns: int = 1
    """Devices that work one after the other, since they share a machine."""

    def seconds(self, n_decode: int, n_prefill: int, n_context: int) -> float:
        rows, tokens = n_decode + (n_prefill > 0), n_decode + n_prefill
        work = self.line.work(rows=rows, tokens=tokens, drawn=rows, n_context=n_context)
        arch, chip = self.line.arch, self.line.chip
        attention = (
            arch.layers[0].attn.key_flops * tokens * self.line.kv.seen(n_context) / self.line.tp
        )
        shared = replace(
            work,
            weight_bytes=work.weight_bytes * self.share,
            flops=(work.flops - attention) * self.share + attention,
        )
        links = self.link_s + self.link_token_s * tokens
        return self.turns * (self.line.limit(shared) / chip.reached + links) + chip.step_s


def simulation(
    model: str,
    sharding: Sharding | Mapping[str, Any] | str | Path,
    device: str,
    config: EngineConfig,
) -> Setup:
    """The settings of a simulation of ``sharding``: an engine for each of its groups, pages in what memory its weights
    leave.

    Raises:
        ConfigError: as ``priced``; collectives that are not known (mode auto on more devices than there are), weights
            that leave no room.
    """
    explained, chip = explain_sharding(model, sharding, dtype=config.model.dtype), _chip(device)
    found, spec = find(model, dtype=config.model.dtype), explained.sharding
    line, sizes = _line(found, explained, chip, config), dict(spec.mesh)
    links, tokens = [], []
    for program in explained.programs:
        if program.collectives is None:
            why = "its collectives are XLA's, and this process has fewer devices"
            raise ConfigError(f"sharding.mode: {why}", field="sharding.mode")
        links.append(sum(link_s(each, sizes, chip) for each in program.usual))
        tokens.append(program.decode_rows + program.prefill_tokens)
    slope = (links[MANY] - links[FEW]) / (tokens[MANY] - tokens[FEW])
    whole = sum(math.prod(w.shape) * jnp.dtype(w.dtype).itemsize for w in explained.weights)
    costs = ShardedCosts(
        line=line,
        share=explained.device_bytes * line.tp / whole,
        link_s=links[FEW] - slope * tokens[FEW],
        link_token_s=slope,
        turns=_turns(spec, chip),
    )
    config = config.on("cuda")
    groups = line.groups(config.cache)
    made = Device(
        name=f"{found.name} under {spec} on {chip.name} (roofline)",
        costs=costs,
        n_pages=_n_pages(line, explained.device_bytes, config),
        max_model_len=found.arch.max_position,
        window=line.kv.window,
        reaches=() if groups is None else groups.reaches,
        page_bytes=line.page_bytes(config.cache),
        move_s=line.page_bytes(config.cache) / chip.copy_bytes_per_s,
        host_s=GPU_HOST_S,
    )
    return Setup(config=config, device=made, replicas=spec.dp)


def _line(found: Model, explained: Explained, chip: Chip, config: EngineConfig) -> Roofline:
    """Of one device, KV as the options of ``config`` want it."""
    sizes, cache = dict(explained.sharding.mesh), config.cache
    rules = ShardRules.of_sharding(explained.sharding, sizes)
    arch = with_kv_forms(
        found.arch,
        cache.kv_cache_dtype,
        cache.kv_cache_dtype_skip_layers,
        found.dtype.name,
        rotate=cache.kv_cache_rotate,
    )
    return Roofline(
        arch=arch,
        itemsize=found.itemsize,
        chip=chip,
        kv_itemsize=jnp.dtype(kv_dtype(config, found.dtype)).itemsize,
        tp=n_parts(rules.split("kv_heads", sizes), sizes),
    )


def _room(
    found: Model, explained: Explained, chip: Chip, config: EngineConfig, lengths: Sequence[int]
) -> KVRoom:
    """Raises ConfigError for a length beyond the context."""
    line = _line(found, explained, chip, config)
    context = config.model.max_model_len or found.arch.max_position
    config = config.on("cuda" if chip.memory else "cpu")
    lengths = lengths or [n for n in LENGTHS if n < context] or [context]
    if max(lengths) > context:
        why = f"{max(lengths)} tokens exceed the context of {context}"
        raise ConfigError(f"lengths: {why}", field="lengths")
    groups = line.groups(config.cache)
    dims = StepDims(C=1, M=1, Z=config.cache.page_size, V=found.arch.V, groups=groups)
    demand = page_demand(line.arch, config, dims, line.kv.window, prefills=groups is None)
    known = chip.memory or config.cache.n_pages or config.cache.kv_memory_gb
    pages = max(0, _pages(line, explained.device_bytes, config)) if known else None
    return KVRoom(
        token_bytes=line.kv.page_bytes,
        pages=pages,
        # Page 0 is scratch.
        sequences=None
        if pages is None
        else {n: max(0, pages - 1) // demand.most(n) for n in lengths},
    )


def _pages(line: Roofline, device_bytes: int, config: EngineConfig) -> int:
    """Pages of KV beside the weights of a device; below 2: there is no room."""
    if config.cache.n_pages:
        return config.cache.n_pages
    used = config.cache.memory_utilization - SCRATCH_SHARE
    room = line.chip.memory * DEVICE_SHARE * used - device_bytes
    if config.cache.kv_memory_gb:
        room = config.cache.kv_memory_gb * GIB
    return int(room // line.page_bytes(config.cache))


def _n_pages(line: Roofline, device_bytes: int, config: EngineConfig) -> int:
    n = _pages(line, device_bytes, config)
    if n < 2:
        why = f"{device_bytes / 1e9:.1f} GB of weights a device leave no room for KV"
        raise ConfigError(f"memory_utilization: {why}", field="memory_utilization")
    return n


def _chip(device: str) -> Chip:
    """Raises ConfigError for one that is not known."""
    if device not in CHIPS:
        raise ConfigError(
            f"device must be one of {', '.join(CHIPS)}, not {device!r}", field="device"
        )
    return CHIPS[device]


def _steps(explained: Explained, chip: Chip) -> list[StepPrice]:
    numbers = sum(w.device_bytes / jnp.dtype(w.dtype).itemsize for w in explained.weights)
    sizes, found = dict(explained.sharding.mesh), []
    n = _turns(explained.sharding, chip)
    for program in explained.programs:
        if program.collectives is None:
            return []
        tokens = program.decode_rows + program.prefill_tokens
        read = explained.device_bytes / chip.bytes_per_s
        limit = n * max(read, 2 * numbers * tokens / chip.flops)
        links = n * sum(link_s(c, sizes, chip) for c in program.usual)
        found.append(
            StepPrice(
                decode_rows=program.decode_rows,
                prefill_tokens=program.prefill_tokens,
                collectives=sum(c.count for c in program.usual),
                collective_mib=sum(c.n_bytes for c in program.usual) / 2**20,
                collective_ms=links * 1e3,
                step_ms=(limit / chip.reached + links + chip.step_s) * 1e3,
            )
        )
    return found


def _turns(sharding: Sharding, chip: Chip) -> int:
    """Devices that share a machine, those of other groups too; 1: each is its own."""
    return sharding.n_devices if chip.shared else 1


def link_s(collective: Collective, sizes: Mapping[str, int], chip: Chip) -> float:
    """Of collectives that are alike. Those of mode auto do not say whom they join: all devices."""
    if not chip.link_bytes_per_s:
        return 0.0
    n = math.prod(sizes[axis] for axis in collective.axes or sizes)
    times = n if collective.op == "reduce-scatter" else SENT.get(collective.op, 1.0)
    sent = times * collective.n_bytes * (n - 1) / n
    return collective.count * chip.link_s + sent / chip.link_bytes_per_s
