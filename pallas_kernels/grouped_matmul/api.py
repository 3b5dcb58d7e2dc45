"""``grouped_mlp``: what it takes, what it refuses, and the gathering around the Hopper kernel.

It owns shapes and tuning.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.flash import M
from pallas_kernels.grouped_matmul import hopper
from pallas_kernels.grouped_matmul.hopper import Tile
from pallas_kernels.grouped_matmul.plan import Order, plan
from pallas_kernels.grouped_matmul.values import ACTIVATIONS, Activation, Experts, ExpertSpec
from pallas_kernels.served import tuning

Array = jax.Array
SERVED_DTYPES = (jnp.bfloat16, jnp.float16)
COLUMNS = (8, 16, 32, 64, 128)
"""Rows of tokens that a tile may have."""


def grouped_mlp(
    x_TD: Array,
    expert_TX: Array,
    experts: Experts,
    spec: ExpertSpec,
    *,
    scale_TX: Array | None = None,
) -> tuple[Array, Array]:
    """The outputs of each token's experts, an MLP with a gate each. No token is dropped, however many choose the
    same expert; experts that nobody chose are not read.

    Args:
        x_TD: tokens; cast to the type of the weights.
        expert_TX: int32, the X experts of each token. What is not 0 to E - 1 goes to no expert: padding, experts of
            other devices.
        scale_TX: float32, what a token is multiplied by before it goes to an expert; None: 1.
        spec: its ``tune`` may have ``columns``, ``sms``, ``panel``, ``warpgroups``, ``parts``, ``depth`` and ``stages``.

    Returns:
        (float32[Y, D] outputs, int32[T, X] the row of each pair's; negative for those that go nowhere). Rows of
        no pair may be anything. Between the products numbers have the type of the weights.

    Raises:
        ValueError: a shape or dtype that the kernel cannot serve, named.
    """
    order, first, second = tiles_of(x_TD, expert_TX, experts, spec)
    if scale_TX is not None and scale_TX.shape != expert_TX.shape:
        raise ValueError(f"scales of shape {scale_TX.shape}, not {expert_TX.shape}")
    gate_up_E2FD, down_EDF, bias_E2F, bias_ED = experts
    E, _, F, D = gate_up_E2FD.shape
    work = plan(expert_TX, order)
    x_YD = x_TD.at[work.pair_Y // order.X].get(mode="promise_in_bounds")
    if scale_TX is not None:
        x_YD = x_YD * scale_TX.reshape(-1)[work.pair_Y][:, None]
    bias = None if bias_E2F is None else bias_E2F.reshape(E, 2 * F)
    matrix, x_YD = gate_up_E2FD.reshape(E, 2 * F, D), x_YD.astype(down_EDF.dtype)
    h_YF = hopper.multiply(x_YD, matrix, bias, work, first, spec.interpret)
    return hopper.multiply(h_YF, down_EDF, bias_ED, work, second, spec.interpret), work.row_TX


def serves(D: int, F: int) -> bool:
    """True if experts of F within a model of D can be served."""
    return not (D % M or F % M)


def tiles_of(
    x_TD: Any, expert_TX: Any, experts: Experts, spec: ExpertSpec
) -> tuple[Order, Tile, Tile]:
    """The static description of a call: rows, first and second product; only shapes and dtypes are read.

    Raises:
        ValueError: as ``grouped_mlp``.
    """
    (T, X), (E, _, F, D) = expert_TX.shape, experts.gate_up_E2FD.shape
    _check(x_TD, expert_TX, experts, spec)
    tune = spec.tune or {}
    columns = tune.get("columns") or columns_of(T * X, E)
    if columns not in COLUMNS:
        raise ValueError(f"tiles of {columns} tokens: only {COLUMNS} are served")
    table = tuning("pallas_kernels.grouped_matmul")
    # The interpreter has no multiprocessors to fill, and every block of the grid costs it time.
    sms = table["sms"] if spec.interpret is None else 2
    chosen = {"sms": sms, "panel": table["panel"], **table[str(columns)], **tune}
    order = Order(T=T, X=X, E=E, columns=columns)
    first = _tile(2 * F, D, order, {**chosen, "parts": 2}, spec.activation)
    return order, first, _tile(D, F, order, chosen, None)


def columns_of(pairs: int, E: int) -> int:
    """Rows of a tile for so many (token, expert) pairs: room for ``spread`` times the mean of an expert, so that
    most experts have one tile, whose matrix is then read once."""
    wanted = tuning("pallas_kernels.grouped_matmul")["spread"] * -(-pairs // E)
    return next((c for c in COLUMNS if c >= wanted), COLUMNS[-1])


def _tile(R: int, K: int, order: Order, chosen: dict[str, Any], gated: Activation | None) -> Tile:
    out = R // 2 if gated else R
    warpgroups = min(chosen["warpgroups"], out // M)
    depth = chosen["depth"] if K % chosen["depth"] == 0 else M
    parts = chosen["parts"] if gated else min(chosen["parts"], out // (warpgroups * M))
    return Tile(
        R=R,
        K=K,
        tiles=order.tiles,
        columns=order.columns,
        sms=chosen["sms"],
        panel=chosen["panel"],
        warpgroups=warpgroups,
        parts=parts,
        depth=depth,
        stages=chosen["stages"] * chosen["depth"] // depth,
        gated=gated,
    )


def _check(x_TD: Any, expert_TX: Any, experts: Experts, spec: ExpertSpec) -> None:
    E, _, F, D = experts.gate_up_E2FD.shape
    shapes = {
        "x": (x_TD, (expert_TX.shape[0], D)),
        "gate_up": (experts.gate_up_E2FD, (E, 2, F, D)),
        "down": (experts.down_EDF, (E, D, F)),
        "bias of gate_up": (experts.gate_up_bias_E2F, (E, 2, F)),
        "bias of down": (experts.down_bias_ED, (E, D)),
    }
    for name, (array, shape) in shapes.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} of shape {array.shape}, not {shape}")
    if not serves(D, F):
        raise ValueError(f"experts of {F} in a model of {D}: the kernel takes multiples of {M}")
    dtype = experts.down_EDF.dtype
    if dtype not in SERVED_DTYPES or experts.gate_up_E2FD.dtype != dtype:
        names = " or ".join(jnp.dtype(d).name for d in SERVED_DTYPES)
        raise ValueError(f"weights are {experts.gate_up_E2FD.dtype} and {dtype}, not both {names}")
    if spec.activation.name not in ACTIVATIONS:
        raise ValueError(f"activation {spec.activation.name!r} is none of {', '.join(ACTIVATIONS)}")
