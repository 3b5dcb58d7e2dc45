"""A model laid out on devices: its memory, its pool and its programs, as an engine of the same options has them.

Owns the way from options to sizes, by the engine's own functions, and the advice where a model does not
fit. Must not know times.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from jserve.config import DEVICE_SHARE, EngineConfig
from jserve.errors import ConfigError
from jserve.model.attention import AttentionBackend, backend as find_backend
from jserve.model.sinks import with_sinks
from jserve.model.view import Bucket, StepDims
from jserve.runner.drafts import Speculation
from jserve.runner.memory import DeviceMemory, MemoryPlan, plan_memory
from jserve.runner.sizes import (
    draft_page_bytes,
    drafting_limits,
    ladder_of,
    longest_pages,
    runner_limits,
    step_dims,
    stored_kv,
    window_of,
)
from jserve.sim.roofline import Chip
from jserve.sizing import speculation as drafts
from jserve.sizing.models import Model

MOST_DEVICES = 64
"""Up to here a model that does not fit is tried on more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A model on its devices: what ``ModelRunner`` would make of the same options."""

    model: Model
    config: EngineConfig
    attention: AttentionBackend
    stored: Any
    dims: StepDims
    memory: MemoryPlan
    buckets: tuple[Bucket, ...]
    speculation: Speculation | None
    """Without its weights."""
    draft_weight_bytes: int
    draft_page_bytes: int

    @property
    def tp(self) -> int:
        return self.config.device.tensor_parallel_size


def lay_out(model: Model, config: EngineConfig, chip: Chip) -> Layout:
    """Raises ConfigError as the engine would: it does not fit, or an option cannot be honoured."""
    tp, platform = config.device.tensor_parallel_size, platform_of(chip)
    speculation = drafts.drafter_of(model, config)
    attention = find_backend(config.device.attention_backend, platform)
    arch = with_sinks(model.arch, attention, config.device.attention_sinks)
    model = dataclasses.replace(model, arch=arch)
    stored = stored_kv(config, attention, model.dtype, arch, speculation)
    dims = step_dims(arch, config, speculation)
    drafter = drafts.weight_bytes(speculation, model, tp)
    of_page = draft_page_bytes(speculation, attention, dims, stored.itemsize, tp)
    weights, window = model.weight_bytes(tp) + drafter, window_of(arch, speculation)
    memory = plan_memory(
        arch=model.arch,
        backend=attention,
        dims=dims,
        itemsize=stored.itemsize,
        tp=tp,
        weight_bytes=weights,
        options=config.cache,
        memory=_memory(chip, weights),
        draft_page_bytes=of_page,
        longest=longest_pages(arch, config, dims, window),
    )
    limits = runner_limits(arch, config, dims, memory.n_pages, 0, window)
    limits = drafting_limits(limits, config, speculation, platform)
    tree = () if speculation is None else speculation.tree
    synthetic = config.speculative.method == "synthetic"
    return Layout(
        model=model,
        config=config,
        attention=attention,
        stored=stored,
        dims=dims,
        memory=memory,
        buckets=ladder_of(limits, tree, masks_drafts=synthetic).buckets,
        speculation=speculation,
        draft_weight_bytes=drafter,
        draft_page_bytes=of_page,
    )


def platform_of(chip: Chip) -> str:
    return "cuda" if chip.memory else "cpu"


def _memory(chip: Chip, weights: int) -> DeviceMemory:
    if chip.memory:
        return DeviceMemory(total=int(chip.memory * DEVICE_SHARE), taken=0, is_host=False)
    host = DeviceMemory.of_host()
    return dataclasses.replace(host, taken=host.taken + weights)


def with_advice(error: ConfigError, model: Model, config: EngineConfig, chip: Chip) -> ConfigError:
    """The error of a model that does not fit, and the smallest number of devices on which it does."""
    if error.field not in ("memory_utilization", "kv_memory_gb", "n_pages"):
        return error
    have = config.device.tensor_parallel_size
    more = range(have + 1, MOST_DEVICES + 1) if chip.memory else ()
    need = next((n for n in more if _fits(model, config, chip, n)), 0)
    gb = model.weight_bytes(have) / 1e9
    text = f"{model.name} does not fit on {have} x {chip.name} ({gb:.2f} GB of weights each): "
    text += error.message
    if need:
        text += f"; it takes {need} devices (--tp {need})"
    return ConfigError(f"{text}; or lower --max-model-len", field=error.field)


def _fits(model: Model, config: EngineConfig, chip: Chip, tp: int) -> bool:
    device = dataclasses.replace(config.device, tensor_parallel_size=tp)
    drafter = config.speculative
    if drafter.tensor_parallel_size > 1:  # split as the model is
        drafter = dataclasses.replace(drafter, tensor_parallel_size=tp)
    wider = dataclasses.replace(config, device=device, speculative=drafter)
    try:
        lay_out(model, wider, chip)
    except ConfigError:
        return False
    return True
