"""The native kernels as JAX functions, and which products they take.

It owns what is known about the kernels on the device side: their names for XLA, their arguments, and up to how many
rows each level beats XLA's own product. Kernels are chosen while a step is traced, by the level of its ``StepModel``::

    with kernels("avx512_bf16"):  # "" : everything is XLA's
        y_TN = dot(x_TD, w_ND)

``HOPPER`` is a level, too: the kernel for quantised weights on GPUs (``quant_hopper``).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jserve.errors import ConfigError
from jserve.model.attention import unserved
from jserve.native.library import HANDLERS, LEVELS, NoLibrary, installed

kernels = jax.make_user_context("")
"""A context manager that takes the level of the kernels in use. Functions that were traced at another level are
traced again."""

HOPPER = "hopper"
MOST_ROWS = {
    HOPPER: 0,
    "plain": 0,
    "avx2": 4096,
    "avx512f": 8,
    "avx512_bf16": 4096,
    "amx": 4096,
    "neon": 4096,
    "neon_bf16": 4096,
}
"""Rows of a product up to which each level beats XLA. Those of Arm were never measured: they have what avx2 has."""


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


def chosen(
    asked: str, platform: str, dtype: Any, capability: str = "", *, quantised: bool = False
) -> tuple[str, str]:
    """(level of the kernels for option ``kernels``, why there is none), one of them empty.

    Args:
        platform, dtype: as of ``available``.
        capability: compute capability of a GPU.
        quantised: the model has weights that the kernel for Hopper takes.

    Raises:
        ConfigError: ``native`` or ``hopper`` where there are none; ``field`` is the option.
    """
    if asked == "xla":
        return "", "asked for"
    on_gpu = asked == HOPPER or (asked == "auto" and platform != "cpu")
    if on_gpu:
        level, reason = _hopper(platform, capability, quantised=quantised)
    else:
        level, reason = available(platform, dtype)
    if asked in ("native", HOPPER) and not level:
        raise ConfigError(f"kernels {asked}: {reason}", field="kernels")
    return level, reason


def _hopper(platform: str, capability: str, *, quantised: bool) -> tuple[str, str]:
    """As ``chosen``."""
    if platform == "cpu":
        return "", "they are for GPUs, the devices are cpu"
    reason = unserved(capability)
    if not reason and not quantised:
        reason = "no weights are in groups in a model in bfloat16"
    return ("", reason) if reason else (HOPPER, "")


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
    """True if the kernels in use multiply these."""
    return w_ND.dtype == jnp.bfloat16 and takes_rows(kernels.value, x_TD.shape[0])


def takes_rows(level: str, n: int) -> bool:
    """True if the kernels of ``level`` (empty: none) take products of ``n`` rows."""
    return bool(level) and n <= MOST_ROWS[level]


def product(x_TD: jax.Array, w_ND: jax.Array) -> jax.Array:
    """``x_TD @ w_ND.T`` as float32[T, N], x rounded to bfloat16. Rows of x that are all zeros cost nothing."""
    return _call("jserve.product.v1", (x_TD.shape[0], w_ND.shape[0]))(
        x_TD.astype(jnp.float32), w_ND, level=level_number()
    )


def gate_up(x_TD: jax.Array, w_2FD: jax.Array) -> jax.Array:
    """``silu(x_TD @ w[0].T) * (x_TD @ w[1].T)`` as float32[T, F]."""
    w_ND = w_2FD.reshape(-1, w_2FD.shape[-1])
    return _call("jserve.gate_up.v1", (x_TD.shape[0], w_2FD.shape[1]))(
        x_TD.astype(jnp.float32), w_ND, level=level_number()
    )


MOST_ASSIGNMENTS = 16384
"""Of tokens to experts, in one product."""


def takes_experts(A: int, E: int, w: jax.Array) -> bool:
    """True if the kernels in use multiply ``A`` assignments to ``E`` experts: an expert has few rows on average."""
    level = kernels.value
    few = bool(level) and min(MOST_ROWS[level] * E, MOST_ASSIGNMENTS) >= A
    return few and w.dtype == jnp.bfloat16


def expert_product(x_RD: jax.Array, w_END: jax.Array, expert_A: jax.Array) -> jax.Array:
    """float32[A, N]: ``product`` of each assignment with the weights of its expert, read where they lie.

    Args:
        x_RD: assignment a has row a / (A / R).
        expert_A: int32; E and more are nowhere and give zeros.
    """
    return _call("jserve.expert_product.v1", (expert_A.size, w_END.shape[1]))(
        x_RD.astype(jnp.float32), w_END, expert_A, level=level_number()
    )


def expert_gate_up(x_RD: jax.Array, w_ZFD: jax.Array, expert_A: jax.Array) -> jax.Array:
    """float32[A, F]: ``gate_up`` likewise; ``w_ZFD`` has gate, then up, of each expert in turn."""
    return _call("jserve.expert_gate_up.v1", (expert_A.size, w_ZFD.shape[1]))(
        x_RD.astype(jnp.float32), w_ZFD, expert_A, level=level_number()
    )


HEAD_MULTIPLE, MOST_HEAD, MOST_GROUP, PAGE_MULTIPLE = 32, 256, 16, 16
"""The cases of attention that the kernel takes: heads of so many values, query heads of a kv head, tokens of a
page."""


def attends(pool: jax.Array, G: int) -> bool:
    """True if the kernels in use attend to KV kept like ``pool`` [P, K, Z, H], with ``G`` query heads a kv
    head."""
    Z, H = pool.shape[2:]
    fits = H % HEAD_MULTIPLE == 0 and H <= MOST_HEAD and G <= MOST_GROUP and Z % PAGE_MULTIPLE == 0
    return has_attention(kernels.value) and pool.dtype == jnp.uint16 and fits


def has_attention(level: str) -> bool:
    return level in LEVELS[1:]


class Rows(NamedTuple):
    """The rows of a step, as attention reads them."""

    page_table_RM: jax.Array
    start_R: jax.Array
    """int32: position of a row's first token."""
    count_R: jax.Array
    """int32: its tokens; 0: the row is unused."""
    first_R: jax.Array
    """int32: number of its first token in the step."""


def attention(
    q_TNH: jax.Array,
    kv: tuple[jax.Array, jax.Array],
    rows: Rows,
    *,
    scale: float,
    window: int,
    far_TNH: jax.Array | None,
    n_sinks: int,
) -> jax.Array:
    """float32[T, N, H] of the tokens of all rows, each of which sees its row up to itself; zeros for tokens of none.

    Args:
        kv: keys and values [P, K, Z, H], bits of bfloat16.
        window: newest positions that a token sees; 0: all.
        far_TNH: queries that meet the first ``n_sinks`` positions from beyond the window.
    """
    far = [] if far_TNH is None else [far_TNH.astype(jnp.float32)]
    return _call("jserve.attention.v2", q_TNH.shape)(
        q_TNH.astype(jnp.float32),
        *kv,
        *rows,
        *far,
        level=level_number(),
        scale=np.float32(scale),
        window=np.int64(window),
        sinks=np.int64(n_sinks),
    )


def write_kv(
    kv: tuple[jax.Array, jax.Array],
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """``kv`` with the tokens' keys and values in their places, rounded to bfloat16; in place where it is donated. What
    goes to page 0, or to a page that does not exist, is written nowhere."""
    call = jax.ffi.ffi_call(
        "jserve.write_kv.v1",
        [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in kv],
        input_output_aliases={0: 0, 1: 1},
    )
    k_TKH, v_TKH = (x.astype(jnp.float32) for x in (k_TKH, v_TKH))
    keys, values = call(*kv, k_TKH, v_TKH, page_T, offset_T)
    return keys, values


def level_number() -> np.int64:
    """Of the kernels in use, as these take it."""
    return np.int64(LEVELS.index(kernels.value))


def _call(name: str, shape: tuple[int, ...]) -> Any:
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, jnp.float32))
