"""auto-round checkpoints: GPTQ or AWQ packing, with modules that have settings of their own (``extra_config``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jserve.weights.quant import awq, compressed_config, fp8, gptq
from jserve.weights.quant.matrix import Modules, Reader
from jserve.weights.quant.values import check_patterns, one_of, refuse

PACKINGS = ("auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round:auto_awq")
OTHERS = {"auto_round:fp8": fp8.read, "auto_round:llm_compressor": compressed_config.read}
"""Packings that are formats of their own, without settings by module."""
PLAIN: dict[str, Any] = {"backend": None, "format": None}
"""Keys that mean something else in GPTQ's and AWQ's own configs; ``packing_format`` has it."""
WIDE_BITS = (16, 32)
"""Of a module that is not quantised."""
SPECIAL = re.compile(r"[*?+\[\](){}|^$\\]")
"""Tells an expression from a name."""


def read(config: Mapping[str, Any], dtype: str) -> tuple[Modules, Reader]:
    """The format of a ``quantization_config``.

    Raises:
        ConfigError: it has what is not read; ``field`` is the key.
    """
    packing = one_of(config, "packing_format", *PACKINGS, *OTHERS)
    given = config.get("extra_config") or {}
    if not isinstance(given, Mapping):
        refuse("extra_config", "must be an object")
    if packing in OTHERS:
        if given:
            refuse("extra_config", f"settings by module are not read of {packing}")
        found = OTHERS[packing](config, dtype)
        return found if found is not None else refuse("config_groups", "is missing")
    plain = {"group_size": 128, "sym": True, "bits": 4, **config}
    if packing == "auto_round:auto_awq":
        return awq.read({**plain, **_awq(plain, given)}, dtype)
    rules = dict(_rule(name, own) for name, own in given.items())
    return gptq.read({**plain, **PLAIN, "dynamic": rules, "checkpoint_format": "gptq"}, dtype)


def _rule(name: str, own: Any) -> tuple[str, Any]:
    """A line of ``extra_config`` as one of GPTQ's ``dynamic``."""
    pattern = name if SPECIAL.search(name) else re.escape(name) + "$"
    check_patterns([f"re:{pattern}"], f"extra_config.{name[:80]}")
    if _wide(name, own):
        return f"-:{pattern}", {}
    known = {"bits", "group_size", "sym"}
    return f"+:{pattern}", {key: own[key] for key in known & set(own)}


def _awq(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of AWQ; modules can only be left as they are."""
    for name, own in given.items():
        if not _wide(name, own):
            refuse(f"extra_config.{name[:80]}", "settings by module are not read of this packing")
    return PLAIN | {"zero_point": True, "version": "gemm", "modules_to_not_convert": list(given)}


def _wide(name: str, own: Any) -> bool:
    if not isinstance(own, Mapping):
        refuse(f"extra_config.{name[:80]}", "must be an object")
    return own.get("bits") in WIDE_BITS
