"""Runs a step by hand, from model to packed buffer: for research scripts and tests.

The runner has its own, faster packer; a step cannot tell them apart. Every row here decodes greedily; set other
fields through ``view.numpy_views``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jserve.model.arch import Arch
from jserve.model.attention import AttentionBackend, backend
from jserve.model.families import family_for
from jserve.model.family import Family
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.model.step import StepModel
from jserve.model.view import Bucket, StepDims, buffer_size, layout, numpy_views


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step: its page ids, the position of its first token, its tokens.

    ``start`` -1 and token -1 mean the slot's own length and last token, as the step before left them.
    """

    pages: Sequence[int]
    start: int
    tokens: Sequence[int]
    slot: int | None = None
    """Row of the slot state; by default the row's own number."""


def step_model(
    config: Mapping[str, Any],
    *,
    slots: int = 2,
    row_pages: int = 4,
    page_size: int = 16,
    mesh: Mesh | None = None,
    rules: ShardRules | None = None,
    attention: str = "xla",
    dtype: Any = jnp.float32,
) -> StepModel:
    """Returns the part that all steps of a model share, for a pool where all slots have ``row_pages`` pages of
    ``page_size`` tokens (page 0 is scratch).

    Args:
        config: a config.json as a mapping.
        mesh: by default the first device.
        dtype: of weights, activations and KV.

    Raises:
        ConfigError: the model, the rules or the attention backend is not supported.
    """
    family = family_for(config)
    return step_model_of(
        family,
        family.arch(config),
        slots=slots,
        row_pages=row_pages,
        page_size=page_size,
        mesh=mesh,
        rules=rules,
        attention=attention,
        dtype=dtype,
    )


def step_model_of(
    family: Family,
    arch: Arch,
    *,
    slots: int = 2,
    row_pages: int = 4,
    page_size: int = 16,
    mesh: Mesh | None = None,
    rules: ShardRules | None = None,
    attention: str = "xla",
    dtype: Any = jnp.float32,
) -> StepModel:
    """``step_model`` of a family and what it made of a config."""
    attn = backend(attention)
    return StepModel(
        family=family,
        arch=arch,
        backend=attn,
        dims=StepDims(C=slots, M=row_pages, Z=page_size, V=arch.V),
        mesh=mesh or make_mesh(1),
        rules=rules or ShardRules(),
        n_pages=1 + slots * row_pages,
        kv_dtype=attn.kv_dtype(dtype),
        dtype=jnp.dtype(dtype),
    )


def pack(
    bucket: Bucket,
    dims: StepDims,
    attn: AttentionBackend,
    decode: Sequence[Row],
    prefill: Sequence[Row],
) -> np.ndarray:
    """int32 buffer of a step that runs these rows; decode rows have ``bucket.J`` tokens or fewer.

    Raises:
        ValueError: the rows do not fit the bucket.
    """
    n_tokens = sum(len(row.tokens) for row in prefill)
    if len(decode) > bucket.D or len(prefill) > bucket.F or n_tokens > bucket.P:
        raise ValueError(f"{len(decode)} and {len(prefill)} rows, {n_tokens} tokens: not {bucket}")
    fields = layout(bucket, dims, attn.plan_shapes(bucket, dims))
    buf = np.zeros(buffer_size(fields), np.int32)
    v = numpy_views(buf, fields)
    v["slot_R"][:] = dims.C
    v["row_T"][:] = bucket.R
    v["stop_RS"][:] = -1
    for name in ("temperature_R", "top_p_R", "repetition_R"):
        v[name][:] = 0.0 if name == "temperature_R" else 1.0
    v["n_decode"][()], v["n_prefill"][()] = len(decode), len(prefill)
    firsts = [r * bucket.J for r in range(len(decode))]
    firsts += [
        bucket.D * bucket.J + sum(len(p.tokens) for p in prefill[:i]) for i in range(len(prefill))
    ]
    numbers = [*range(len(decode)), *range(bucket.D, bucket.D + len(prefill))]
    for r, first, row in zip(numbers, firsts, (*decode, *prefill), strict=True):
        n = len(row.tokens)
        v["slot_R"][r] = r if row.slot is None else row.slot
        v["start_R"][r], v["count_R"][r], v["first_R"][r], v["emit_R"][r] = row.start, n, first, 1
        v["tok_T"][first : first + n], v["row_T"][first : first + n] = row.tokens, r
        v["page_table_RM"][r, : len(row.pages)] = row.pages
    attn.plan(v, bucket, dims)
    return buf
