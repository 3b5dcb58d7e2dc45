"""Whole decoders with experts in float32: how a text is cut into steps changes no bit of its logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model import moe
from jserve.model.families import family_for
from jserve.model.hand import Row
from jserve.model.param_spec import is_spec
from jserve.model.shard import ShardRules
from jserve.model.view import Bucket
from jserve.weights.layout import split
from tests.model.driver import Driver

CONFIG = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
    "mlp_only_layers": [1],
}
FAMILY = family_for(CONFIG)
ARCH = FAMILY.arch(CONFIG)
PAGES, OTHER = list(range(1, 6)), list(range(6, 11))
TEXT = np.random.default_rng(2).integers(0, 96, 33).tolist()
WHOLE = Bucket(D=2, P=40, F=1)


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    found: dict[str, np.ndarray] = {}
    for spec in jax.tree.leaves(FAMILY.specs(ARCH, 1), is_leaf=is_spec):
        value = 0.25 * rng.standard_normal(spec.shape) + spec.init_mean
        found |= split(spec, value.astype(np.float32))
    return found


def driver(**options: Any) -> Driver:
    return Driver(FAMILY, ARCH, tensors().__getitem__, attn="xla", **options)


def whole(of: Driver) -> np.ndarray:
    return of.step(WHOLE, prefill=[Row(PAGES, 0, TEXT)])[2 : 2 + len(TEXT)]


def test_chunks_and_buckets_change_no_bit() -> None:
    want, of = whole(driver()), driver()
    got, at = [], 0
    for n in (5, 1, 16, 3, 8):
        bucket = Bucket(D=2, P=40 if n % 2 else 16, F=2)
        logits = of.step(bucket, prefill=[Row(PAGES, at, TEXT[at : at + n])])
        got.append(logits[2 : 2 + n])
        at += n
    assert at == len(TEXT)
    np.testing.assert_array_equal(np.concatenate(got), want)


@pytest.mark.slow
def test_what_runs_beside_a_decoded_token_changes_no_bit() -> None:
    """And it is the whole prompt's but for the order of attention's sums."""
    want, alone, beside = whole(driver()), driver(), driver()
    for i, token in enumerate(TEXT[:8]):
        row = Row(PAGES, i, [token])
        got = alone.step(Bucket(D=2, P=0, F=0), decode=[row])[0]
        busy = beside.step(
            Bucket(D=4, P=16, F=1), decode=[row], prefill=[Row(OTHER, 0, TEXT[: i + 1])]
        )
        np.testing.assert_array_equal(busy[0], got, err_msg=f"token {i}")
        assert np.abs(got - want[i]).max() < 1e-5 * np.ptp(want)


@pytest.mark.slow
def test_experts_may_lie_apart_from_the_dense_width() -> None:
    """Whole on every device while the rest is split, and the other way round."""
    want = whole(driver())
    for ffn, expert in (("tp", None), (None, "tp")):
        rules = ShardRules(ffn=ffn, extra={"ffn_expert": expert})
        got = whole(driver(tp=2, rules=rules))
        assert np.abs(got - want).max() < 1e-5 * np.ptp(want)


def tiles_of_one_token(monkeypatch: pytest.MonkeyPatch, M: int) -> list[int]:
    """Of each layer with experts, in a step of 42 tokens of which one is real. ``M`` is no other test's: a layer of
    known shapes is not traced again."""
    found: list[int] = []
    real = moe.Tiles.of

    def of(expert_TX: jax.Array, E: int, Q: int) -> moe.Tiles:
        tiles = real(expert_TX, E, Q)
        jax.debug.callback(lambda n: found.append(int(n)), tiles.n)
        return tiles

    monkeypatch.setattr(moe.Tiles, "of", of)
    driver(M=M).step(WHOLE, prefill=[Row(PAGES, 0, TEXT[:1])])
    jax.effects_barrier()
    return found


def test_padding_routes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token has a tile for each of its experts, and the padding has none."""
    assert tiles_of_one_token(monkeypatch, M=7) == [3, 3]


@pytest.mark.slow
def test_a_router_that_routes_padding_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the test before this one counts."""
    real = moe.route

    def planted(router: Any, p: Any, x_TD: jax.Array, X: int, real_T: jax.Array) -> Any:
        return real(router, p, x_TD, X, jnp.ones_like(real_T))

    monkeypatch.setattr(moe, "route", planted)
    found = tiles_of_one_token(monkeypatch, M=9)
    assert len(found) == 2
    assert min(found) > 3
