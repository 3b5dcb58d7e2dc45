"""compressed-tensors checkpoints: ``float-quantized``, ``int-quantized`` and ``pack-quantized``.

    weight              e4m3 or int8 [N, D]
    weight_packed       int32[N, ceil(D * bits / 32)]   value + 2^(bits - 1), lowest bits first
    weight_scale        [1] of a matrix, [N, 1] of rows, [N, D / g] of groups, [ceil(N / b), ceil(D / b)] of blocks
    weight_zero_point   int8 [N, 1], or packed along N: int32[ceil(N * bits / 32), D / g]
    weight_shape        int64[2]

Modules are named by groups of ``targets``, less those of ``ignore``; each group has its own scheme.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jserve.model.quant import Form
from jserve.weights.hf import FLOATS, Tensors
from jserve.weights.quant.fp8 import E4M3, check_scales, finite, inputs, spread
from jserve.weights.quant.matrix import Matrix, dense_fields, fields
from jserve.weights.quant.values import group_size, is_linear, matches, names, one_of, refuse
from jserve.weights.safetensors import broken

FORMATS = (
    "float-quantized",
    "int-quantized",
    "pack-quantized",
    "naive-quantized",
    "mixed-precision",
)
STRATEGIES = ("tensor", "channel", "group", "block")
GROUPS = "config_groups"


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
    rounded: bool
    dtype: str

    def form(self, D: int) -> Form:
        """The form of a module with ``D`` inputs."""
        kind = "e4m3" if self.is_float else "int8" if self.bits > 4 or self.rounded else "int4"
        size = inputs(self.block[1], D) if self.strategy == "block" else self.group
        return Form(
            kind=kind, group=size, zeros=not self.symmetric, rounded=self.rounded, dtype=self.dtype
        )

    def scales(self, N: int, D: int) -> tuple[int, ...]:
        """The shape of ``weight_scale``."""
        if self.strategy == "tensor":
            return (1,)
        if self.strategy == "channel":
            return (N, 1)
        if self.strategy == "group":
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
        group = self._known(stem)
        if group.format == "pack-quantized":
            N, D = _packed_shape(tensors, stem, group.bits)
        else:
            name = f"{stem}.weight"
            shape = tensors.shape(name)
            if len(shape) != 2:
                raise broken(tensors.path(name), f"shape {shape} is no matrix", name)
            tensors.check(name, shape, E4M3 if group.is_float else ("int8",))
            N, D = shape
        if group.group and D % group.group:
            name = f"{stem}.weight_scale"
            raise broken(tensors.path(name), f"groups of {group.group} in {D} inputs", name)
        tensors.check(f"{stem}.weight_scale", group.scales(N, D), FLOATS)
        return N, D

    def read(self, tensors: Tensors, stem: str) -> Matrix:
        """As ``Reader.read``."""
        (N, D), group = self.check(tensors, stem), self._known(stem)
        name = f"{stem}.weight_scale"
        found = tensors.get(name, group.scales(N, D), FLOATS).astype(np.float32)
        check_scales(tensors, name, found)
        whole = group.strategy in ("tensor", "block")
        scale = spread(found, group.block, (N, D)) if whole else found
        zero = None if group.symmetric else _zeros(tensors, stem, group, scale.shape)
        return Matrix(q=_values(tensors, stem, group, (N, D)), scale=scale, zero=zero)

    def _known(self, stem: str) -> Group:
        group = self.group_of(stem)
        assert group is not None, f"{stem} is not quantised"
        return group


def _packed_shape(tensors: Tensors, stem: str, bits: int) -> tuple[int, int]:
    name = f"{stem}.weight_shape"
    N, D = (int(n) for n in tensors.get(name, (2,), ("int64", "int32")))
    stored = tensors.shape(f"{stem}.weight_packed")
    if min(N, D) < 1 or stored not in ((N, -(-D * bits // 32)), (N, -(-D // (32 // bits)))):
        raise broken(tensors.path(name), f"says {(N, D)}, weight_packed is {stored}", name)
    tensors.check(f"{stem}.weight_packed", stored, ("int32",))
    return N, D


def _values(tensors: Tensors, stem: str, group: Group, shape: tuple[int, int]) -> np.ndarray:
    if group.format != "pack-quantized":
        q = tensors.get(f"{stem}.weight", shape, E4M3 if group.is_float else ("int8",))
        return finite(tensors, stem, q) if group.is_float else q
    name = f"{stem}.weight_packed"
    words = tensors.get(name, tensors.shape(name), ("int32",))
    return _unpacked(words, group.bits, shape[1])


def _unpacked(words: np.ndarray, bits: int, n: int) -> np.ndarray:
    """int8[rows, n]; the number of words says whether values cross their borders."""
    loose = words.shape[1] == -(-n // (32 // bits))
    found = fields(words, bits)[:, :n] if loose else dense_fields(words, bits, n)
    return (found.astype(np.int16) - 2 ** (bits - 1)).astype(np.int8)


def _zeros(tensors: Tensors, stem: str, group: Group, shape: tuple[int, ...]) -> np.ndarray:
    """int8[N, groups]."""
    name, (N, B) = f"{stem}.weight_zero_point", shape
    if group.format == "pack-quantized":
        words = tensors.get(name, (tensors.shape(name)[0], B), ("int32",))
        return _unpacked(np.ascontiguousarray(words.T), group.bits, N).T
    stored = (1,) if group.strategy == "tensor" else (N, B)
    found = tensors.get(name, stored, ("int8",))
    return np.broadcast_to(found.reshape(-1, 1) if len(stored) == 1 else found, (N, B))


def read(config: Mapping[str, Any], dtype: str) -> tuple[Compressed, Compressed] | None:
    """The format of a ``quantization_config``; None: it has scales of KV alone.

    Raises:
        ConfigError: it has what is not read; ``field`` is the key.
    """
    for key in ("sparsity_config", "transform_config"):
        if config.get(key):
            refuse(key, "is not supported")
    given = config.get(GROUPS) or {}
    if not isinstance(given, Mapping):
        refuse(GROUPS, "must be an object")
    if not given:
        return None
    top = one_of(config, "format", *FORMATS)
    groups = tuple(_group(f"{GROUPS}.{name}", g, top, dtype) for name, g in given.items())
    made = Compressed(groups=groups, ignore=names(config, "ignore"))
    return made, made


def _group(at: str, given: Any, top: str, dtype: str) -> Group:
    if not isinstance(given, Mapping) or not isinstance(given.get("weights"), Mapping):
        refuse(at, "must be an object with weights")
    weights, inside = given["weights"], f"{at}.weights."
    is_float = one_of(weights, "type", "int", "float", at=inside) == "float"
    bits = one_of(weights, "num_bits", *((8,) if is_float else (2, 3, 4, 5, 6, 7, 8)), at=inside)
    strategy = one_of(weights, "strategy", *STRATEGIES, at=inside)
    if weights.get("dynamic"):
        refuse(f"{inside}dynamic", "weights with scales of run time are not supported")
    if strategy == "group" and weights.get("actorder") in ("group", True):
        refuse(f"{inside}actorder", "inputs in an order of their own are not supported")
    if given.get("output_activations"):
        refuse(f"{at}.output_activations", "rounded outputs are not supported")
    found = given.get("format")
    if found is not None:
        one_of(given, "format", *FORMATS[:-1], at=f"{at}.")
    return Group(
        targets=names(given, "targets", at=f"{at}."),
        format=_format(top if found is None else found, at),
        bits=bits,
        is_float=is_float,
        strategy=strategy,
        group=group_size(weights, at=inside) if strategy == "group" else 0,
        block=_block(weights, inside) if strategy == "block" else (0, 0),
        symmetric=one_of(weights, "symmetric", True, False, at=inside),
        rounded=_rounded(at, given.get("input_activations"), is_float, strategy),
        dtype=dtype,
    )


def _format(found: str, at: str) -> str:
    if found == "mixed-precision":
        refuse(f"{at}.format", "is missing")
    return found


def _block(weights: Mapping[str, Any], at: str) -> tuple[int, int]:
    size = weights.get("block_structure")
    if isinstance(size, str):
        size = [int(n) if n.isdigit() else 0 for n in size.split("x")]
    if (
        not isinstance(size, list)
        or len(size) != 2
        or any(type(n) is not int or n < 1 for n in size)
    ):
        refuse(f"{at}block_structure", f"must be two positive numbers, not {size!r}")
    return size[0], size[1]


def _rounded(at: str, given: Any, is_float: bool, strategy: str) -> bool:
    """True if activations are rounded as the weights are."""
    if given is None:
        return False
    key = f"{at}.input_activations."
    if not isinstance(given, Mapping):
        refuse(key[:-1], "must be an object")
    one_of(given, "num_bits", 8, at=key)
    one_of(given, "type", "float" if is_float else "int", at=key)
    if not given.get("symmetric", True):
        refuse(f"{key}symmetric", "asymmetric activations are not supported")
    if not given.get("dynamic"):
        refuse(f"{key}dynamic", "static scales of activations are not supported")
    one_of(given, "strategy", "group" if strategy in ("group", "block") else "token", at=key)
    return True
