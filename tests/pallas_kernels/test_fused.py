"""Decode steps whose layers are kernels but for the products, in the interpreter, beside those of ``hopper``."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model import fused
from jserve.model.arch import Arch, Attention, Norm, Rope, resized
from jserve.model.hand import Row, pack
from jserve.model.param_spec import is_spec
from jserve.model.quant import Form, QTensor
from jserve.model.view import Bucket
from tests.model.driver import Driver
from tests.pallas_kernels.shapes import ARCHS, FAMILIES

SMALL = {"L": 2, "D": 512, "F": 64, "V": 96, "N": 4, "K": 2, "H": 64}
ROWS = [Row([1, 2, 3], 0, [5]), Row([4, 5, 6], 0, [7])]


BIASES = {"o_bias": True, "mlp_bias": True}


def arch(name: str) -> Arch:
    base, _, biases = name.partition(", ")
    rope = dataclasses.replace(ARCHS[base].ropes[0], scaling=None)
    return resized(ARCHS[base], **SMALL, **(BIASES if biases else {}), rope=rope)


def driver(name: str, attn: str, dtype: Any = jnp.bfloat16) -> Driver:
    made = arch(name)
    family = FAMILIES[made.family]
    shapes = {
        part.name: part.shape
        for spec in jax.tree.leaves(family.specs(made, 1), is_leaf=is_spec)
        for part in spec.parts
    }

    def tensor(name: str) -> np.ndarray:
        rng = np.random.default_rng(len(name) * 1000 + sum(map(ord, name)))
        x = rng.standard_normal(shapes[name]).astype(np.float32)
        return x * 0.1 + ("norm" in name)

    return Driver(family, made, tensor, attn=attn, kv_dtype=dtype, dtype=dtype, Z=16, n_pages=8)


@pytest.mark.parametrize("name", ["llama-3.2-1b, biases", "qwen3-8b", "qwen2.5-7b"])
def test_logits_and_keys_are_those_of_hopper(name: str) -> None:
    """Norms of queries and keys, biases, and rows that grow over steps; the third row is padding."""
    made = {attn: driver(name, attn) for attn in ("hopper", "hopper_fused")}
    bucket, spread = Bucket(D=3, P=0, F=0), 0.0
    for at in range(3):
        rows = [
            dataclasses.replace(row, start=at, tokens=[9 + at + i]) for i, row in enumerate(ROWS)
        ]
        want, got = (d.step(bucket, decode=rows)[:2] for d in made.values())
        spread = max(spread, float(np.abs(want).max()))
        np.testing.assert_allclose(got, want, atol=0.02 * spread)
    for layers in zip(made["hopper"].kv, made["hopper_fused"].kv, strict=True):
        for want, got in zip(*layers, strict=True):
            want, got = (np.asarray(x, np.float32) for x in (want, got))
            np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
            near = np.nanmax(np.abs(want)) * 0.02
            np.testing.assert_allclose(got, want, atol=near)


def test_which_steps_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode rows of one token; not chunks, drafts or weights of another type than the pool's."""

    class Fused(Exception):
        pass

    def tapped(*_: Any) -> None:
        raise Fused

    monkeypatch.setattr(fused, "tapped", tapped)

    def is_fused(bucket: Bucket, dtype: Any = jnp.bfloat16, attn: str = "hopper_fused") -> bool:
        made = driver("llama-3.2-1b", attn, dtype)
        buf = pack(bucket, made.dims, made.attn, [], [])
        try:
            jax.eval_shape(made._compile(bucket), made.params, made.kv, buf)
        except Fused:
            return True
        return False

    assert is_fused(Bucket(D=2, P=0, F=0))
    assert not is_fused(Bucket(D=2, P=0, F=0), attn="hopper")
    assert not is_fused(Bucket(D=2, P=0, F=0), jnp.float32)
    assert not is_fused(Bucket(D=2, P=0, F=0, J=2))
    assert not is_fused(Bucket(D=2, P=16, F=1))


@pytest.mark.parametrize(
    "changes",
    [
        {"attn": Attention(N=4, K=2, H=64, soft_cap=5.0)},
        {"attn": Attention(N=4, K=2, H=64, rope=None)},
        {"attn": Attention(N=4, K=2, H=64, rope=Rope(pairs=True))},
        {"attn": Attention(N=4, K=2, H=64, rope=Rope(rotary=32))},
        {"attn": Attention(N=4, K=2, H=64, qk_norm="width")},
        {"parallel": True},
        {"residual_scale": 0.5},
    ],
    ids=str,
)
def test_other_layers_are_not_fused(changes: dict[str, Any]) -> None:
    made, weights = arch("llama-3.2-1b"), [{"attn_norm": 1, "mlp_norm": 1}] * 2
    assert fused.plain(made, weights)
    quantised = QTensor(q=1, scale=1, zero=None, form=Form(kind="int8"))
    assert not fused.plain(made, [weights[0], weights[1] | {"qkv": quantised}])
    layer = dataclasses.replace(made.layers[1], **changes)
    assert not fused.plain(dataclasses.replace(made, layers=(made.layers[0], layer)), weights)
    assert not fused.plain(made, [*weights[:1], {**weights[1], "mlp_out_norm": 1}])
    assert not fused.plain(dataclasses.replace(made, norm=Norm(plus_one=True)), weights)


@pytest.mark.parametrize(
    ("N", "D", "S"),
    [(4096, 4096, 8), (6144, 4096, 4), (28672, 4096, 1), (1024, 2048, 8), (64, 192, 1)],
)
def test_products_are_split_until_the_device_is_busy(N: int, D: int, S: int) -> None:
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((2, D), (64, D)))
    parts = fused.split_product(x, jnp.broadcast_to(w[:1], (N, D)) if N > 64 else w)
    assert parts.shape == (S, 2, N)
    if N == 64:
        np.testing.assert_allclose(
            parts.sum(0), x.astype(jnp.float32) @ w.T.astype(jnp.float32), rtol=1e-3, atol=1e-3
        )
