"""Paged attention with the Pallas kernels for Hopper: one kernel for decode rows, one for prefill rows.

It owns the KV layout the kernels read and the way from a step to their arguments. A layer's keys are [P, K, Z, H]
in bfloat16, float16 or e4m3, so a kv head's share of a page is one contiguous run, which is what a bulk copy wants.
The step picks kernels by what the bucket holds::

    T   |d0 d0 d1 d1 ...           |f0 f0 f0 f0 f1 f1 pad|
          paged_attention [D, J]     ragged_prefill [P]         a part of no tokens has no kernel

Needs jax 0.11 or later and the wheel's kernels; on a CPU the Mosaic interpreter runs them, far too
slowly for anything but tests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.model.attention import AttendArgs, AttentionBackend, LayerKV, Places
from jserve.model.draft_tree import DraftMask, TreeShape
from jserve.model.kv_quant import E4M3, stored
from jserve.model.view import StepView
from jserve.types import Grown
from pallas_kernels.launch import interpreter
from pallas_kernels.paged_attention import Tree, paged_attention
from pallas_kernels.ragged_prefill import ragged_prefill
from pallas_kernels.served import HEAD_DIMS, WIDEST_SPECIAL

NOBODY = -1
"""Page of what is written nowhere."""


def kv_shape(K: int, H: int, n_pages: int, page_size: int) -> tuple[int, ...]:
    return (n_pages, K, page_size, H)


def kv_dtype(dtype: Any) -> Any:
    """How values of ``dtype`` are stored: as they are if they have 8 or 16 bits, else in bfloat16."""
    kept = (E4M3, jnp.float16)
    return jnp.dtype(dtype if dtype in kept else jnp.bfloat16)


def write_kv(kv: LayerKV, k_TKH: jax.Array, v_TKH: jax.Array, view: StepView) -> LayerKV:
    """Scatter each token's key and value to its page and offset; padding writes nothing.

    The pool is seen as rows of H, so that XLA scatters along its first dimension and has nothing to
    transpose. No two tokens share a place, and XLA is told so: it would otherwise write 16-bit
    values by compare-and-swap.
    """
    page_T = jnp.where(view.pos_T >= 0, view.write_page_T, NOBODY)
    row_TK = _rows(kv[0], (page_T, view.write_off_T))
    return _put(kv[0], row_TK, k_TKH), _put(kv[1], row_TK, v_TKH)


def move(kv: LayerKV, old: Places, new: Places) -> LayerKV:
    """Copy entries to other places; those of page 0 belong to no token, and stay."""
    to_A = jnp.where(new[0] > 0, new[0], NOBODY)
    old_AK, new_AK = _rows(kv[0], old), _rows(kv[0], (to_A, new[1]))

    def one(pool: jax.Array) -> jax.Array:
        return _put(pool, new_AK, pool.reshape(-1, pool.shape[-1])[old_AK])

    return one(kv[0]), one(kv[1])


def _rows(pool_PKZH: jax.Array, places: Places) -> jax.Array:
    """int32[A, K]: where the heads of entries lie in the pool seen as rows of H; past its end for
    page ``NOBODY``."""
    P, K, Z, _ = pool_PKZH.shape
    page_A1, off_A1 = (x[:, None] for x in places)
    row_AK = (page_A1 * K + jnp.arange(K, dtype=jnp.int32)) * Z + off_A1
    return jnp.where(page_A1 == NOBODY, P * K * Z, row_AK)


def _put(pool: jax.Array, row_AK: jax.Array, x_AKH: jax.Array) -> jax.Array:
    rows = pool.reshape(-1, pool.shape[-1]).at[row_AK]
    new = rows.set(stored(x_AKH, pool.dtype), mode="drop", unique_indices=True)
    return new.reshape(pool.shape)


def attend(args: AttendArgs, kv: LayerKV, view: StepView, *, interpret: Any = None) -> jax.Array:
    """float32[T, N, H]; zero for unused rows and prefill padding. The kernels begin at the first block
    that a window reaches into, and blank what lies before it."""
    assert args.sinks is None, "refused at start: the kernels know one query per token"
    assert view.tree is None or isinstance(view.tree, DraftMask), "refused at start"
    q_TNH = args.q_TNH
    _, N, H = q_TNH.shape
    D, J = view.D, view.J
    options: dict[str, Any] = {
        "window": args.window,
        "scale": args.scale,
        "interpret": interpret,
    }
    parts = []
    if D:
        o_DJNH = paged_attention(
            q_TNH[: D * J].reshape(D, J, N, H),
            *kv,
            view.page_table_RM[:D],
            view.start_R[:D],
            view.kv_len_R[:D],
            tree=None if view.tree is None else Tree(view.tree.sees, view.tree.depth),
            **options,
        )
        parts.append(o_DJNH.reshape(D * J, N, H))
    if view.P:
        o_PNH = ragged_prefill(
            q_TNH[D * J :],
            *kv,
            view.page_table_RM[D:],
            view.first_R[D:] - D * J,
            view.start_R[D:],
            view.count_R[D:],
            **options,
        )
        parts.append(o_PNH.astype(jnp.float32))
    return jnp.concatenate(parts)


def check(H: int, stored_as: Any, tree: TreeShape) -> None:
    """Refuse what the kernels do not do, by the name of the option that asks for it."""
    if isinstance(tree, Grown):
        raise ConfigError(
            "speculative.tree: attention_backend hopper serves trees of a fixed shape, not 'dynamic';"
            " xla does",
            field="speculative.tree",
        )
    if H not in HEAD_DIMS:
        raise ConfigError(
            f"attention_backend hopper serves heads of {HEAD_DIMS}, not {H}",
            field="attention_backend",
        )
    wish = "kv_cache_dtype fp8_e4m3" if jnp.dtype(stored_as).itemsize == 1 else ""
    wish = wish or ("speculative.tree" if tree else "")
    if wish and H > WIDEST_SPECIAL:
        raise ConfigError(
            f"{wish}: attention_backend hopper serves it with heads of up to {WIDEST_SPECIAL},"
            f" not {H}",
            field=wish.partition(" ")[0],
        )


def hopper(platform: str) -> AttentionBackend:
    """The backend for a platform; a CPU gets the interpreter.

    Raises:
        ConfigError: this jax is too old for the kernels.
    """
    if jax.__version_info__ < (0, 11):
        raise ConfigError(
            f"attention_backend 'hopper' needs jax 0.11 or later, this is {jax.__version__}",
            field="attention_backend",
        )
    return AttentionBackend(
        name="hopper",
        kv_axis=1,
        kv_shape=kv_shape,
        kv_dtype=kv_dtype,
        write_kv=write_kv,
        move=move,
        has_sinks=False,
        check=check,
        attend=partial(attend, interpret=interpreter() if platform == "cpu" else None),
    )
