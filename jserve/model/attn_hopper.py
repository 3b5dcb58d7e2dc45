"""Paged attention with the Pallas kernels for Hopper: one kernel for decode rows, one for prefill rows, and of both
kinds one over latents.

It owns the way from a step to the kernels' arguments. A layer's keys are [P, K, Z, H] (``kv_pool``) in bfloat16,
float16 or e4m3, or int8 with a scale each (``kv_apart``), so a kv head's share of a page is one contiguous run. The
step picks kernels by what the bucket holds::

    T   |d0 d0 d1 d1 ...           |f0 f0 f0 f0 f1 f1 pad|
          paged_attention [D, J]     ragged_prefill [P]         a part of no tokens has no kernel
          mla_attention [D, J]       mla_chunks [P]             over latents, absorbed (``attn_latent``)

Needs jax 0.11 or later and the wheel's kernels; on a CPU the Mosaic interpreter runs them, far too
slowly for anything but tests.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.model import moe_hopper
from jserve.model.arch import Attention, Latent
from jserve.model.attention import (
    AttendArgs,
    AttentionBackend,
    ExpertKernel,
    KVStored,
    LatentArgs,
    LayerKV,
)
from jserve.model.attn_dense import DENSE
from jserve.model.attn_latent import absorbed, with_values
from jserve.model.draft_tree import DraftMask, TreeShape
from jserve.model.kv_apart import INT8, SERVED, read_by_kernels, widths, write_kv
from jserve.model.kv_bytes import BYTES
from jserve.model.kv_pool import kv_shape, move
from jserve.model.kv_quant import E4M3
from jserve.model.view import StepView
from pallas_kernels.launch import interpreter
from pallas_kernels.mla_attention import (
    LatentPages,
    LatentSpec,
    mla_attention,
    mla_chunks,
    unserved as unserved_latents,
)
from pallas_kernels.paged_attention import Tree, paged_attention
from pallas_kernels.ragged_prefill import ragged_prefill
from pallas_kernels.served import HEAD_DIMS, LEAST_PAGE, WIDEST_SPECIAL
from pallas_kernels.spec import AttentionSpec, Chunks, Rows


def kv_dtype(dtype: Any) -> Any:
    """The type that values of ``dtype`` are stored as: as they are if they have 8 or 16 bits, else in bfloat16."""
    kept = (E4M3, jnp.float16, BYTES)
    return jnp.dtype(dtype if dtype in kept else jnp.bfloat16)


def attend(args: AttendArgs, kv: LayerKV, view: StepView, *, interpret: Any = None) -> jax.Array:
    """``args.o_dtype``[T, N, H]; zero for unused rows and prefill padding. The kernels begin at the first block
    that a window reaches into, and blank what lies before it."""
    assert args.sinks is None, "refused at start: the kernels know one query per token"
    assert view.tree is None or isinstance(view.tree, DraftMask), "refused at start"
    q_TNH = args.q_TNH
    _, N, H = q_TNH.shape
    layer = read_by_kernels(kv, H)
    D, J = view.D, view.J
    spec = AttentionSpec(
        scale=args.scale, window=args.window, soft_cap=args.soft_cap, interpret=interpret
    )
    parts = []
    if D:
        o_DJNH = paged_attention(
            q_TNH[: D * J].reshape(D, J, N, H),
            layer._replace(table_RM=placed(view.page_table_RM[:D])),
            Rows(placed(view.start_R[:D]), placed(view.kv_len_R[:D])),
            spec,
            sinks_N=args.sink_logits_N,
            tree=None if view.tree is None else Tree(view.tree.sees, view.tree.depth),
            dtype=args.o_dtype,
        )
        parts.append(o_DJNH.reshape(D * J, N, H))
    if view.P:
        o_PNH = ragged_prefill(
            q_TNH[D * J :],
            layer._replace(table_RM=placed(view.page_table_RM[D:])),
            Chunks(view.first_R[D:] - D * J, placed(view.start_R[D:]), placed(view.count_R[D:])),
            spec,
            sinks_N=args.sink_logits_N,
        )
        parts.append(o_PNH.astype(args.o_dtype))
    return jnp.concatenate(parts)


def attend_latent(
    args: LatentArgs, pool_PZC: jax.Array, view: StepView, *, interpret: Any = None
) -> jax.Array:
    """float32[T, N, V]; zero for padding tokens. Absorbed, whatever the step: chunks of any length meet latents as they
    are kept."""
    assert view.tree is None, "refused at start"
    D, J, n, parts = view.D, view.J, view.D * view.J, []
    # ``absorbed`` scales the queries.
    spec = LatentSpec(rank=args.k_up_NHA.shape[2], scale=1.0, interpret=interpret)
    if D:
        q_TNC = absorbed(args, slice(0, n))
        o_DJNA = mla_attention(
            q_TNC.reshape(D, J, *q_TNC.shape[1:]),
            LatentPages(pool_PZC, placed(view.page_table_RM[:D])),
            Rows(placed(view.start_R[:D]), placed(view.kv_len_R[:D])),
            spec,
            dtype=args.v_up_NVA.dtype,
        )
        parts.append(with_values(args, o_DJNA.reshape(n, *o_DJNA.shape[2:])))
    if view.P:
        first_F = view.first_R[D:] - n
        o_PNA = mla_chunks(
            absorbed(args, slice(n, None)),
            LatentPages(pool_PZC, placed(view.page_table_RM[D:])),
            Chunks(first_F, placed(view.start_R[D:]), placed(view.count_R[D:])),
            spec,
        )
        parts.append(with_values(args, o_PNA))
    # Nobody writes the rows of padding, which are no sequence's.
    return jnp.where((view.pos_T >= 0)[:, None, None], jnp.concatenate(parts), 0.0)


def placed(numbers: jax.Array) -> jax.Array:
    """The same numbers, none of them negative, with a place of their own. A part of another array (the step's buffer,
    or what all rows have) would have XLA wrap the call in a dynamic-slice fusion, a node of the graph that is updated
    every step."""
    return jnp.maximum(numbers, 0)


def check(layer: Attention, stored: KVStored, tree: TreeShape) -> None:
    """Refuse what the kernels do not do, by the name of the option that asks for it."""
    H = layer.H
    if stored.form and stored.form not in SERVED:
        raise ConfigError(
            f"kv_cache_dtype: attention_backend hopper does not serve KV in {stored.form}, dense does",
            field="kv_cache_dtype",
        )
    if stored.form == INT8 and stored.page_size < LEAST_PAGE:
        raise ConfigError(
            f"page_size {stored.page_size}: attention_backend hopper serves kv_cache_dtype {INT8} in pages of"
            f" {LEAST_PAGE} tokens or more, dense in any",
            field="page_size",
        )
    if H not in HEAD_DIMS:
        raise ConfigError(
            f"attention_backend hopper serves heads of {HEAD_DIMS}, not {H}",
            field="attention_backend",
        )
    form = stored.form or ("fp8_e4m3" if jnp.dtype(stored.dtype).itemsize == 1 else "")
    wish = f"kv_cache_dtype {form}" if form in (INT8, "fp8_e4m3") else ""
    wish = wish or ("speculative.tree" if tree else "")
    if wish and H > WIDEST_SPECIAL:
        raise ConfigError(
            f"{wish}: attention_backend hopper serves it with heads of up to {WIDEST_SPECIAL},"
            f" not {H}",
            field=wish.partition(" ")[0],
        )


def check_latent(latent: Latent, stored_as: Any, tree: TreeShape) -> None:
    """``check`` of latent attention."""
    if jnp.dtype(stored_as).itemsize == 1:
        raise ConfigError(
            "kv_cache_dtype: attention_backend hopper serves latents of 16 bits, dense these too",
            field="kv_cache_dtype",
        )
    if tree:
        raise ConfigError(
            "speculative.tree: attention_backend hopper serves no trees over latents, dense does",
            field="speculative.tree",
        )
    if reason := unserved_latents(latent.rank, latent.width, stored_as):
        raise ConfigError(
            f"attention_backend hopper: {reason}; dense serves them", field="attention_backend"
        )


def hopper(platform: str) -> AttentionBackend:
    """The backend for a platform; a CPU gets the interpreter.

    Raises:
        ConfigError: this jax is too old for the kernels.
    """
    interpret = _interpreter(platform, "hopper")
    return AttentionBackend(
        name="hopper",
        kv_axis=1,
        kv_shape=kv_shape,
        kv_dtype=kv_dtype,
        widths=widths,
        write_kv=write_kv,
        move=move,
        has_sinks=False,
        has_chunks=False,
        check=check,
        check_latent=check_latent,
        attend=partial(attend, interpret=interpret),
        attend_latent=partial(attend_latent, interpret=interpret),
        experts=_experts(interpret),
    )


def dense_experts(platform: str) -> AttentionBackend:
    """``dense`` with the kernel for experts: for models whose attention the kernels do not serve.

    Raises:
        ConfigError: as ``hopper``.
    """
    name = "dense_experts"
    experts = _experts(_interpreter(platform, name))
    return dataclasses.replace(DENSE, name=name, experts=experts, for_experts=True)


def _experts(interpret: Any) -> ExpertKernel:
    form = partial(moe_hopper.grouped, interpret=interpret)
    return ExpertKernel(serves=moe_hopper.serves, form=form)


def _interpreter(platform: str, name: str) -> Any:
    if jax.__version_info__ < (0, 11):
        raise ConfigError(
            f"attention_backend {name!r} needs jax 0.11 or later, this is {jax.__version__}",
            field="attention_backend",
        )
    return interpreter() if platform == "cpu" else None
