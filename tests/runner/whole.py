"""Logits of a whole text in one go, through family.forward on a cache of its own: the runner's
oracle."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model.attention import backend
from jserve.model.ctx import Ctx
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.shard import Axes
from jserve.model.slots import empty
from jserve.model.view import Bucket, StepDims, buffer_size, layout, numpy_views, unpack
from tests.runner.harness import ARCH

DIMS = StepDims(C=1, M=16, Z=8, V=ARCH.V)
BUCKET = Bucket(D=0, P=128, F=1)


@lru_cache(maxsize=1)
def _whole() -> Any:
    attn = backend("ref")
    fields = layout(BUCKET, DIMS, attn.plan_shapes(BUCKET, DIMS))

    def logits(params: Any, buf: jax.Array) -> jax.Array:
        view = unpack(buf, fields, BUCKET, DIMS, empty(1, ARCH.V))
        shape = attn.kv_shape(ARCH.K, ARCH.H, 17, DIMS.Z)
        kv = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(ARCH.L)]
        x_TD, _ = LLAMA.forward(Ctx.of(ARCH, view, attn, Axes()), params, kv)
        return LLAMA.logits(ARCH, params, x_TD, Axes())

    return jax.jit(logits), fields


def all_logits(params: Any, tokens: Seq[int]) -> np.ndarray:
    """float32[len(tokens), V]."""
    run, fields = _whole()
    buf = np.zeros(buffer_size(fields), np.int32)
    v = numpy_views(buf, fields)
    n = len(tokens)
    v["row_T"][:] = BUCKET.R
    v["row_T"][:n], v["tok_T"][:n] = 0, tokens
    v["count_R"][0], v["emit_R"][0], v["n_prefill"][...] = n, 1, 1
    v["page_table_RM"][0] = 1 + np.arange(DIMS.M)
    backend("ref").plan(v, BUCKET, DIMS)
    return np.asarray(run(params, buf))[:n]


def next_logits(params: Any, tokens: Seq[int]) -> np.ndarray:
    return all_logits(params, tokens)[-1]


def greedy(params: Any, prompt: Seq[int], n: int) -> list[int]:
    """n greedy tokens, the whole text run anew for each."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(np.argmax(next_logits(params, tokens))))
    return tokens[len(prompt) :]
