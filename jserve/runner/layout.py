"""Gives an engine its devices, as its config says: the mesh and the rules of its sharding, and the groups of devices of
engines that share a process.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.model.attention import KERNELS
from jserve.model.mesh import group_meshes, make_mesh, mesh_of
from jserve.model.shard import ShardRules
from jserve.sharding import Sharding


def groups(config: EngineConfig, mesh: Any) -> tuple[EngineConfig, list[Any]]:
    """The config of one engine, and the meshes of all; None stands for the first devices.

    Raises:
        ConfigError: an option that several engines of a process cannot share.
    """
    sharding = Sharding.of(config.device.sharding) if config.device.sharding else Sharding()
    if sharding.dp == 1 and mesh is None:
        return config, [None]
    meshes = group_meshes(sharding, mesh)
    if len(meshes) > 1:
        for name, given in (
            ("journal", config.scheduler.journal),
            ("disk_dir", config.cache.disk_dir),
            ("kv_events", config.cache.kv_events),
        ):
            if given:
                why = f"{name} is of one engine, and sharding has {len(meshes)} (dp)"
                raise ConfigError(why, field=name)
    device = dataclasses.replace(config.device, sharding=str(sharding.group))
    return dataclasses.replace(config, device=device), meshes


def placement(config: EngineConfig, mesh: Any) -> tuple[Any, Any]:
    """(mesh, rules): those of option ``sharding``, else those of the parallel sizes; on ``mesh`` where one is given.

    Raises:
        ConfigError: they contradict each other, or there are fewer devices; ``field`` is the option or key.
    """
    given, options = config.device.sharding, config.device
    sharding = Sharding.of(given) if given else Sharding()
    for name in ("tensor_parallel_size", "expert_parallel_size"):
        if given and getattr(options, name) > 1:
            why = f"sharding and {name} both say where the model lies: one of them will do"
            raise ConfigError(why, field="sharding")
    if mesh is None and given:
        mesh = mesh_of(sharding)
    mesh = _mesh(config) if mesh is None else mesh
    if sharding.mesh and dict(sharding.mesh) != dict(mesh.shape):
        why = f"{dict(sharding.mesh)} is not the mesh that is given, {dict(mesh.shape)}"
        raise ConfigError(f"sharding.mesh: {why}", field="sharding.mesh")
    return mesh, ShardRules.of_sharding(sharding, mesh.shape, options.num_redundant_experts)


def partitionable(config: EngineConfig, rules: Any, platform: str) -> EngineConfig:
    """``config`` without kernels that XLA's partitioner cannot cut, where it is to do that: those of products, and of
    attention on a CPU (devices that share its threads may wait for each other for ever once a step has collectives of
    both kinds) and beside a drafter with weights of its own, whose heads may lie otherwise.

    Raises:
        ConfigError: an option asks for such a kernel.
    """
    device = config.device
    if not rules.auto:
        return config
    plain = platform == "cpu" or bool(config.speculative.model)
    attention = ("native", *KERNELS) if plain else ("hopper_fused", "dense_experts")
    for name, kernels in (("kernels", ("native", "hopper")), ("attention_backend", attention)):
        if (asked := getattr(device, name)) in kernels:
            why = f"{name} {asked}: XLA's partitioner (sharding.mode auto) cannot cut these kernels"
            raise ConfigError(why, field=name)
    backend = device.attention_backend
    if plain and backend == "auto":
        backend = "xla" if platform == "cpu" else "dense"
    device = dataclasses.replace(device, kernels="xla", attention_backend=backend)
    return dataclasses.replace(config, device=device)


def _mesh(config: EngineConfig) -> Any:
    tp, ep = config.device.tensor_parallel_size, config.device.expert_parallel_size
    have, kind = len(jax.devices()), jax.default_backend()
    if tp > have:
        raise ConfigError(
            f"tensor_parallel_size is {tp} but there are {have} {kind} devices",
            field="tensor_parallel_size",
        )
    if tp * ep > have:
        raise ConfigError(
            f"expert_parallel_size {ep} takes {tp * ep} devices but there are {have} {kind} devices",
            field="expert_parallel_size",
        )
    return make_mesh(tp, ep=ep)
