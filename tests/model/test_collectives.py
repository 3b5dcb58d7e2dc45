"""Sums over devices in a narrower type: the arithmetic that they promise, and the bytes that they save."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jserve import explain_sharding
from jserve.model.collectives import FEW, gather, reduce, reduce_scatter
from jserve.model.families import family_for
from jserve.model.hand import Row
from jserve.model.mesh import make_mesh, mesh_of
from jserve.model.shard import ShardRules
from jserve.model.view import Bucket
from jserve.sharding import Sharding

BF16 = ml_dtypes.bfloat16


def summed(parts: np.ndarray, mesh: Any, axis: Any, dtype: Any) -> np.ndarray:
    """[n, ...]: what each device has after the sum of ``parts[i]`` of device i."""
    spec = PartitionSpec(axis)
    one = jax.shard_map(
        lambda x: reduce(x[0], axis, dtype)[None],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return np.asarray(jax.jit(one)(parts))


@pytest.mark.parametrize(
    ("shape", "order"),
    [((2,), "x"), ((3,), "x"), ((4,), "x"), ((8,), "x"), ((2, 2), "xy"), ((2, 4), "yx")],
    ids=str,
)
@pytest.mark.parametrize("D", [64, 37])
def test_partial_sums_are_rounded_once_and_added_in_float32(
    shape: tuple[int, ...], order: str, D: int
) -> None:
    """Where each device adds a part of them, that is rounded too. Of several axes the outermost one counts slowest."""
    axis, n = tuple(order) if len(order) > 1 else order, math.prod(shape)
    parts = np.random.default_rng(n).standard_normal((n, 5, D)).astype(np.float32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:n]).reshape(shape), ("x", "y")[: len(shape)])
    want = parts.astype(BF16).astype(np.float32)
    total = want[0]
    for part in want[1:]:
        total = total + part
    if n > FEW:
        total = total.astype(BF16).astype(np.float32)
    got = summed(parts, mesh, axis, jnp.bfloat16)
    np.testing.assert_array_equal(got, np.broadcast_to(total, got.shape))
    exact = summed(parts, mesh, axis, jnp.float32)
    np.testing.assert_allclose(
        exact, np.broadcast_to(parts.sum(0), exact.shape), rtol=2e-6, atol=1e-6
    )


@pytest.mark.parametrize("axes", [("x",), ("x", "y"), ("y", "x")], ids=str)
def test_parts_of_sums_are_gathered_in_their_order(axes: tuple[str, ...]) -> None:
    """Over several axes of a mesh too, and in a narrower type: each part is rounded once, and added in float32."""
    mesh = mesh_of(Sharding.of({"mesh": {"x": 2, "y": 2}, "rules": {"ffn": ["x", "y"]}}))
    axis = axes[0] if len(axes) == 1 else axes
    n = 2 ** len(axes)
    parts = np.random.default_rng(0).standard_normal((n, 7, 3)).astype(np.float32)
    for dtype, rounded in ((jnp.float32, parts), (jnp.bfloat16, parts.astype(BF16))):
        both = jax.shard_map(
            lambda x, dtype=dtype: gather(reduce_scatter(x[0], axis, dtype), axis, 0)[:7],
            mesh=mesh,
            in_specs=PartitionSpec(axis),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        want = rounded.astype(np.float32).sum(0)
        np.testing.assert_allclose(jax.jit(both)(parts), want, rtol=1e-6, atol=1e-6)


def exchanged(
    tp: int, dtype: str, sums: str, **more: Any
) -> list[tuple[str, str, tuple[int, ...], int]]:
    spec = {"mesh": {"tp": tp}, "sums": sums, **more}
    decode, _ = explain_sharding("checkpoints/jserve-mini", spec, dtype=dtype).programs
    return sorted((c.op, c.dtype, c.shape, c.count) for c in decode.collectives or ())


def test_the_collectives_are_half_as_wide() -> None:
    before, after = exchanged(4, "bfloat16", "float32"), exchanged(4, "bfloat16", "weights")
    [(_, _, (T, D), n)] = [c for c in before if c[0] == "all-reduce"]
    assert ("all-to-all", "bfloat16", (4, T, 1, D // 4), n) in after
    assert ("all-gather", "bfloat16", (T, D), n) in after
    assert not [c for c in after if c[0] == "all-reduce"]
    assert [c for c in after if c[1] == "float32"] == [c for c in before if c[0] == "all-gather"]
    two_axes: dict[str, Any] = {
        "mesh": {"x": 2, "y": 2},
        "rules": {name: ["x", "y"] for name in ("kv_heads", "ffn", "vocab")},
    }
    assert exchanged(4, "bfloat16", "weights", **two_axes) == after
    two = exchanged(2, "bfloat16", "weights")
    assert ("all-gather", "bfloat16", (2, T, D), n) in two


def test_weights_in_float32_are_summed_as_before() -> None:
    assert exchanged(4, "float32", "weights") == exchanged(4, "float32", "float32")


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", ["llama-gqa4", "deepseek-v3", "granite-moe-shared"])
def test_a_step_is_close_to_one_with_sums_in_float32(case: str) -> None:
    from tests.model import hf
    from tests.model.driver import Driver
    from tests.model.test_parity import CASES

    model, config = hf.tiny(CASES[case][0], **CASES[case][1])
    family = family_for(config)
    get, mesh = hf.weights(model), make_mesh(4)
    make = partial(Driver, family, family.arch(config), get, attn="ref", mesh=mesh)
    prompt = np.random.default_rng(1).integers(0, 128, 39).tolist()
    rows, bucket = [Row(list(range(1, 17)), 0, prompt)], Bucket(D=2, P=40, F=1)
    wide, narrow = (
        np.asarray(
            make(dtype=jnp.bfloat16, rules=ShardRules(sums=sums)).step(bucket, prefill=rows),
            np.float32,
        )[2:41]
        for sums in ("float32", "weights")
    )
    assert 0 < np.abs(narrow - wide).max() < 0.03 * np.ptp(wide)
