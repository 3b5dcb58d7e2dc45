"""Steps of well-known models as shapes, for compiling without a device."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jserve.model.arch import Arch
from jserve.model.attention import backend
from jserve.model.families import family_for
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.model.step import StepModel
from jserve.model.view import StepDims
from jserve.shapes import SHAPES
from pallas_kernels import aot

MODELS = (
    "llama-3.2-1b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "qwen2.5-7b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
    "llama-4-scout",
)
ARCHS = {name: family_for(SHAPES[name]).arch(SHAPES[name]) for name in MODELS}
FAMILIES = {family.name: family for family in map(family_for, SHAPES.values())}


def step_model(
    arch: Arch,
    *,
    tp: int = 1,
    ep: int = 1,
    n_pages: int = 2048,
    C: int = 256,
    kv_dtype: Any = jnp.bfloat16,
    attention: str = "hopper",
) -> StepModel:
    """A step over described H200s; KV of ``n_pages`` pages of 64 tokens, 8192 tokens a row. With ``ep`` experts lie on
    different devices and move."""
    attn = backend(attention, "cuda")
    mesh = make_mesh(tp, aot.h200(tp * ep), ep)
    return StepModel(
        family=FAMILIES[arch.family],
        arch=arch,
        backend=attn,
        dims=StepDims(C=C, M=128, Z=64, V=arch.V, n_vocab_rows=64),
        mesh=mesh,
        rules=ShardRules.of_mesh(mesh.shape, ep if ep > 1 else 0),
        experts=ep > 1,
        n_pages=n_pages,
        kv_dtype=attn.kv_dtype(kv_dtype),
        dtype=jnp.bfloat16,
    )
