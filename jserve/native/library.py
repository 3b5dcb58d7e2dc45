"""Finds and checks the compiled kernels: whether there are any, and for which level of this processor.

The library is trusted only if it was built from the sources beside it and if small products and attention of every
level it may use agree with plain C. Where anything is missing, everything runs on XLA and the reason is one line.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jserve.native.compile import NOT_ON_WINDOWS, library_path, source_hash

LEVELS_OF = {
    "x86_64": ("plain", "avx2", "avx512f", "avx512_bf16", "amx"),
    "aarch64": ("plain", "neon", "neon_bf16"),
}
"""The instructions of a processor, by the number that the library gives it: each has all of those before it."""
LEVELS = LEVELS_OF.get(platform.machine().replace("arm64", "aarch64"), ("plain",))
"""Those of this machine's architecture, which macOS calls arm64."""
KINDS = ("bf16", "int8", "int4", "e4m3", "rounded", "uint4", "e2m1")
"""Kinds of weights, by the number that the library gives them; ``rounded``: int8 with activations rounded to int8."""
HANDLERS = {
    "jserve.product.v1": "jserve_product",
    "jserve.gate_up.v1": "jserve_gate_up",
    "jserve.quantised_product.v2": "jserve_quantised_product",
    "jserve.quantised_gate_up.v2": "jserve_quantised_gate_up",
    "jserve.expert_product.v1": "jserve_expert_product",
    "jserve.expert_gate_up.v1": "jserve_expert_gate_up",
    "jserve.quantised_expert_product.v1": "jserve_quantised_expert_product",
    "jserve.quantised_expert_gate_up.v1": "jserve_quantised_expert_gate_up",
    "jserve.attention.v2": "jserve_attention",
    "jserve.write_kv.v1": "jserve_write_kv",
}
"""Names of the kernels for XLA, and of the functions. A compiled program finds its kernel by that name alone, so a
kernel that takes or means something else gets another version."""


REPAIR = "`jserve native` builds it"


class NoLibrary(Exception):
    """There are no kernels; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Library:
    """Kernels that passed their checks."""

    handle: ctypes.CDLL
    level: str
    """The best of ``LEVELS`` that this processor has and whose kernels give right results."""

    def function(self, name: str) -> Any:
        """A pointer to a function, as ``jax.ffi.pycapsule`` takes it."""
        return getattr(self.handle, name)

    def levels(self) -> tuple[str, ...]:
        """All that may be asked for, worst first."""
        return LEVELS[: LEVELS.index(self.level) + 1]


def load(path: Path) -> Library:
    """The kernels in ``path``, checked.

    Raises:
        NoLibrary: this is Windows, there is no such file, it is no library of ours, it is older than its sources, or
            its kernels give wrong results.
    """
    if sys.platform == "win32":
        raise NoLibrary(NOT_ON_WINDOWS)
    if not path.is_file():
        raise NoLibrary(f"no library was built; {REPAIR}")
    try:
        handle = ctypes.CDLL(str(path))
        handle.jserve_source_hash.restype = ctypes.c_char_p
        built_from = handle.jserve_source_hash().decode()
    except (OSError, AttributeError, UnicodeDecodeError) as e:
        raise NoLibrary(f"{path.name} cannot be loaded: {str(e).splitlines()[0]}") from None
    if built_from != source_hash():
        raise NoLibrary(f"{path.name} was built from other sources; {REPAIR}")
    return Library(handle, _checked(LEVELS[handle.jserve_level()], handle))


def _checked(found: str, handle: ctypes.CDLL) -> str:
    for number, name in enumerate(LEVELS[: LEVELS.index(found) + 1]):
        if not handle.jserve_self_check(number):
            raise NoLibrary(f"the kernels of level {name} give wrong results here")
    return found


@lru_cache(maxsize=1)
def _installed() -> Library | str:
    try:
        return load(library_path())
    except NoLibrary as e:
        return str(e)


def installed() -> Library:
    """The kernels of this installation, looked for once in a process.

    Raises:
        NoLibrary: as ``load``.
    """
    found = _installed()
    if isinstance(found, str):
        raise NoLibrary(found)
    return found


def forget() -> None:
    """Look again the next time, after a library was built."""
    _installed.cache_clear()
