"""Sets the accelerator memory share of XLA before jax creates its first device.

It owns the environment variables of XLA that jserve sets, for the command line and for ``LLM`` alike. jax reads
them once, so they have no effect in a process whose devices exist already.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from jserve.config import DEVICE_SHARE

FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_READ_BY_XLA = ("XLA_", "TF_XLA_", "LLVM_")


def claim_memory(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have XLA take ``DEVICE_SHARE`` of the memory, which is what the KV pool is sized from, unless the
    user says otherwise under either name (XLA refuses both at once)."""
    if not environ.get(OLD_FRACTION):
        environ.setdefault(FRACTION, str(DEVICE_SHARE))


def user_sets(flag: str, environ: Mapping[str, str] = os.environ) -> bool:
    """True if ``XLA_FLAGS`` sets ``flag``: options given to the compiler would overrule it."""
    return f"--{flag}" in environ.get("XLA_FLAGS", "")


def settings(environ: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """The variables that XLA and its compilers read, in the order of their names."""
    return sorted((k, v) for k, v in environ.items() if k.startswith(_READ_BY_XLA))


def beside_parent(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a child that shares the device with its parent: no pool of memory, no search for fast
    products."""
    flags = f"{environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    return {**environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags}
