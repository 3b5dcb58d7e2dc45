"""Quantises a matrix that a checkpoint has in 16 or 32 bits.

It owns how a scale is chosen: from the largest weight of a group (``rtn``), from the clip of it that leaves the least
squared error (``mse``), or from there on by half-quadratic steps, which let few weights err much (``hqq``). Rows are
independent of each other, so shards of them agree.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jserve.model.param_spec import ParamSpec
from jserve.model.quant import KINDS, LARGEST, Form, QTensor
from jserve.model.shard import ShardRules, shardings
from jserve.weights.quant.matrix import packed

METHODS = ("rtn", "mse", "hqq")
CLIPS = 20
"""Clips that ``mse`` tries, each a hundredth of the largest weight less."""
STEPS, POWER, BETA, GROWTH = 20, 0.7, 10.0, 1.05
"""Of ``hqq``: steps, the power of an error that is summed, how strongly errors are kept at first, and by what factor
more a step later."""


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
        made.append(quantised(array, spec, mesh, rules))
        del array
    return jax.tree.unflatten(structure, made)


def quantised(
    array: jax.Array, spec: ParamSpec | QTensor, mesh: Mesh, rules: ShardRules
) -> jax.Array | QTensor:
    """A parameter in the type of the model as its spec wants it: as it is, or quantised where it lies."""
    if not isinstance(spec, QTensor):
        return array
    how = jax.jit(as_tensor, static_argnums=1, out_shardings=shardings(spec, mesh, rules))
    return jax.block_until_ready(how(array, spec.form))


def as_tensor(w: jax.Array, form: Form) -> QTensor:
    """A matrix, of any number of leading dimensions, in this form; traceable."""
    *rows, D = w.shape
    q, scale = _program(w.reshape(-1, D), form.made_as or form)
    q = packed(q) if form.kind == "int4" else q
    scale = jnp.repeat(scale, form.groups(D) // scale.shape[1], axis=1)
    return QTensor(q=q.reshape(*rows, -1), scale=scale.reshape(*rows, -1), zero=None, form=form)


def _is_leaf(x: Any) -> bool:
    return isinstance(x, QTensor | ParamSpec)


@partial(jax.jit, static_argnums=1)
def _program(w_ND: jax.Array, form: Form) -> tuple[jax.Array, jax.Array]:
    """(int8[N, D] or e4m3, float32[N, groups])."""
    assert form.method in METHODS, "a form of a checkpoint is not made"
    scale_NB = scales_of(w_ND, form)
    return numbers_of(w_ND, scale_NB, form), scale_NB


@partial(jax.jit, static_argnums=1)
def scales_of(w_ND: jax.Array, form: Form) -> jax.Array:
    """float32[N, groups]: the scales that ``form.method`` chooses."""
    w_NBG, kind = _in_groups(w_ND, form), form.kind
    most_NB = jnp.max(jnp.abs(w_NBG), axis=-1)
    most_NB = jnp.where(most_NB == 0, 1.0, most_NB)
    if form.method == "rtn":
        return most_NB / LARGEST[kind]
    scale_NB = _best_clip(w_NBG, most_NB, kind) / LARGEST[kind]
    return half_quadratic(w_NBG, scale_NB, kind) if form.method == "hqq" else scale_NB


@partial(jax.jit, static_argnums=2)
def numbers_of(w_ND: jax.Array, scale_NB: jax.Array, form: Form) -> jax.Array:
    """int8[N, D] or e4m3: the nearest numbers under these scales."""
    whole = KINDS[form.kind] if form.kind == "e4m3" else jnp.int8
    q_NBG = to_grid(_in_groups(w_ND, form) / scale_NB[..., None], form.kind)
    return q_NBG.astype(whole).reshape(w_ND.shape)


def _in_groups(w_ND: jax.Array, form: Form) -> jax.Array:
    N, D = w_ND.shape
    return w_ND.astype(jnp.float32).reshape(N, form.groups(D), -1)


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


def half_quadratic(w_NBG: jax.Array, scale_NB: jax.Array, kind: str) -> jax.Array:
    """float32[N, B]: scales from ``scale_NB`` on by half-quadratic steps (HQQ; there the zero moves, here the scale).

    In turns, ``q`` is the nearest number, ``e`` the error without its small part (the proximal operator of the sum of
    ``|error| ** POWER``), and the scale the best one, by least squares, of ``w - e``. The best scale of all steps by
    that sum stays.
    """

    def loss(scale_NB: jax.Array) -> jax.Array:
        scale = scale_NB[..., None]
        return jnp.sum(jnp.abs(to_grid(w_NBG / scale, kind) * scale - w_NBG) ** POWER, axis=-1)

    def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        now_NB, best_NB, least_NB = carry
        q_NBG = to_grid(w_NBG / now_NB[..., None], kind)
        error_NBG = w_NBG - q_NBG * now_NB[..., None]
        size_NBG = jnp.abs(error_NBG) / scale_NB[..., None]
        beta = BETA * GROWTH**i
        kept_NBG = jnp.maximum(size_NBG - jnp.maximum(size_NBG, 1e-6) ** (POWER - 1) / beta, 0.0)
        target_NBG = w_NBG - jnp.sign(error_NBG) * kept_NBG * scale_NB[..., None]
        square_NB = jnp.sum(q_NBG * q_NBG, axis=-1)
        fitted_NB = jnp.sum(target_NBG * q_NBG, axis=-1) / jnp.maximum(square_NB, 1e-12)
        now_NB = jnp.where(fitted_NB > 0, fitted_NB, now_NB)
        found_NB = loss(now_NB)
        better = found_NB < least_NB
        return now_NB, jnp.where(better, now_NB, best_NB), jnp.where(better, found_NB, least_NB)

    return lax.fori_loop(0, STEPS, step, (scale_NB, scale_NB, loss(scale_NB)))[1]
