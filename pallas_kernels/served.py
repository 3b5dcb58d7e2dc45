"""What the attention kernels serve and what they refuse; the tables that tune them.

Owns the checks that both share and the reading of ``tune.json``. Must not know a kernel.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from typing import Any

import jax.numpy as jnp

HEAD_DIMS = (64, 128, 256)
DTYPES = (jnp.bfloat16, jnp.float16)


def check_heads(N: int, H: int, keys_PKZH: Any) -> None:
    """Raises:
    ValueError: N query heads of H do not go with these keys, or these are of no served type.
    """
    _, K, _, H_kv = keys_PKZH.shape
    if H_kv != H or H not in HEAD_DIMS:
        raise ValueError(f"head dimension {H} of q and {H_kv} of keys must be one of {HEAD_DIMS}")
    if N % K:
        raise ValueError(f"{N} query heads are not a multiple of {K} kv heads")
    if keys_PKZH.dtype not in DTYPES:
        raise ValueError(f"keys are {keys_PKZH.dtype}, but bfloat16 or float16 is served")


def check_page(Z: int, block: int) -> None:
    """Raises:
    ValueError: pages of Z tokens do not tile blocks of ``block`` keys.
    """
    if Z % 8 or (block % Z and Z % block):
        raise ValueError(f"page size {Z} must be a multiple of 8 and divide {block} or be divided")


@lru_cache
def tuning(package: str) -> dict[str, Any]:
    """The table of a kernel: an entry per head dimension, and what holds for all of them."""
    return json.loads(resources.files(package).joinpath("tune.json").read_text())
