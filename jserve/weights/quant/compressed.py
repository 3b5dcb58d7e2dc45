"""compressed-tensors checkpoints: the tensors of their modules.

weight              e4m3 or int8 [N, D]
weight_packed       int32[N, ceil(D * bits / 32)]   value + 2^(bits - 1), lowest bits first
                    uint8[N, D / 2]                 4-bit floats, the first of two in the low half
weight_scale        [1] of a matrix, [N, 1] of rows, [N, D / g] of groups, [ceil(N / b), ceil(D / b)] of blocks;
                    nvfp4: e4m3, over weight_global_scale float32[1]; mxfp4, mxfp8: exponents of two
weight_zero_point   int8 [N, 1], or packed along N: int32[ceil(N * bits / 32), D / g]
weight_g_idx        int32[D]: the group of each input
weight_shape        int64[2]
input_scale         [1], of activations
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jserve.model.quant import Form
from jserve.weights.hf import FLOATS, Kinds, Tensors
from jserve.weights.quant.floats import (
    E4M3,
    E8M0,
    doubled,
    finite,
    inputs,
    matrix_shape,
    scales,
    spread,
)
from jserve.weights.quant.matrix import Matrix, dense_fields, fields, ordered
from jserve.weights.quant.values import is_linear, matches
from jserve.weights.safetensors import broken

PACKED = "pack-quantized"
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
ORDERS: Kinds = ("int32", "int64")
"""Types of ``weight_g_idx``."""
ZEROS: Kinds = (*FLOATS, *E4M3, "int8")
"""Types of the zeros of floats, which are all 0."""
SCALES: dict[str, Kinds] = {NVFP4: E4M3, MXFP4: E8M0, MXFP8: E8M0}
"""Types of the scales of these formats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One scheme of a checkpoint, and the modules it is for."""

    targets: tuple[str, ...]
    format: str
    bits: int
    is_float: bool
    strategy: str
    group: int
    block: tuple[int, int]
    symmetric: bool
    ordered: bool
    rounded: bool
    static: bool
    dtype: str

    @property
    def kind(self) -> str:
        if self.format in (NVFP4, MXFP4):
            return "e2m1"
        if self.is_float:
            return "e4m3"
        return "int8" if self.bits > 4 or self.rounded else "int4"

    def form(self, D: int) -> Form:
        """The form of a module with ``D`` inputs."""
        return Form(
            kind=self.kind,
            group=inputs(self.block[1], D) if self.strategy == "block" else self.group,
            zeros=not self.symmetric,
            ordered=self.ordered,
            rounded=self.rounded,
            static=self.static,
            dtype=self.dtype,
        )

    def scales(self, N: int, D: int) -> tuple[int, ...]:
        """The shape of ``weight_scale``."""
        if self.strategy == "tensor":
            return (1,)
        if self.strategy == "channel":
            return (N, 1)
        if self.group:
            return (N, D // self.group)
        return (-(-N // self.block[0]), -(-D // self.block[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """The modules and tensors of such a checkpoint."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]

    def form_of(self, module: str, D: int) -> Form | None:
        """As ``Modules.form_of``."""
        group = self.group_of(module)
        return None if group is None else group.form(D)

    def group_of(self, module: str) -> Group | None:
        """The scheme of a module: by its name before its class; None: it is not quantised."""
        if not is_linear(module) or any(matches(module, name) for name in self.ignore):
            return None
        named = [g for g in self.groups if any(matches(module, t) for t in g.targets)]
        return next(iter(named or [g for g in self.groups if "Linear" in g.targets]), None)

    def check(self, tensors: Tensors, stem: str) -> tuple[int, int]:
        """As ``Reader.check``."""
        group, name = self._known(stem), f"{stem}.weight_scale"
        N, D = _shape(tensors, stem, group)
        if group.group and D % group.group:
            raise broken(tensors.path(name), f"groups of {group.group} in {D} inputs", name)
        tensors.check(name, group.scales(N, D), SCALES.get(group.format, FLOATS))
        if group.format == NVFP4:
            tensors.check(f"{stem}.weight_global_scale", (1,), FLOATS)
        if group.static:
            tensors.check(f"{stem}.input_scale", (1,), FLOATS)
        if not group.symmetric:
            _zero_shape(tensors, stem, group, (N, D))
        if group.ordered:
            tensors.check(f"{stem}.weight_g_idx", (D,), ORDERS)
        return N, D

    def read(self, tensors: Tensors, stem: str) -> Matrix:
        """As ``Reader.read``.

        Raises:
            WeightsError: there are zeros, or an order, that the config has not.
        """
        (N, D), group = self.check(tensors, stem), self._known(stem)
        q, order = _values(tensors, stem, group, (N, D)), _order(tensors, stem, group, D)
        return Matrix(
            q=q if order is None else q[:, order],
            scale=_scales(tensors, stem, group, (N, D)),
            zero=_zeros(tensors, stem, group, (N, D)),
            order=order,
            input_scale=scales(tensors, f"{stem}.input_scale", (1,)) if group.static else None,
        )

    def _known(self, stem: str) -> Group:
        group = self.group_of(stem)
        assert group is not None, f"{stem} is not quantised"
        return group


def _shape(tensors: Tensors, stem: str, group: Group) -> tuple[int, int]:
    """(N, D) of a matrix, by what holds its numbers."""
    if group.format == PACKED:
        return _packed_shape(tensors, stem, group.bits)
    if group.kind == "e2m1":
        N, half = matrix_shape(tensors, f"{stem}.weight_packed", ("uint8",))
        return N, 2 * half
    return matrix_shape(tensors, f"{stem}.weight", E4M3 if group.is_float else ("int8",))


def _packed_shape(tensors: Tensors, stem: str, bits: int) -> tuple[int, int]:
    name = f"{stem}.weight_shape"
    N, D = (int(n) for n in tensors.get(name, (2,), ("int64", "int32")))
    stored = tensors.shape(f"{stem}.weight_packed")
    if min(N, D) < 1 or stored not in ((N, -(-D * bits // 32)), (N, -(-D // (32 // bits)))):
        raise broken(tensors.path(name), f"says {(N, D)}, weight_packed is {stored}", name)
    tensors.check(f"{stem}.weight_packed", stored, ("int32",))
    return N, D


def _scales(tensors: Tensors, stem: str, group: Group, shape: tuple[int, int]) -> np.ndarray:
    """float32[N, groups]."""
    name, kinds = f"{stem}.weight_scale", SCALES.get(group.format, FLOATS)
    found = scales(tensors, name, group.scales(*shape), kinds)
    if group.strategy in ("tensor", "block"):
        return spread(found, group.block, shape)
    if group.format == NVFP4:
        found = found / scales(tensors, f"{stem}.weight_global_scale", (1,))
        _use(tensors, f"{stem}.input_global_scale")
    return found * np.float32(0.5) if group.kind == "e2m1" else found


def _use(tensors: Tensors, name: str) -> None:
    """Count a tensor as used that is known and plays no part."""
    if tensors.has(name):
        tensors.get(name, (1,), FLOATS)


def _values(tensors: Tensors, stem: str, group: Group, shape: tuple[int, int]) -> np.ndarray:
    """int8 or e4m3 [N, D]."""
    name = f"{stem}.weight_packed"
    if group.format == PACKED:
        words = tensors.get(name, tensors.shape(name), ("int32",))
        return _unpacked(words, group.bits, shape[1])
    if group.kind == "e2m1":
        return doubled(tensors, name, shape)
    name = f"{stem}.weight"
    if group.is_float:
        return finite(tensors, name, tensors.get(name, shape, E4M3))
    return tensors.get(name, shape, ("int8",))


def _unpacked(words: np.ndarray, bits: int, n: int) -> np.ndarray:
    """int8[rows, n]; the number of words says whether values cross their borders."""
    loose = words.shape[1] == -(-n // (32 // bits))
    found = fields(words, bits)[:, :n] if loose else dense_fields(words, bits, n)
    return (found.astype(np.int16) - 2 ** (bits - 1)).astype(np.int8)


def _order(tensors: Tensors, stem: str, group: Group, D: int) -> np.ndarray | None:
    of = "" if group.ordered else "actorder group"
    return ordered(tensors, f"{stem}.weight_g_idx", D, group.group, lacks=of)


def _zero_shape(
    tensors: Tensors, stem: str, group: Group, shape: tuple[int, int]
) -> tuple[int, ...]:
    """The shape of ``weight_zero_point``, which is checked: packed along N the words are loose or dense."""
    name, stored = f"{stem}.weight_zero_point", group.scales(*shape)
    if group.format != PACKED:
        tensors.check(name, stored, ("int8",))
        return stored
    N, B = shape[0], stored[-1]
    dense, loose = (-(-N * group.bits // 32), B), (-(-N // (32 // group.bits)), B)
    found = dense if tensors.shape(name) == dense else loose
    tensors.check(name, found, ("int32",))
    return found


def _zeros(tensors: Tensors, stem: str, group: Group, shape: tuple[int, int]) -> np.ndarray | None:
    """int8[N, groups]; None: they are 0."""
    name, (N, _) = f"{stem}.weight_zero_point", shape
    if group.symmetric and not tensors.has(name):
        return None
    if group.is_float:
        found = tensors.get(name, tensors.shape(name), ZEROS)
    elif group.format == PACKED:
        words = tensors.get(name, _zero_shape(tensors, stem, group, shape), ("int32",))
        found = _unpacked(np.ascontiguousarray(words.T), group.bits, N).T
    else:
        found = tensors.get(name, _zero_shape(tensors, stem, group, shape), ("int8",))
    if not group.symmetric:
        return np.broadcast_to(found.reshape(len(found), -1), (N, found.size // len(found)))
    if found.astype(np.float32).any():
        why = "has zeros beside the middle of the range, though the config says symmetric"
        raise broken(tensors.path(name), why, name)
    return None
