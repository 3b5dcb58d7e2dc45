"""Quantises a matrix that a checkpoint has in 16 or 32 bits.

It owns how a scale is chosen: from the largest weight of a group (``rtn``), or from the clip of it that leaves the
least squared error (``mse``). Rows are independent of each other, so shards of them agree.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jserve.model.quant import KINDS, LARGEST, Form, QTensor
from jserve.model.shard import ParamSpec, ShardRules, shardings
from jserve.weights.quant.matrix import Matrix, packed

METHODS = ("rtn", "mse")
CLIPS = 20
"""Clips that ``mse`` tries, each a hundredth of the largest weight less."""


def quantised(w_ND: np.ndarray, form: Form) -> Matrix:
    """``w_ND`` in this form; D is a multiple of its group."""
    q, scale = _program(jnp.asarray(w_ND), form)
    return Matrix(q=np.asarray(q), scale=np.asarray(scale))


def quantised_tree(params: Any, specs: Any, mesh: Mesh, rules: ShardRules) -> Any:
    """A tree of parameters in the type of the model as ``specs`` want them, a QTensor where they have one.

    One parameter at a time, on its devices. A caller that keeps no reference to ``params`` has one matrix at a time
    in memory twice, else all of them.
    """
    flat, structure = jax.tree.flatten(specs, is_leaf=_is_leaf)
    given = jax.tree.leaves(params)
    del params
    made = []
    for i, spec in enumerate(flat):
        array, given[i] = given[i], None
        made.append(_placed(array, spec, mesh, rules) if isinstance(spec, QTensor) else array)
        del array
    return jax.tree.unflatten(structure, made)


def as_tensor(w: jax.Array, form: Form) -> QTensor:
    """A matrix, of any number of leading dimensions, in this form; traceable."""
    *rows, D = w.shape
    q, scale = _program(w.reshape(-1, D), form.made_as or form)
    q = packed(q) if form.kind == "int4" else q
    scale = jnp.repeat(scale, form.groups(D) // scale.shape[1], axis=1)
    return QTensor(q=q.reshape(*rows, -1), scale=scale.reshape(*rows, -1), zero=None, form=form)


def _placed(array: jax.Array, spec: QTensor, mesh: Mesh, rules: ShardRules) -> QTensor:
    how = jax.jit(as_tensor, static_argnums=1, out_shardings=shardings(spec, mesh, rules))
    return jax.block_until_ready(how(array, spec.form))


def _is_leaf(x: Any) -> bool:
    return isinstance(x, QTensor | ParamSpec)


@partial(jax.jit, static_argnums=1)
def _program(w_ND: jax.Array, form: Form) -> tuple[jax.Array, jax.Array]:
    """(int8[N, D] or e4m3, float32[N, groups])."""
    assert form.method in METHODS, "a form of a checkpoint is not made"
    (N, D), kind, groups = w_ND.shape, form.kind, form.groups(w_ND.shape[1])
    w_NBG = w_ND.astype(jnp.float32).reshape(N, groups, D // groups)
    most_NB = jnp.max(jnp.abs(w_NBG), axis=-1)
    most_NB = jnp.where(most_NB == 0, 1.0, most_NB)
    clip_NB = most_NB if form.method == "rtn" else _best_clip(w_NBG, most_NB, kind)
    scale_NB = clip_NB / LARGEST[kind]
    whole = KINDS[kind] if kind == "e4m3" else jnp.int8
    return to_grid(w_NBG / scale_NB[..., None], kind).astype(whole).reshape(N, D), scale_NB


def to_grid(x: jax.Array, kind: str) -> jax.Array:
    """float32: ``x`` in units of its scale, at the nearest number that the kind has."""
    top = LARGEST[kind]
    if kind == "e4m3":
        return jnp.clip(x, -top, top).astype(KINDS[kind]).astype(jnp.float32)
    return jnp.clip(jnp.round(x), -top - 1 if kind == "int4" else -top, top)


def _best_clip(w_NBG: jax.Array, most_NB: jax.Array, kind: str) -> jax.Array:
    def tried(i: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        clip_NB = most_NB * (1.0 - i / 100.0)
        scale = (clip_NB / LARGEST[kind])[..., None]
        error_NB = jnp.sum((to_grid(w_NBG / scale, kind) * scale - w_NBG) ** 2, axis=-1)
        better = error_NB < best[1]
        return jnp.where(better, clip_NB, best[0]), jnp.where(better, error_NB, best[1])

    start = (most_NB, jnp.full(most_NB.shape, jnp.inf, jnp.float32))
    return lax.fori_loop(0, CLIPS + 1, tried, start)[0]
