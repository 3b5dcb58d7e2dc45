"""compressed-tensors checkpoints: the groups of ``quantization_config``.

Modules are named by groups of ``targets``, less those of ``ignore``; each group has its own scheme.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from jserve.weights.quant.compressed import MXFP4, MXFP8, NVFP4, PACKED, Compressed, Group
from jserve.weights.quant.values import check_patterns, group_size, names, one_of, refuse

log = logging.getLogger(__name__)

MIXED = "mixed-precision"
FORMATS = ("float-quantized", "int-quantized", PACKED, "naive-quantized", NVFP4, MXFP4, MXFP8)
BITS: dict[str, tuple[int, ...]] = {PACKED: (2, 3, 4, 5, 6, 7, 8), NVFP4: (4,), MXFP4: (4,)}
"""Formats with other bits than 8."""
GROUP_SIZES = {NVFP4: 16, MXFP4: 32, MXFP8: 32}
STRATEGIES = ("tensor", "channel", "group", "block")
GROUPS = "config_groups"


def read(config: Mapping[str, Any], dtype: str) -> tuple[Compressed, Compressed] | None:
    """The format of a ``quantization_config``; None: it has scales of KV alone.

    Raises:
        ConfigError: it has what is not read; ``field`` is the key.
    """
    _check_dense(config.get("sparsity_config"))
    if config.get("transform_config"):
        refuse("transform_config", "is not supported")
    given = config.get(GROUPS) or {}
    if not isinstance(given, Mapping):
        refuse(GROUPS, "must be an object")
    if not given:
        return None
    top = one_of(config, "format", *FORMATS, MIXED)
    groups = tuple(_group(f"{GROUPS}.{name}", g, top, dtype) for name, g in given.items())
    made = Compressed(groups=groups, ignore=names(config, "ignore"))
    check_patterns([*made.ignore, *(name for g in groups for name in g.targets)], GROUPS)
    return made, made


def _check_dense(given: Any) -> None:
    """Refuse a ``sparsity_config`` but one that says that nothing is left out of the matrices."""
    if given and not isinstance(given, Mapping):
        refuse("sparsity_config", "must be an object")
    if given:
        one_of(given, "format", "dense", at="sparsity_config.")


def _group(at: str, given: Any, top: str, dtype: str) -> Group:
    if not isinstance(given, Mapping) or not isinstance(given.get("weights"), Mapping):
        refuse(at, "must be an object with weights")
    weights, inside, fmt = given["weights"], f"{at}.weights.", _format(given, top, at)
    is_float = one_of(weights, "type", *_types(fmt), at=inside) == "float"
    if weights.get("dynamic"):
        refuse(f"{inside}dynamic", "weights with scales of run time are not supported")
    if given.get("output_activations"):
        refuse(f"{at}.output_activations", "rounded outputs are not supported")
    strategy = _strategy(weights, fmt, inside)
    rounded, static = _activations(at, given.get("input_activations"), is_float, strategy, fmt)
    group = group_size(weights, at=inside) if strategy == "group" else 0
    order = one_of(weights, "actorder", None, False, True, "group", "static", "weight", at=inside)
    return Group(
        targets=names(given, "targets", at=f"{at}."),
        format=fmt,
        bits=one_of(weights, "num_bits", *BITS.get(fmt, (8,)), at=inside),
        is_float=is_float,
        strategy=strategy,
        group=group,
        block=_block(weights, inside) if strategy == "block" else (0, 0),
        symmetric=one_of(weights, "symmetric", *_symmetric(fmt, is_float, strategy), at=inside),
        ordered=group > 0 and order in (True, "group"),
        rounded=rounded,
        static=static,
        dtype=dtype,
    )


def _format(given: Mapping[str, Any], top: str, at: str) -> str:
    """Of a group: its own, else that of all."""
    if given.get("format") is not None:
        return one_of(given, "format", *FORMATS, at=f"{at}.")
    if top == MIXED:
        refuse(f"{at}.format", "is missing")
    return top


def _types(fmt: str) -> tuple[str, ...]:
    if fmt in (PACKED, "int-quantized"):
        return ("int",)
    return ("int", "float") if fmt == "naive-quantized" else ("float",)


def _strategy(weights: Mapping[str, Any], fmt: str, at: str) -> str:
    """Of what shares a scale. A group within a matrix that has a scale, too, is a group."""
    if fmt not in GROUP_SIZES:
        return one_of(weights, "strategy", *STRATEGIES, at=at)
    one_of(weights, "strategy", "tensor_group" if fmt == NVFP4 else "group", at=at)
    one_of(weights, "group_size", GROUP_SIZES[fmt], at=at)
    return "group"


def _symmetric(fmt: str, is_float: bool, strategy: str) -> tuple[bool, ...]:
    """The values that ``symmetric`` may have: zeros are of integers, and packed along the rows of a matrix."""
    no_rows = strategy == "block" or (fmt == PACKED and strategy == "tensor")
    return (True,) if is_float or no_rows else (True, False)


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


def _activations(at: str, given: Any, is_float: bool, strategy: str, fmt: str) -> tuple[bool, bool]:
    """(activations are rounded as the weights are, and that by a scale of the checkpoint)."""
    if given is None:
        return False, False
    key = f"{at}.input_activations."
    if not isinstance(given, Mapping):
        refuse(key[:-1], "must be an object")
    if fmt in GROUP_SIZES:
        if fmt == MXFP8:  # of 4 bits the engine says so, whichever format has them
            log.warning("%s: activations stay as they are, only weights are of %s", key[:-1], fmt)
        return False, False
    one_of(given, "num_bits", 8, at=key)
    one_of(given, "type", "float" if is_float else "int", at=key)
    if not given.get("symmetric", True):
        refuse(f"{key}symmetric", "asymmetric activations are not supported")
    if not given.get("dynamic"):
        one_of(given, "strategy", "tensor", at=key)
        return True, True
    one_of(given, "strategy", "group" if strategy in ("group", "block") else "token", at=key)
    return True, False
