"""The native kernels as JAX functions, and which products they take.

It owns what is known about the kernels on the device side: their names for XLA, their arguments, and up to how many
rows each level beats XLA's own product. Kernels are chosen while a step is traced, by the level of its ``StepModel``::

    with kernels("avx512_bf16"):      # "" : everything is XLA's
        y_TN = dot(x_TD, w_ND)
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.errors import ConfigError
from jserve.native.library import HANDLERS, LEVELS, NoLibrary, installed

kernels = jax.make_user_context("")
"""A context manager that takes the level of the kernels in use. Functions that were traced at another level are
traced again."""

MOST_ROWS = {"plain": 0, "avx2": 64, "avx512f": 64, "avx512_bf16": 128}
"""Rows of a product up to which each level beats XLA."""


def available(platform: str, dtype: Any, *, level: str = "") -> tuple[str, str]:
    """(level of the kernels that serve bfloat16 steps, why there is none), one of them empty.

    Args:
        platform: of the devices, as jax calls it.
        dtype: of weights and activations.
        level: one of ``LEVELS`` that is not to be exceeded; empty: the best.
    """
    if platform != "cpu":
        return "", f"they are for CPUs, the devices are {platform}"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return "", f"they multiply bfloat16, the weights are {jnp.dtype(dtype)}"
    try:
        found = installed()
        _register()
    except NoLibrary as e:
        return "", str(e)
    best = LEVELS[min(LEVELS.index(found.level), LEVELS.index(level or LEVELS[-1]))]
    return (best, "") if MOST_ROWS[best] else ("", f"level {best} is slower than XLA")


def chosen(asked: str, platform: str, dtype: Any) -> tuple[str, str]:
    """``available`` for option ``kernels``.

    Raises:
        ConfigError: ``native`` where there are none; ``field`` is the option.
    """
    if asked == "xla":
        return "", "asked for"
    level, reason = available(platform, dtype)
    if asked == "native" and not level:
        raise ConfigError(f"kernels native: {reason}", field="kernels")
    return level, reason


@cache
def _register() -> None:
    """Give XLA the kernels by name; before anything is compiled or loaded from a cache that may call them.

    Raises:
        NoLibrary: there are none, or XLA refuses them.
    """
    library = installed()
    for name, function in HANDLERS.items():
        try:
            capsule = jax.ffi.pycapsule(library.function(function))
            jax.ffi.register_ffi_target(name, capsule, platform="cpu")
        except Exception as e:  # XlaRuntimeError has no public base
            raise NoLibrary(f"this jaxlib refuses them: {str(e).splitlines()[0]}") from None


def takes(x_TD: jax.Array, w_ND: jax.Array) -> bool:
    """Whether the kernels in use multiply these."""
    level = kernels.value
    return bool(level) and w_ND.dtype == jnp.bfloat16 and x_TD.shape[0] <= MOST_ROWS[level]


def product(x_TD: jax.Array, w_ND: jax.Array) -> jax.Array:
    """``x_TD @ w_ND.T`` as float32[T, N], x rounded to bfloat16. Rows of x that are all zeros cost nothing."""
    return _call("jserve.product.v1", (x_TD.shape[0], w_ND.shape[0]))(
        x_TD.astype(jnp.float32), w_ND, level=_level()
    )


def gate_up(x_TD: jax.Array, w_2FD: jax.Array) -> jax.Array:
    """``silu(x_TD @ w[0].T) * (x_TD @ w[1].T)`` as float32[T, F]."""
    w_ND = w_2FD.reshape(-1, w_2FD.shape[-1])
    return _call("jserve.gate_up.v1", (x_TD.shape[0], w_2FD.shape[1]))(
        x_TD.astype(jnp.float32), w_ND, level=_level()
    )


def _level() -> np.int64:
    return np.int64(LEVELS.index(kernels.value))


def _call(name: str, shape: tuple[int, ...]) -> Any:
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, jnp.float32))
