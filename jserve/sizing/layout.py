"""Lays a model out on devices as an engine would: memory, page pool, programs.

It owns the way from options to sizes, by the engine's own functions, and the advice where a model does not fit.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jax.sharding import AbstractMesh

from jserve.config import DEVICE_SHARE, EngineConfig
from jserve.errors import ConfigError
from jserve.model import decoder
from jserve.model.dot import forms_for_hopper
from jserve.model.mesh import abstract_mesh
from jserve.model.moe_specs import check_has_experts
from jserve.model.native import chosen
from jserve.model.shard import ShardRules
from jserve.model.view import Bucket
from jserve.runner.experts import check_experts
from jserve.runner.layout import partitionable
from jserve.runner.memory import DeviceMemory
from jserve.runner.sizes import Sizes, sizes_of
from jserve.sharding import Sharding
from jserve.sim.roofline import Chip
from jserve.sizing import speculation as drafts
from jserve.sizing.models import Model
from jserve.speculation.drafters.load import LoadedDrafter
from jserve.weights.place import tp_size

MOST_DEVICES = 64
"""Up to here a model that does not fit is tried on more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A model on its devices: what ``ModelRunner`` would make of the same options."""

    model: Model
    """With the attention sinks that the options ask for."""
    config: EngineConfig
    sizes: Sizes
    buckets: tuple[Bucket, ...]
    """Of its programs, in the order of the ladder."""
    speculation: LoadedDrafter | None
    """Without its weights."""
    draft_weight_bytes: int

    @property
    def tp(self) -> int:
        """Devices, all of which share attention and dense layers."""
        return self.config.device.n_devices

    @property
    def draft_page_bytes(self) -> int:
        """Bytes that a page takes on each device for the drafter."""
        own = () if self.speculation is None else self.speculation.drafter.kv_layers
        return dataclasses.replace(self.sizes.kv, layers=own, groups=None).page_bytes


def lay_out(model: Model, config: EngineConfig, chip: Chip) -> Layout:
    """Raises ConfigError as the engine would: it does not fit, or an option cannot be honoured."""
    mesh, rules = mesh_of_options(config)
    platform = "cuda" if chip.memory else "cpu"
    config, tp = partitionable(config, rules, platform), tp_size(mesh, rules)
    check_has_experts(model.arch, rules, mesh.shape)
    check_experts(config.device, model.family, model.arch, rules)
    speculation = drafts.drafter_of(model, config, tp)
    drafter = drafts.weight_bytes(speculation, model, tp)
    weights = model.bytes_on(mesh, rules) + drafter
    sizes = sizes_of(
        model.arch,
        config,
        dtype=model.dtype,
        platform=platform,
        capability=chip.capability,
        tp=tp,
        weight_bytes=weights,
        memory=_memory(chip, weights),
        speculation=speculation,
        penalises=model.penalises,
        kernels=_kernels(model, config, platform, chip.capability),
        shared_pass=model.family.forward is decoder.forward,
    )
    return Layout(
        model=dataclasses.replace(model, arch=sizes.arch),
        config=sizes.config,
        sizes=sizes,
        buckets=sizes.ladder.buckets,
        speculation=speculation,
        draft_weight_bytes=drafter,
    )


def _kernels(model: Model, config: EngineConfig, platform: str, capability: str) -> str:
    """Level of the kernels of products."""
    quantised = bool(forms_for_hopper(model.family.specs(model.arch, 1)))
    asked = config.device.kernels
    return chosen(asked, platform, model.dtype, capability, quantised=quantised)[0]


def mesh_of_options(config: EngineConfig) -> tuple[AbstractMesh, ShardRules]:
    """(mesh, rules) of one engine with these options, whatever devices there are."""
    options = config.device
    if not options.sharding:
        sizes = options.mesh_shape
        return abstract_mesh(sizes), ShardRules.of_mesh(sizes, options.num_redundant_experts)
    sharding = Sharding.of(options.sharding)
    sizes = sharding.sizes
    rules = ShardRules.of_sharding(sharding, sizes, options.num_redundant_experts)
    return abstract_mesh(sizes), rules


def _weights(model: Model, config: EngineConfig) -> int:
    """Bytes of the model's weights on each device."""
    mesh, rules = mesh_of_options(config)
    return model.bytes_on(mesh, rules)


def _memory(chip: Chip, weights: int) -> DeviceMemory:
    if chip.memory:
        return DeviceMemory(total=int(chip.memory * DEVICE_SHARE), taken=0, is_host=False)
    host = DeviceMemory.of_host()
    return dataclasses.replace(host, taken=host.taken + weights)


def with_advice(error: ConfigError, model: Model, config: EngineConfig, chip: Chip) -> ConfigError:
    """The error of a model that does not fit, and the smallest number of devices on which it does."""
    if error.field not in ("memory_utilization", "kv_memory_gb", "n_pages"):
        return error
    have, ep = config.device.tensor_parallel_size, config.device.expert_parallel_size
    more = range(have + 1, MOST_DEVICES // ep + 1) if chip.memory else ()
    need = next((n for n in more if _fits(model, config, chip, n)), 0)
    gb = _weights(model, config) / 1e9
    text = f"{model.name} does not fit on {have * ep} x {chip.name} ({gb:.2f} GB of weights each): "
    text += error.message
    if need:
        text += f"; it takes {need * ep} devices (--tp {need})"
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
