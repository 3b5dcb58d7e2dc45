"""Sets the accelerator memory share of XLA before jax creates its first device.

It owns the environment variables of XLA that jserve sets, for the command line and for ``LLM`` alike. jax reads
them once, so they have no effect in a process whose devices exist already.
"""

from __future__ import annotations

import os
import re
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


FORCED = "xla_force_host_platform_device_count"
"""The flag that makes several devices of a CPU."""
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


def leave_memory(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Have XLA take no memory of the devices in this process before it is needed, since children run on them; returns
    the environment as it was, which is theirs."""
    found = dict(environ)
    environ.setdefault(PREALLOCATE, "false")
    return found


def with_devices(n: int, environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with ``n`` devices of a CPU, where the user's flags make more of it."""
    flags = environ.get("XLA_FLAGS", "")
    forced = re.search(rf"--{FORCED}=(\d+)", flags)
    if forced is None or int(forced[1]) <= n:
        return dict(environ)
    return {**environ, "XLA_FLAGS": flags.replace(forced[0], f"--{FORCED}={n}")}


def beside_parent(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a child that shares the device with its parent: no pool of memory, no search for fast
    products."""
    flags = f"{environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    return {**environ, PREALLOCATE: "false", "XLA_FLAGS": flags}
