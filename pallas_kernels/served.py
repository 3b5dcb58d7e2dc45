"""Lists what the attention kernels serve and what they refuse, with the tables that tune them.

It owns the checks that both share and the reading of ``tune.json``.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from typing import Any

import jax.numpy as jnp

HEAD_DIMS = (64, 128, 256)
LEAST_PAGE = 32
"""Tokens of the smallest page of int8: the copy of its scales begins at a multiple of 128 bytes of shared memory."""
WIDEST_SPECIAL = 128
"""Heads up to here have registers left for KV of 8 bits and for trees."""
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int8)


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
        names = ", ".join(jnp.dtype(d).name for d in DTYPES)
        raise ValueError(f"keys are {keys_PKZH.dtype}, but only {names} are served")
    if keys_PKZH.dtype.itemsize == 1 and H > WIDEST_SPECIAL:
        raise ValueError(f"keys of 8 bits with heads of {H}: registers suffice for 64 and 128 only")


def check_page(Z: int, block: int, dtype: Any) -> None:
    """Raises:
    ValueError: pages of Z tokens do not tile blocks of ``block`` keys, or are too small for KV of ``dtype``.
    """
    if jnp.dtype(dtype) == jnp.int8 and LEAST_PAGE > Z:
        raise ValueError(f"page size {Z} of keys of int8: at least {LEAST_PAGE}")
    if Z % 8 or (block % Z and Z % block):
        raise ValueError(f"page size {Z} must be a multiple of 8 and divide {block} or be divided")


def check_tree(tree: Any, J: int, H: int) -> None:
    """Raises:
    ValueError: the tree is not of J tokens, or heads are too wide for one.
    """
    if tree is not None and H > WIDEST_SPECIAL:
        raise ValueError(f"a tree of drafts with heads of {H}: registers suffice for 64 and 128")
    if tree is not None and len(tree.sees) != J:
        raise ValueError(f"a tree of {len(tree.sees)} tokens for rows of {J}")


@lru_cache
def tuning(package: str) -> dict[str, Any]:
    """The table of a kernel: an entry per head dimension, and what holds for all of them."""
    return json.loads(resources.files(package).joinpath("tune.json").read_text())


def of_dtype(table: dict[str, Any], H: int, dtype: Any) -> dict[str, Any]:
    """The entry of a head dimension in the part of the table that is for KV of ``dtype``."""
    return (table if jnp.dtype(dtype).itemsize == 2 else table["8 bits"])[str(H)]


def multiplied(dtype: Any) -> Any:
    """The type that the matrix unit multiplies for KV stored as ``dtype``: e4m3 has an exact float16 each, int8 an
    exact bfloat16, in which a weight times the scale of a value has room."""
    if jnp.dtype(dtype) == jnp.int8:
        return jnp.bfloat16
    return dtype if jnp.dtype(dtype).itemsize == 2 else jnp.float16
