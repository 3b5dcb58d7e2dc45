"""Names a compiled program by everything that shapes it, so that a later process can tell whether it is still the same.

It owns ``environment`` (versions, options of jax and XLA, processor, devices), ``source_digest`` and ``described``, a
text of a value such as a ``StepModel`` in which each function has its module and name: what that names is in the digest
of the source. A value that holds a function of anybody else's has no such text, and programs of it are not kept.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jserve.cores import n_cores
from jserve.xla import settings

FORMAT = 1
"""Of the files; another one is another key."""
OURS = ("jserve", "pallas_kernels")
"""Packages whose source is in the key."""
KNOWN = (*OURS, "builtins", "jax", "jaxlib", "numpy", "ml_dtypes", "flax")
"""Packages that a key covers, by source or version."""
SOURCES = (".py", ".c", ".h", ".json")
VERSIONED = ("jax", "jaxlib", "numpy", "ml_dtypes", "flax")
_UNSHAPING = ("jax_compilation_cache", "jax_persistent_cache", "jax_log", "jax_debug_log")
"""Beginnings of names of jax's options that leave programs as they are: caches and logs."""
_PROCESSOR = ("model name", "flags", "CPU implementer", "CPU part", "Features")


class UnknownCode(ValueError):
    """A value that a program depends on is not covered by a key; the message says which."""


def digest(*parts: str) -> str:
    """64 hex digits of these texts in this order."""
    found = hashlib.sha256()
    for part in parts:
        found.update(f"{len(part)}:{part}".encode())
    return found.hexdigest()


def environment(mesh: Mesh) -> str:
    """All that shapes every program of this process on ``mesh``, as text."""
    device = mesh.devices.flat[0]
    facts = {
        "format": FORMAT,
        "python": sys.version_info[:2],
        "versions": [importlib.metadata.version(name) for name in VERSIONED],
        "jax": _jax_options(),
        "xla": settings(),
        "processor": _processor(),
        "cores": n_cores(),
        "client": (device.platform, device.client.platform_version, device.device_kind),
        "processes": jax.process_count(),
        "devices": len(device.client.devices()),
        "mesh": [each.id for each in mesh.devices.flat],
    }
    return repr(facts)


@functools.cache
def source_digest() -> str:
    """Of all files of ``OURS`` that are code or data of kernels."""
    found = hashlib.sha256()
    for package in OURS:
        root = Path(importlib.import_module(package).__file__ or "").parent
        for path in sorted(p for p in root.rglob("*") if p.suffix in SOURCES):
            data = path.read_bytes()
            found.update(f"{package}/{path.relative_to(root)}:{len(data)}:".encode() + data)
    return found.hexdigest()


def _jax_options() -> list[tuple[str, str]]:
    values = jax.config.values.items()
    return sorted((name, repr(v)) for name, v in values if not name.startswith(_UNSHAPING))


def _processor() -> tuple[str, ...]:
    """Its model and instructions: machine code has what this one can do."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    return (platform.machine(), *sorted({x for x in lines if x.startswith(_PROCESSOR)}))


def arguments(args: Any) -> str:
    """Paths, shapes, types and shardings of a tree of abstract arrays."""
    leaves = jax.tree.leaves_with_path(args)
    return "\n".join(
        f"{jax.tree_util.keystr(path)} {leaf.dtype}{leaf.shape} {_sharding(leaf.sharding)}"
        for path, leaf in leaves
    )


def _sharding(sharding: Any) -> str:
    if not isinstance(sharding, NamedSharding):
        return repr(sharding)
    return f"{sharding.spec} {sharding.memory_kind}"


def described(value: Any) -> str:
    """``value`` as text: equal for values that make equal programs.

    Raises:
        UnknownCode: it holds a function or an object of a kind that nothing in the key covers.
    """
    return _Describer().text(value)


class _Describer:
    """One walk over a value; a function that refers to itself is described once."""

    def __init__(self) -> None:
        self._inside: set[int] = set()

    def text(self, value: Any) -> str:
        if isinstance(value, type):
            return _named(value)
        if dataclasses.is_dataclass(value):
            parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return f"{_named(type(value))}{self.text(parts)}"
        for kinds, describe in self._kinds():
            if isinstance(value, kinds):
                return describe(value)
        if hasattr(value, "__dict__") and type(value).__module__.startswith(OURS):
            return f"{_named(type(value))}{self.text(vars(value))}"
        raise UnknownCode(f"a {type(value).__module__}.{type(value).__qualname__}")

    def _kinds(self) -> list[tuple[Any, Callable[[Any], str]]]:
        return [
            (enum.Enum, repr),
            ((type(None), bool, int, float, str, bytes), repr),
            ((np.dtype, PartitionSpec), repr),
            (Mesh, _mesh),
            (Mapping, self._mapping),
            # Not a set: it has no order.
            ((tuple, list), lambda items: f"[{', '.join(map(self.text, items))}]"),
            (functools.partial, lambda p: self.text((p.func, p.args, p.keywords))),
            (MethodType, lambda m: self.text((m.__func__, m.__self__))),
            (FunctionType, self._function),
            (BuiltinFunctionType, _named),
            (ModuleType, lambda module: _known(module.__name__)),
        ]

    def _mapping(self, items: Mapping[Any, Any]) -> str:
        return f"{{{', '.join(f'{k!r}: {self.text(v)}' for k, v in items.items())}}}"

    def _function(self, function: FunctionType) -> str:
        name = f"{_named(function)}:{function.__code__.co_firstlineno}"
        if id(function) in self._inside:
            return name
        self._inside.add(id(function))
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        held = (cells, function.__defaults__, function.__kwdefaults__)
        return f"{name}{self.text(held)}" if any(held) else name


def _named(thing: Any) -> str:
    return f"{_known(thing.__module__)}.{thing.__qualname__}"


def _known(module: str | None) -> str:
    if (module or "").partition(".")[0] not in KNOWN:
        raise UnknownCode(f"code of {module}")
    return module or ""


def _mesh(mesh: Mesh) -> str:
    ids = [device.id for device in mesh.devices.flat]
    return f"{dict(mesh.shape)} {mesh.axis_types} {ids}"
