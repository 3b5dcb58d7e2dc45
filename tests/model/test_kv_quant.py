"""KV of 8 bits: rounding and saturation, the backends against each other, scales of a checkpoint, and
how far logits move from those of transformers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jserve.kv_layout import Span
from jserve.model import kv_quant
from jserve.model.families import family_for
from jserve.model.kv_quant import E4M3, LARGEST, stored
from tests.model import test_attention as steps
from tests.model.driver import Driver

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
KV_ONLY = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "kv_cache_scheme": SCHEME,
}


@pytest.mark.parametrize("dtype", [E4M3, jnp.uint8], ids=str)
def test_numbers_are_rounded_to_the_nearest(dtype: Any) -> None:
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32) * 30
    got = np.asarray(stored(jnp.asarray(x), dtype)).view(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(got, x.astype(ml_dtypes.float8_e4m3fn))


def test_what_is_too_large_saturates_and_what_is_no_number_stays_none() -> None:
    x = jnp.array([460.0, 500.0, -1e30, np.inf, -np.inf, np.nan, 1e-9])
    got = np.asarray(stored(x, E4M3), np.float32)
    np.testing.assert_array_equal(got, [LARGEST, LARGEST, -LARGEST, np.nan, np.nan, np.nan, 0.0])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "atol"), [("xla", 2e-6), ("dense", 2e-2)])
@pytest.mark.parametrize("window", [0, 11])
@pytest.mark.parametrize("case", ["mixed", "block border", "late chunk", "one long, rest short"])
def test_agrees_with_ref(case: str, window: int, name: str, atol: float) -> None:
    """``dense`` rounds queries and weights to bfloat16, as a GPU multiplies them."""
    want = steps.run("ref", steps.CASES[case], span=Span(window=window), stored=E4M3)
    got = steps.run(name, steps.CASES[case], span=Span(window=window), stored=E4M3)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=atol)
    exact = steps.run("ref", steps.CASES[case], span=Span(window=window))
    assert max(np.abs(a - b).max() for a, b in zip(got, exact, strict=True)) > 1e-3


@pytest.mark.parametrize("name", ["ref", "xla", "dense"])
def test_drafts_that_stand_keep_their_bits(name: str) -> None:
    attn = steps.backend(name)
    dtype = attn.kv_dtype(E4M3)
    pool = stored(jnp.arange(3 * 2 * 2 * 8.0).reshape(attn.kv_shape(2, 8, 3, 2)), dtype)
    old, new = ((jnp.array([a]), jnp.array([1])) for a in (2, 1))
    moved = attn.move((pool, pool), old, new)[0]
    at = (slice(None),) * (1 if attn.kv_axis == 1 else 0)
    np.testing.assert_array_equal(moved[(1, *at, 1)], pool[(2, *at, 1)])
    np.testing.assert_array_equal(moved[(1, *at, 0)], pool[(1, *at, 0)])


def test_scales_are_folded_into_what_meets_the_numbers() -> None:
    """In exact arithmetic nothing changes: powers of two are exact."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal((5, n, 8)), jnp.float32) for n in (6, 3, 3))
    scale = jnp.asarray([[0.5, 4.0], [2.0, 0.25], [1.0, 8.0]], jnp.float32)
    q8, k8, v8 = kv_quant.fold(scale, q, k, v)
    for n in range(6):
        head = n // 2
        score = (q[:, n] * k[:, head]).sum(-1)
        np.testing.assert_allclose((q8[:, n] * k8[:, head]).sum(-1), score, rtol=1e-6)
        np.testing.assert_array_equal(
            kv_quant.unfold(scale, jnp.repeat(v8, 2, 1))[:, n], v[:, head]
        )
    np.testing.assert_array_equal(k8[:, 0], k[:, 0] * 2)


def test_only_pools_of_e4m3_have_scales() -> None:
    layer, pool = {"kv_scale": jnp.ones((2, 2))}, (2, 2, 8, 16)
    for dtype in (E4M3, jnp.uint8, jnp.int8):
        assert kv_quant.scales_of(layer, (jnp.zeros(pool, dtype),) * 2, 16) is layer["kv_scale"]
    assert kv_quant.scales_of(layer, (jnp.zeros((2, 2, 8, 20), jnp.int8),) * 2, 16) is None
    assert kv_quant.scales_of(layer, (jnp.zeros(pool, jnp.int8),) * 4, 16) is None
    assert kv_quant.scales_of(layer, (jnp.zeros(pool, jnp.bfloat16),) * 2, 16) is None
    assert kv_quant.scales_of({}, (jnp.zeros(pool, E4M3),) * 2, 16) is None


def model(architecture: str, **config: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """(the transformers model, its config.json, its tensors)."""
    from tests.model import hf

    made, config = hf.tiny(architecture, **config)
    return made, config, {k: v.detach().numpy() for k, v in made.state_dict().items()}


def agreement(made: Any, driver: Driver) -> tuple[float, float]:
    """(largest difference of prompt logits over their spread, share of argmaxes that agree)."""
    from tests.model import hf

    prompt = np.random.default_rng(1).integers(0, 128, 39).tolist()
    want, _ = hf.greedy(made, prompt, 1)
    got, _ = driver.greedy(prompt, 2)
    same = (got.argmax(-1) == want.argmax(-1)).mean()
    return np.abs(got - want).max() / np.ptp(want), float(same)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("attn", ["ref", "xla", "dense"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_logits_stay_near_those_of_transformers(architecture: str, attn: str) -> None:
    """Random weights, the worst that can be: nothing in them averages out. A 16th in each stored
    number is the bound of e4m3; the logits move by less than 10 % of their spread."""
    made, config, tensors = model(architecture)
    family = family_for(config)
    arch = family.arch(config)
    exact = Driver(family, arch, tensors.__getitem__, attn=attn)
    eight = Driver(family, arch, tensors.__getitem__, attn=attn, kv_dtype=E4M3)
    assert agreement(made, exact)[0] < 2e-4
    moved, same = agreement(made, eight)
    assert 1e-3 < moved < 0.2
    assert same > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_scales_of_a_checkpoint_keep_large_values_in_range(tp: int) -> None:
    """Keys and values that e4m3 cannot hold, and the scales that make them fit; without them the
    logits are far off. More devices than kv heads repeat the scales with the heads."""
    if len(jax.devices()) < tp:
        pytest.skip("too few devices")
    made, config, tensors = model("LlamaForCausalLM")
    family = family_for(config)
    large = dict(tensors)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}.self_attn"
        for name, factor in (("q", 2**-9), ("k", 2**9), ("v", 2**11), ("o", 2**-11)):
            large[f"{at}.{name}_proj.weight"] = tensors[f"{at}.{name}_proj.weight"] * factor
        large[f"{at}.k_scale"] = np.array([2.0**9], np.float32)
        large[f"{at}.v_scale"] = np.array([2.0**11], np.float32)
    scaled = family.arch(config | {"quantization_config": KV_ONLY})
    without = family.arch(config)
    options: Any = {"attn": "xla", "tp": tp, "kv_dtype": E4M3}
    moved, _ = agreement(made, Driver(family, scaled, large.__getitem__, **options))
    assert moved < 0.2
    moved, _ = agreement(made, Driver(family, without, large.__getitem__, **options))
    assert moved > 0.3
    options["kv_dtype"] = jnp.float32
    moved, _ = agreement(made, Driver(family, scaled, large.__getitem__, **options))
    assert moved < 2e-4, "scales are for 8 bits only"
