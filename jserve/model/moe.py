"""Mixture of experts: which experts a token goes to, and their products over the tokens that chose them.

A token's choices are assignments, A = T * X of them in a step. None is dropped, however many choose one expert, and
padding tokens choose expert E, which is nowhere::

    route      x_TD -> expert_TX, weight_TX
    a form     x_TD, expert_TX -> each assignment's output, and where it is     of ``FORMS``, or the backend's kernel
    combine    weight * output, added over X in the router's order              y_TD

So a token's result does not depend on the tokens beside it. A device that has some of the experts sends the
assignments of all others nowhere (``moe_places``), and the sum over devices puts a token's outputs together. The
parameters of a layer::

    router [E, D]   router_bias, choice_bias [E]                              float32, whole on every device
    expert_gate_up [2E, F, D]   gate, then up, of each expert in turn         split over E, F or both
    expert_down [E, D, F]       row-parallel, psum over ``axes.routed``       split over E, F or both
    shared_gate_up [2, F', D]   shared_down [D, F']   shared_gate [1, D]      as of a dense MLP
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jserve.model import native, native_quant
from jserve.model.arch import Moe, Router
from jserve.model.attention import ExpertKernel
from jserve.model.ctx import Ctx
from jserve.model.dot import activated, dot, gate_up
from jserve.model.moe_places import slots_of, tokens_of_each
from jserve.model.quant import QTensor

Params = Mapping[str, Any]
"""Arrays, or QTensors of what ``dot`` multiplies."""

Outputs = tuple[jax.Array, jax.Array]
"""(float32[n, D] outputs of experts, int32[T, X] where in them each assignment's is)."""

Form = Callable[[Moe, Params, jax.Array, jax.Array, jax.Array], Outputs]
"""(layer, parameters, x_TD, expert_TX, float32[T, X] that multiplies the input) -> ``Outputs``. What it gives for
assignments to expert E is not read."""


def mixture(ctx: Ctx, p: Params, x_TD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """(float32[T, D]: what the experts of a layer, and its shared expert, make of what is normed already, int32[E]:
    the tokens of each expert, None where they are not counted)."""
    moe, pos_T = ctx.spec.ffn, ctx.view.pos_T
    assert isinstance(moe, Moe)
    expert_TX, weight_TX = route(moe.router, p, x_TD, moe.X, pos_T >= 0)
    slots = p["expert_down"].shape[0]
    slot_TX = slots_of(expert_TX, pos_T, moe.E, slots, ctx.axes.experts, ctx.places)
    held = replace(moe, E=slots)
    y_TD = routed(held, p, x_TD, slot_TX, weight_TX, ctx.attn.experts)
    down = p["expert_down"]
    if moe.shared is None:
        y_TD = ctx.summed(y_TD, ctx.axes.routed, down)
    elif ctx.axes.ffn == ctx.axes.routed:
        y_TD = ctx.summed(y_TD + _shared(moe, p, x_TD), ctx.axes.ffn, down)
    else:
        shared_TD = ctx.summed(_shared(moe, p, x_TD), ctx.axes.ffn, down)
        y_TD = ctx.summed(y_TD, ctx.axes.routed, down) + shared_TD
    if moe.expert_bias:
        y_TD = y_TD + ctx.own_tokens(_down_bias(moe, p, expert_TX, weight_TX))
    return y_TD, None if ctx.places is None else tokens_of_each(expert_TX, moe.E)


def _shared(moe: Moe, p: Params, x_TD: jax.Array) -> jax.Array:
    """The shared expert's partial sums."""
    assert moe.shared is not None
    h_TF = gate_up(x_TD, p["shared_gate_up"], activation=moe.shared.activation)
    y_TD = dot(h_TF, p["shared_down"])
    if not moe.shared_gate:
        return y_TD
    # As a product with one column XLA:CPU sums it in an order that depends on the rows.
    gate_T1 = jnp.sum(x_TD * p["shared_gate"], axis=1, keepdims=True)
    return y_TD * jax.nn.sigmoid(gate_T1)


def _down_bias(moe: Moe, p: Params, expert_TX: jax.Array, weight_TX: jax.Array) -> jax.Array:
    """Biases of the last products, which are whole on every device and added once."""
    bias_ED = p["expert_down_bias"].astype(jnp.float32)
    y_TD = jnp.zeros((expert_TX.shape[0], bias_ED.shape[1]), jnp.float32)
    for j in range(moe.X):
        weight_T = 1.0 if moe.router.on_input else weight_TX[:, j : j + 1]
        y_TD = y_TD + jnp.where(
            expert_TX[:, j : j + 1] < moe.E,
            bias_ED.at[expert_TX[:, j]].get(mode="clip") * weight_T,
            0.0,
        )
    return y_TD


# ---- the router --------------------------------------------------------------------------------


def route(
    router: Router, p: Params, x_TD: jax.Array, X: int, real_T: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(int32[T, X] experts, best first, float32[T, X] their weights). Among equals the lower number is better.

    Args:
        real_T: False: the token is padding, its experts are E.
    """
    logits_TE = _exact(x_TD, p["router"])
    if router.logit_bias:
        logits_TE = logits_TE + p["router_bias"]
    by_scores = router.choose == "scores"
    value_TE = _scores(router, logits_TE) if by_scores else logits_TE
    choice_TE = value_TE + p["choice_bias"] if router.choice_bias else value_TE
    _, expert_TX = lax.top_k(_of_best_groups(router, choice_TE), X)
    weight_TX = jnp.take_along_axis(value_TE, expert_TX, axis=1)
    weight_TX = weight_TX if by_scores else _scores(router, weight_TX)
    if router.normalise:
        # The smallest number keeps scores that are all 0 from giving NaN.
        weight_TX = weight_TX / (jnp.sum(weight_TX, axis=1, keepdims=True) + 1e-20)
    E = logits_TE.shape[1]
    return jnp.where(real_T[:, None], expert_TX, E), weight_TX * router.scale


def _exact(x_TD: jax.Array, w_ND: jax.Array) -> jax.Array:
    """``dot`` in float32, on GPUs too: a choice between near equals is decided by the last bits."""
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(x_TD, w_ND, dims, precision=lax.Precision.HIGHEST)


def _scores(router: Router, logits: jax.Array) -> jax.Array:
    if router.score == "sigmoid":
        return jax.nn.sigmoid(logits)
    return jax.nn.softmax(logits, axis=1)


def _of_best_groups(router: Router, choice_TE: jax.Array) -> jax.Array:
    """``choice_TE`` with minus infinity for the experts of all but the best groups."""
    if router.groups == 1:
        return choice_TE
    T, E = choice_TE.shape
    choice_TGS = choice_TE.reshape(T, router.groups, E // router.groups)
    best = lax.top_k(choice_TGS, 2 if router.group_score == "top2" else 1)[0]
    _, chosen_TG = lax.top_k(jnp.sum(best, axis=2), router.top_groups)
    keep_TG = jnp.any(chosen_TG[:, :, None] == jnp.arange(router.groups), axis=1)
    return jnp.where(keep_TG[:, :, None], choice_TGS, -jnp.inf).reshape(T, E)


# ---- the experts -------------------------------------------------------------------------------


def routed(
    moe: Moe,
    p: Params,
    x_TD: jax.Array,
    expert_TX: jax.Array,
    weight_TX: jax.Array,
    kernel: ExpertKernel | None = None,
) -> jax.Array:
    """float32[T, D]: the weighted outputs of those experts of each token that this device has, partial sums where
    their width is split. By the kernel where the step's backend has one that takes these experts, but for few
    assignments. Quantised ones that the native kernels do not take are read tile by tile on every platform."""
    matrices = p["expert_gate_up"], p["expert_down"]
    if all(_native_takes(expert_TX.size, moe.E, w) for w in matrices):
        return through(in_place, moe, p, x_TD, expert_TX, weight_TX)
    if any(isinstance(w, QTensor) for w in matrices):
        return through(tiled, moe, p, x_TD, expert_TX, weight_TX)
    if kernel is not None and expert_TX.size > GATHER_MOST and kernel.serves(moe, p):
        return through(kernel.form, moe, p, x_TD, expert_TX, weight_TX)
    on = {platform: partial(through, _form(platform, expert_TX.size), moe, p) for platform in FORMS}
    default = on.pop("default")
    return lax.platform_dependent(x_TD, expert_TX, weight_TX, default=default, **on)


def _native_takes(A: int, E: int, w: Any) -> bool:
    if isinstance(w, QTensor):
        return native_quant.takes_experts(w.form, native.kernels.value, A, E)
    return native.takes_experts(A, E, w)


def through(
    form: Form,
    moe: Moe,
    p: Params,
    x_TD: jax.Array,
    expert_TX: jax.Array,
    weight_TX: jax.Array,
) -> jax.Array:
    """``routed`` in one form."""
    scale_TX = weight_TX if moe.router.on_input else jnp.ones_like(weight_TX)
    outputs = form(moe, p, x_TD, expert_TX, scale_TX)
    return combine(moe, *outputs, expert_TX, weight_TX)


def combine(
    moe: Moe, y_ND: jax.Array, place_TX: jax.Array, expert_TX: jax.Array, weight_TX: jax.Array
) -> jax.Array:
    """The sum over X of weight times output, in this order whatever the batch."""
    y_TD = jnp.zeros((place_TX.shape[0], y_ND.shape[1]), jnp.float32)
    for j in range(moe.X):
        one_TD = y_ND.at[place_TX[:, j]].get(mode="clip")
        if not moe.router.on_input:
            one_TD = one_TD * weight_TX[:, j : j + 1]
        y_TD = y_TD + jnp.where(expert_TX[:, j : j + 1] < moe.E, one_TD, 0.0)
    return y_TD


def tiled(
    moe: Moe, p: Params, x_TD: jax.Array, expert_TX: jax.Array, scale_TX: jax.Array
) -> Outputs:
    """A loop over tiles of one expert's assignments, as many as there are: reads each expert once that a token
    chose, and no other, and keeps the weights of one beside the parameters."""
    A, D = expert_TX.size, x_TD.shape[1]
    tiles = Tiles.of(expert_TX, moe.E, TILE)
    # Rows after an expert's last are those of the next one, whose own tile comes later and overwrites them.
    order_N = jnp.pad(tiles.order_A, (0, TILE))
    scale_A = scale_TX.reshape(-1)

    def one(i: jax.Array, y_ND: jax.Array) -> jax.Array:
        first = tiles.first_I[i]
        row_Q = lax.dynamic_slice(order_N, (first,), (TILE,))
        x_QD = x_TD[row_Q // moe.X]
        if moe.router.on_input:
            x_QD = x_QD * scale_A[row_Q, None]
        y_QD = _expert(moe, p, tiles.expert_I[i], x_QD)
        return lax.dynamic_update_slice(y_ND, y_QD, (first, 0))

    y_ND = lax.fori_loop(0, tiles.n, one, jnp.zeros((A + TILE, D), jnp.float32))
    return y_ND, jnp.argsort(tiles.order_A).reshape(expert_TX.shape)


def _expert(moe: Moe, p: Params, e: jax.Array, x_QD: jax.Array) -> jax.Array:
    """float32[Q, D]: the outputs of expert ``e``, without its last bias."""
    bias_2F = _slice(p["expert_gate_up_bias"], 2 * e, 2) if moe.expert_bias else None
    h_QF = gate_up(x_QD, _slice(p["expert_gate_up"], 2 * e, 2), bias_2F, moe.activation)
    return dot(h_QF, _slice(p["expert_down"], e, 1))


def _slice(w: Any, first: jax.Array, n: int) -> Any:
    """Rows ``first`` to ``first + n`` of an array or a QTensor. Without the barrier, which ties all of ``w`` to the
    loop, XLA:CPU converts weights of all experts to float32 before it, in every step; without the bits it converts a
    slice there and back."""
    w, first = lax.optimization_barrier((w, first))
    if isinstance(w, QTensor):
        return w.mapped(partial(_rows, first=first, n=n))
    return _rows(w, first=first, n=n)


def _rows(w: jax.Array, *, first: jax.Array, n: int) -> jax.Array:
    as_bits = {1: jnp.uint8, 2: jnp.uint16}.get(w.dtype.itemsize)
    if as_bits is None or jnp.issubdtype(w.dtype, jnp.integer):
        return lax.dynamic_slice_in_dim(w, first, n)
    bits = lax.dynamic_slice_in_dim(lax.bitcast_convert_type(w, as_bits), first, n)
    return lax.bitcast_convert_type(bits, w.dtype)


def gathered(
    moe: Moe, p: Params, x_TD: jax.Array, expert_TX: jax.Array, scale_TX: jax.Array
) -> Outputs:
    """Products of each assignment with its expert's weights where they lie: XLA on a GPU fuses the gathers into the
    products. Reads an expert once for each assignment."""
    T, X = expert_TX.shape
    # Padding reads what a token reads, and no expert of its own.
    e_TX = jnp.where(expert_TX < moe.E, expert_TX, jnp.minimum(jnp.min(expert_TX), moe.E - 1))
    w = p["expert_gate_up"]
    w_E2FD = w.reshape(moe.E, 2, *w.shape[1:])
    x_TXD = (x_TD[:, None] * scale_TX[:, :, None]).astype(w.dtype)
    y_TX2F = _each(x_TXD, w_E2FD, e_TX)
    if moe.expert_bias:
        y_TX2F = y_TX2F + p["expert_gate_up_bias"].reshape(moe.E, 2, -1)[e_TX]
    h_TXF = activated(moe.activation, y_TX2F[:, :, 0], y_TX2F[:, :, 1])
    y_TXD = _each(h_TXF.astype(w.dtype), p["expert_down"], e_TX)
    return y_TXD.reshape(T * X, -1), jnp.arange(T * X).reshape(T, X)


def _each(x_TXD: jax.Array, w_END: jax.Array, e_TX: jax.Array) -> jax.Array:
    """float32[T, X, ...N]: each x with the weights of its expert."""
    return jnp.einsum("txd,tx...d->tx...", x_TXD, w_END[e_TX], preferred_element_type=jnp.float32)


def in_place(
    moe: Moe, p: Params, x_TD: jax.Array, expert_TX: jax.Array, scale_TX: jax.Array
) -> Outputs:
    """The native kernels' products of all assignments: they read each chosen expert once, where it lies."""
    A, D = expert_TX.size, x_TD.shape[1]
    expert_A, w = expert_TX.reshape(-1), p["expert_gate_up"]
    if moe.router.on_input:
        x_TD = (x_TD[:, None] * scale_TX[:, :, None]).reshape(A, D)
    if moe.activation == "silu" and not moe.expert_bias:
        h_AF = _kernels(w).expert_gate_up(x_TD, w, expert_A)
    else:
        y_A2F = _kernels(w).expert_product(x_TD, w.reshape(moe.E, -1, D), expert_A)
        y_A2F = y_A2F.reshape(A, 2, -1)
        if moe.expert_bias:
            bias_E2F = p["expert_gate_up_bias"].reshape(moe.E, 2, -1)
            y_A2F = y_A2F + bias_E2F.at[expert_A].get(mode="clip")
        h_AF = activated(moe.activation, y_A2F[:, 0], y_A2F[:, 1])
    down = p["expert_down"]
    y_AD = _kernels(down).expert_product(h_AF, down, expert_A)
    return y_AD, jnp.arange(A).reshape(expert_TX.shape)


def _kernels(w: Any) -> Any:
    """The module with the native kernels for an array, or for a QTensor."""
    return native_quant if isinstance(w, QTensor) else native


TILE = 16
"""Assignments of a tile."""
GATHER_MOST = 32
"""Assignments up to which reading an expert once for each costs less than a loop outside of the command buffer."""

FORMS: dict[str, tuple[tuple[int | None, Form], ...]] = {
    "cpu": ((None, tiled),),
    "default": ((GATHER_MOST, gathered), (None, tiled)),
}
"""Of each platform, the form for up to so many assignments (None: for all others); ``default`` is of GPUs. On a CPU the
native kernels come first (``native.takes_experts``)."""


def _form(platform: str, A: int) -> Form:
    return next(form for most, form in FORMS[platform] if most is None or most >= A)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The assignments of a step sorted by expert and cut into tiles, each of one expert."""

    order_A: jax.Array
    """int32: numbers of the assignments; those of padding tokens come last."""
    expert_I: jax.Array
    """int32: of each tile."""
    first_I: jax.Array
    """int32: place in ``order_A`` of a tile's first assignment."""
    n: jax.Array
    """int32: tiles that there are; the rest of I is unused."""

    @classmethod
    def of(cls, expert_TX: jax.Array, E: int, Q: int) -> Tiles:
        """Tiles of at most ``Q`` assignments; experts of E and more are nowhere."""
        expert_A = expert_TX.reshape(-1)
        A = expert_A.size
        count_E = tokens_of_each(expert_A, E)
        n_E = (count_E + Q - 1) // Q
        end_E, start_E = jnp.cumsum(n_E), jnp.cumsum(count_E) - count_E
        tile_I = jnp.arange(-(-A // Q) + min(A, E), dtype=jnp.int32)
        found_I = jnp.sum(tile_I[:, None] >= end_E, axis=1, dtype=jnp.int32)
        expert_I = jnp.minimum(found_I, E - 1)
        within_I = tile_I - (end_E - n_E)[expert_I]
        return cls(
            order_A=jnp.argsort(expert_A, stable=True).astype(jnp.int32),
            expert_I=expert_I,
            first_I=start_E[expert_I] + within_I * Q,
            n=end_E[-1],
        )
