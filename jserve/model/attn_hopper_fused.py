"""``hopper`` with kernels for the rest of a decode layer: off until ``bench.gpu`` has measured them.

It owns the way from a decode layer to the arguments of ``kv_write`` and ``add_norm``. Steps with chunks, drafts or
KV of 8 bits are those of ``hopper``.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jserve.model.attention import AttentionBackend, DecodeKernels, LayerKV, Projected
from jserve.model.attn_hopper import hopper, placed
from jserve.model.kv_pool import NOBODY
from jserve.model.view import StepView
from pallas_kernels.add_norm import add_norm, serves as serves_rows
from pallas_kernels.kv_write import Angles, Places, kv_write
from pallas_kernels.launch import interpreter
from pallas_kernels.paged_attention import paged_attention_of_heads, q_rows_of
from pallas_kernels.spec import AttentionSpec, Pages, Rows


def attend(
    x: Projected, kv: LayerKV, view: StepView, *, interpret: Any = None
) -> tuple[jax.Array, LayerKV]:
    """(o_TNH in the dtype of the pool, kv): two kernels of attention after one that writes."""
    G = x.y_STKCH.shape[3] - 2
    n_pages = kv[0].shape[0]
    real_T = (view.pos_T >= 0) & (view.write_page_T < n_pages)
    page_T = jnp.where(real_T, view.write_page_T, NOBODY)
    q_TKQH, *written = kv_write(
        x.y_STKCH,
        Angles(x.tables[0][:, 0], x.tables[1][:, 1]),
        Places(page_T, view.write_off_T),
        (kv[0], kv[1]),
        bias_KCH=x.bias_KCH,
        norms=x.norms,
        eps=x.eps,
        q_rows=q_rows_of(G),
        interpret=interpret,
    )
    keys, values = written
    pages = Pages(keys, values, placed(view.page_table_RM))
    spec = AttentionSpec(scale=x.scale, window=x.window, interpret=interpret)
    rows = Rows(view.start_R, view.kv_len_R)
    o_TNH = paged_attention_of_heads(q_TKQH, G, pages, rows, spec, keys.dtype)
    return o_TNH, (keys, values)


def serves(D: int, H: int, dtype: Any, kv_dtype: Any) -> bool:
    """Pools of 16 bits, of the type of the weights."""
    return serves_rows(D) and jnp.dtype(kv_dtype).itemsize == 2 and dtype == kv_dtype


def hopper_fused(platform: str) -> AttentionBackend:
    """The backend for a platform; a CPU gets the interpreter.

    Raises:
        ConfigError: this jax is too old for the kernels.
    """
    interpret = interpreter() if platform == "cpu" else None
    kernels = DecodeKernels(
        serves=serves,
        attend=partial(attend, interpret=interpret),
        add_norm=partial(add_norm, interpret=interpret),
    )
    return dataclasses.replace(hopper(platform), name="hopper_fused", decode=kernels)
