"""Computes ``grouped_mlp`` in plain jnp and float32, for reading and for tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.values import Activation, Experts, ExpertSpec

Array = jax.Array


def grouped_mlp(
    x_TD: Array,
    expert_TX: Array,
    experts: Experts,
    spec: ExpertSpec,
    *,
    scale_TX: Array | None = None,
) -> Array:
    """float32[T, X, D]: the output of each expert that a token chose, zero for none; arguments as of
    ``api.grouped_mlp``. Expert after expert, over all tokens."""
    (T, X), D = expert_TX.shape, x_TD.shape[1]
    x_AD = jnp.repeat(x_TD.astype(jnp.float32), X, axis=0)
    x_AD = x_AD if scale_TX is None else x_AD * scale_TX.reshape(-1, 1)
    out_AD = jnp.zeros((T * X, D), jnp.float32)
    for e in range(experts.down_EDF.shape[0]):
        y_AD = _mlp(x_AD, _one(experts, e), spec.activation)
        # A token that chose others may be anything, also NaN.
        out_AD = jnp.where((expert_TX == e).reshape(-1, 1), y_AD, out_AD)
    return out_AD.reshape(T, X, D)


def _one(experts: Experts, e: int) -> Experts:
    """The weights of expert ``e``, float32."""
    return Experts(*(None if w is None else w[e].astype(jnp.float32) for w in experts))


def _mlp(x_TD: Array, expert: Experts, activation: Activation) -> Array:
    gate_up_2FD, down_DF, bias_2F, bias_D = expert
    y_T2F = jnp.einsum("td,pfd->tpf", x_TD, gate_up_2FD, precision="highest")
    y_T2F = y_T2F if bias_2F is None else y_T2F + bias_2F
    h_TF = activate(y_T2F[:, 0], y_T2F[:, 1], activation)
    y_TD = jnp.matmul(h_TF, down_DF.T, precision="highest")
    return y_TD if bias_D is None else y_TD + bias_D


def activate(gate: Array, up: Array, activation: Activation) -> Array:
    """What the second product multiplies."""
    if activation.name == "silu":
        return jax.nn.silu(gate) * up
    if activation.name == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    gate = jnp.minimum(gate, activation.limit)
    up = jnp.clip(up, -activation.limit, activation.limit)
    return (up + 1) * gate * jax.nn.sigmoid(activation.alpha * gate)
