"""Meshes of devices, and the axes of them that one dimension of an array is split over."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jserve.errors import ConfigError
from jserve.sharding import DP, Sharding

AXIS = "tp"
"""The tensor-parallel mesh axis."""
EXPERT_AXIS = "ep"
"""The expert-parallel mesh axis: whole experts lie on different devices of it."""
MeshAxis = str | tuple[str, ...] | None
"""Axes of a mesh that one dimension is split over, the first one outermost; None: it is whole on every device."""


def n_parts(axis: MeshAxis, sizes: Mapping[str, int]) -> int:
    """Parts of a dimension split over ``axis`` of a mesh of these axis sizes (``Mesh.shape``)."""
    return math.prod(sizes[name] for name in axis_names(axis))


def axis_names(axis: MeshAxis) -> tuple[str, ...]:
    """The axes of a ``MeshAxis``, the outermost first."""
    return () if axis is None else (axis,) if isinstance(axis, str) else axis


def mesh_axis(names: Sequence[str]) -> MeshAxis:
    """These axes as a ``MeshAxis``."""
    return names[0] if len(names) == 1 else tuple(names) or None


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh of no devices."""
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def mesh_of(sharding: Sharding, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of an engine of a sharding, of the first devices, Auto (shard_map refuses Explicit axes).

    Raises:
        ConfigError: the sharding states no mesh, or there are fewer devices.
    """
    sizes, n = sharding.sizes, sharding.group_size
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < n:
        why = f"{n} devices are asked for, and there are {len(devices)}"
        raise ConfigError(f"sharding.mesh: {why}", field="sharding.mesh")
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices[:n])


def group_meshes(sharding: Sharding, mesh: Mesh | None = None) -> list[Mesh]:
    """A mesh for each group of ``sharding``, Auto, of devices that no other group has: those of ``mesh`` along its axis
    "dp", or the first ones of this process.

    Raises:
        ConfigError: no mesh is stated or given, there are fewer devices, or the axis has another size.
    """
    if mesh is None:
        devices, n = jax.devices(), sharding.group_size
        if len(devices) < sharding.n_devices:
            why = f"{sharding.n_devices} devices are asked for, and there are {len(devices)}"
            raise ConfigError(f"sharding.mesh: {why}", field="sharding.mesh")
        return [mesh_of(sharding, devices[i * n :]) for i in range(sharding.dp)]
    n = mesh.shape.get(DP, 1)
    if sharding.dp not in (1, n):
        why = f"is {sharding.dp}, the mesh that is given has {n}"
        raise ConfigError(f"sharding.mesh.dp: {why}", field="sharding.mesh.dp")
    if n == 1:
        return [_auto(mesh.devices, mesh.axis_names)]
    at = mesh.axis_names.index(DP)
    names = tuple(name for name in mesh.axis_names if name != DP)
    if not names:
        return [make_mesh(1, [device]) for device in mesh.devices.flat]
    return [_auto(mesh.devices.take(i, axis=at), names) for i in range(n)]


def _auto(devices: np.ndarray, names: Sequence[str]) -> Mesh:
    """A mesh that jax makes by itself has Explicit axes."""
    return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def make_mesh(tp: int, devices: Sequence[Any] | None = None, ep: int = 1) -> Mesh:
    """A mesh of the first ``ep * tp`` devices, Auto (shard_map refuses Explicit axes): of one axis, and of another one
    outside of it where experts lie on different devices.

    Raises:
        ConfigError: fewer devices than that.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < ep * tp:
        asked = f"tensor_parallel_size {tp}" + (
            f" times expert_parallel_size {ep}" if ep > 1 else ""
        )
        raise ConfigError(
            f"{asked} exceeds the {len(devices)} devices of this machine",
            field="expert_parallel_size" if len(devices) >= tp else "tensor_parallel_size",
        )
    shape, names = ((ep, tp), (EXPERT_AXIS, AXIS)) if ep > 1 else ((tp,), (AXIS,))
    types = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=types, devices=devices[: ep * tp])
