"""KV as bytes: each form against rounding in numpy, and attention over it against attention over what was rounded."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.kv_layout import KV_FORMS, KVArray, KVLayer, KVLayout, stored_width
from jserve.model import kv_bytes
from jserve.model.arch import resized, with_kv_forms
from jserve.model.attention import AttendArgs, backend
from jserve.model.families import family_for
from jserve.model.view import Bucket, StepDims, layout, unpack
from tests.model.driver import Driver, NoSlots, Row, pack
from tests.runner.harness import ARCH

H, K, G, Z, N_PAGES = 16, 2, 2, 8, 40
FORMS = (*KV_FORMS, "fp8_e4m3", "bfloat16", "float32")
ENCODE = jax.jit(kv_bytes.encode, static_argnums=1)
DECODE = jax.jit(kv_bytes.decode, static_argnums=1)


def rounded(form: str, x: np.ndarray) -> np.ndarray:
    """float32: what ``form`` keeps of vectors, number by number."""
    if form not in KV_FORMS:
        types = {
            "fp8_e4m3": ml_dtypes.float8_e4m3fn,
            "bfloat16": ml_dtypes.bfloat16,
            "float32": np.float32,
        }
        return x.astype(types[form]).astype(np.float32)
    out = np.empty_like(x)
    for i in np.ndindex(x.shape[:-1]):
        v = x[i]
        if form == "int8_per_token_head":
            scale = np.float32(np.abs(v).max()) * np.float32(1 / 127)
            out[i] = np.rint(v / scale) * scale if scale > 0 else 0.0
        else:
            low = v.min().astype(ml_dtypes.bfloat16).astype(np.float32)
            scale = np.float32((v - low).max()) * np.float32(1 / 15)
            scale = scale.astype(ml_dtypes.bfloat16).astype(np.float32)
            q = np.clip(np.rint((v - low) / scale), 0, 15) if scale > 0 else 0.0
            out[i] = low + np.float32(q) * scale
    return out


def vectors() -> np.ndarray:
    """Of all sizes, with outliers, constant ones and zeros."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, H)).astype(np.float32) * 10.0 ** rng.integers(-4, 2, (200, 1))
    x[:20, 3] *= 50
    x[20:24], x[24:28] = 0.0, 1.7
    return np.clip(x, -400, 400).astype(np.float32)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_keeps_what_numpy_keeps(form: str) -> None:
    x = vectors()
    kept = ENCODE(x, stored_width(form, H))
    assert kept.dtype == jnp.int8
    assert kept.shape == (200, stored_width(form, H))
    np.testing.assert_array_equal(DECODE(kept, H), rounded(form, x))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_own_vector_and_is_seen(form: str, bad: float) -> None:
    x = vectors()
    x[7, 5] = bad
    got = np.asarray(DECODE(ENCODE(x, stored_width(form, H)), H))
    assert not np.isfinite(got[7]).all()
    assert np.isfinite(np.delete(got, 7, 0)).all()


def test_the_width_of_a_pool_says_its_form() -> None:
    for width in (16, 64, 96, 128, 192, 256):
        assert [kv_bytes.form_of(stored_width(form, width), width) for form in FORMS] == [*FORMS]


def attended(name: str, form: str) -> list[np.ndarray]:
    """Outputs of decode and prefill rows over a pool in ``form``: (with bytes, with what numpy rounded in float32)."""
    attn, rng = backend(name), np.random.default_rng(3)
    dims, bucket = StepDims(C=4, M=8, Z=Z, V=8), Bucket(D=2, P=24, F=2)
    pages = iter((rng.permutation(N_PAGES - 1) + 1).tolist())
    rows = [Row([next(pages) for _ in range(8)], s, [1] * n) for s, n in ((37, 1), (8, 1), (5, 17))]
    q, k, v = (rng.standard_normal((bucket.T, n, H)).astype(np.float32) * 3 for n in (K * G, K, K))
    past = rng.standard_normal((2, N_PAGES, Z, K, H)).astype(np.float32) * 3
    buf = pack(bucket, dims, attn, rows[:2], rows[2:])
    step = _step(name, dims, bucket)
    whole = (rounded(form, x) for x in (k, v, past))
    return [
        np.asarray(step(stored_width(form, H), buf, q, k, v, past)),
        np.asarray(step(0, buf, q, *whole)),
    ]


@lru_cache
def _step(name: str, dims: StepDims, bucket: Bucket) -> Any:
    """Attention over what has been encoded to a width, 0: over numbers as they are."""
    attn = backend(name)
    fields = layout(bucket, dims, attn.plan_shapes(bucket, dims))

    @partial(jax.jit, static_argnums=0)
    def step(width: int, buf: Any, q: Any, k: Any, v: Any, past: Any) -> jax.Array:
        view = unpack(buf, fields, bucket, dims, NoSlots(*(jnp.zeros(4, jnp.int32),) * 2))
        past = past.swapaxes(2, 3) if attn.kv_axis == 1 else past
        kv = tuple(kv_bytes.encode(x, width) if width else x for x in past)
        kv = attn.write_kv(kv, k, v, view)
        out = attn.attend(AttendArgs(q_TNH=q, window=0, scale=0.3), kv, view)
        return jnp.where((view.pos_T >= 0)[:, None, None], out, 0)

    return step


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["ref", "xla", "dense"])
def test_attention_over_bytes_is_that_over_what_was_rounded(name: str, form: str) -> None:
    got, want = attended(name, form)
    near = 2e-2 if name == "dense" else 1e-6  # it multiplies in bfloat16
    assert np.abs(got - want).max() <= near * np.abs(want).max()


PLANTS = {
    "nibbles swapped": (
        "int4_per_token_head",
        "_decode_int4",
        lambda was: lambda x, H: jnp.roll(was(x, H), H // 2, -1),
    ),
    "scale of another head": (
        "int8_per_token_head",
        "_encode_int8",
        lambda was: (
            lambda x: jnp.concatenate(
                [was(x)[..., :H], jnp.roll(was(x), 1, axis=-2)[..., H:]], axis=-1
            )
        ),
    ),
    "scale of the next token": (
        "int8_per_token_head",
        "_encode_int8",
        lambda was: (
            lambda x: jnp.concatenate(
                [was(x)[..., :H], jnp.roll(was(x), 1, axis=0)[..., H:]], axis=-1
            )
        ),
    ),
    "low forgotten": (
        "int4_per_token_head",
        "_encode_int4",
        lambda was: lambda x: was(x).at[..., H // 2 : H // 2 + 2].set(0),
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_seen(monkeypatch: pytest.MonkeyPatch, plant: str) -> None:
    form, name, wrong = PLANTS[plant]
    monkeypatch.setattr(kv_bytes, name, wrong(getattr(kv_bytes, name)))
    _step.cache_clear()
    got, want = attended("xla", form)
    _step.cache_clear()
    assert np.abs(got - want).max() > 1e-2 * np.abs(want).max()


def test_a_rotation_keeps_products_and_spreads_outliers() -> None:
    from scipy.linalg import hadamard

    x, y = vectors(), vectors()[::-1]
    turn = jax.jit(kv_bytes.rotated)
    turned = np.asarray(turn(x))
    np.testing.assert_allclose(
        turned, x @ hadamard(H) / H**0.5, rtol=2e-5, atol=1e-6 * np.abs(x).max()
    )
    products = (turned * np.asarray(turn(y))).sum(-1)
    np.testing.assert_allclose(products, (x * y).sum(-1), rtol=1e-3, atol=1e-2)
    outliers = np.random.default_rng(1).standard_normal((300, 64)).astype(np.float32)
    outliers[:, 7] *= 30  # a channel, as keys have them
    width = stored_width("int4_per_token_head", 64)

    def error(x: np.ndarray) -> float:
        return float(np.abs(DECODE(ENCODE(x, width), 64) - x).mean())

    assert error(np.asarray(turn(outliers))) < 0.5 * error(outliers)


def test_rotated_queries_meet_rotated_keys() -> None:
    """In float32, where nothing is rounded, the logits stay. Windows with attention sinks have queries of their own."""
    from tests.model import hf

    model, config = hf.tiny(
        "MistralForCausalLM", head_dim=16, sliding_window=13, num_hidden_layers=1
    )
    family = family_for(config)
    prompt = np.random.default_rng(1).integers(0, 128, 39).tolist()
    for sinks in (0, 3):
        arch = replace(family.arch(config), sinks=sinks)
        plain, turned = (
            Driver(family, replace(arch, kv_rotated=r), hf.weights(model)).greedy(prompt, 4)[0]
            for r in (False, True)
        )
        assert 0 < np.abs(turned - plain).max() < 1e-5 * np.ptp(plain)


# --- which layer has which form


def forms(skipped: tuple[str, ...], form: str = "int8_per_token_head", dtype: str = "bfloat16"):
    arch = resized(ARCH, H=16, windows=(0, 8, 0))
    return with_kv_forms(arch, form, skipped, dtype)


def test_skipped_layers_keep_the_type_of_the_activations() -> None:
    int8, whole = "int8_per_token_head", "bfloat16"
    assert forms(()).kv_forms == (int8,) * 3
    assert forms(("0", "2")).kv_forms == (whole, int8, whole)
    assert forms(("0, 2",)).kv_forms == forms(("0,2",)).kv_forms == (whole, int8, whole)
    assert forms(("sliding_window",)).kv_forms == (int8, whole, int8)
    assert forms(("0",), dtype="float32").kv_forms == ("float32", int8, int8)
    assert forms(("1",), form="fp8_e4m3").kv_forms == ("fp8_e4m3", whole, "fp8_e4m3")
    assert forms((), form="fp8_e4m3").kv_forms == ()
    assert forms(("0", "1", "2")).kv_form == whole
    widths = [layer.arrays[0].width for layer in forms(("0", "2")).kv_layers]
    assert widths == [32, 20, 32]


@pytest.mark.parametrize(
    ("skipped", "form", "field"),
    [
        (("3",), "int8_per_token_head", "kv_cache_dtype_skip_layers"),
        (("0,3",), "int8_per_token_head", "kv_cache_dtype_skip_layers"),
        (("0,",), "int8_per_token_head", "kv_cache_dtype_skip_layers"),
        (("-1",), "int8_per_token_head", "kv_cache_dtype_skip_layers"),
        (("full",), "int4_per_token_head", "kv_cache_dtype_skip_layers"),
        (("0",), "auto", "kv_cache_dtype_skip_layers"),
        (("0",), "bfloat16", "kv_cache_dtype_skip_layers"),
    ],
)
def test_what_cannot_be_skipped_is_refused(skipped: Any, form: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        forms(skipped, form)
    assert caught.value.field == field


def test_heads_and_latents_without_such_a_form_are_refused() -> None:
    for arch in (ARCH, resized(ARCH, H=17)):
        with pytest.raises(ConfigError, match="heads of 16") as caught:
            with_kv_forms(arch, "int4_per_token_head", (), "float32")
        assert caught.value.field == "kv_cache_dtype"
    from tests.kv.test_real_kinds import LATENT

    with pytest.raises(ConfigError, match="latents"):
        with_kv_forms(LATENT, "int8_per_token_head", (), "float32")


@pytest.mark.parametrize(
    ("form", "n"), [("auto", 16), ("fp8_e4m3", 16), ("int4_per_token_head", 24)]
)
def test_a_rotation_that_nothing_asks_for_is_refused(form: str, n: int) -> None:
    with pytest.raises(ConfigError) as caught:
        with_kv_forms(resized(ARCH, H=n), form, (), "float32", rotate=True)
    assert caught.value.field == "kv_cache_rotate"


def test_the_backends_without_them_are_refused_by_name() -> None:
    from jserve.model import attn_hopper, attn_native
    from jserve.model.arch import Attention
    from jserve.model.attention import KVStored

    kept = KVStored(kv_bytes.BYTES, "int4_per_token_head", 64)
    for check in (attn_hopper.check, attn_native.check):
        with pytest.raises(ConfigError, match="int"):
            check(Attention(N=8, K=8, H=128), kept, ())


def test_bytes_of_a_page_have_the_scales_in_them() -> None:
    layer = KVLayer.attention(8, 128)
    kept = KVLayout(
        layers=(layer.as_bytes("int4_per_token_head"),), page_size=16, dtype=kv_bytes.BYTES
    )
    assert kept.page_bytes == 2 * 8 * 16 * 68
    assert layer.as_bytes("int8_per_token_head").arrays == (KVArray(8, 132),) * 2
    assert replace(layer, replicated=True).as_bytes("bfloat16").arrays[0].width == 256
