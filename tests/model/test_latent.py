"""Attention over latents: every form against the naive one of ``ref``, with NaN in all that no row may see."""

from __future__ import annotations

import dataclasses
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.model import attn_latent, latent_pool
from jserve.model.arch import resized
from jserve.model.attention import LatentArgs, backend, check_layers
from jserve.model.families.deepseek_v3 import FAMILY
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.hand import Row, pack
from jserve.model.kv_quant import stored
from jserve.model.view import Bucket, StepDims, layout, unpack
from tests.model.driver import NoSlots
from tests.model.test_attention import CASES, DIMS, FULL, N_PAGES, VERIFY, Case, Z, rows_of

N, A, Y, H, V = 6, 16, 4, 5, 7
WIDE = Bucket(D=5, P=320, F=3)
LONG = Case(decode=((40, 1), (250, 1)), prefill=((0, 300), (100, 20)))


def content(key: int, what: int, width: int) -> np.ndarray:
    return np.random.default_rng([what, key]).standard_normal((FULL, width)).astype(np.float32)


def matrices(dtype: Any) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(8)
    made = (rng.standard_normal((N, n, A)) * 0.4 for n in (H, V))
    k_up, v_up = (jnp.asarray(x, dtype) for x in made)
    return k_up, v_up


def run(
    name: str,
    case: Case,
    *,
    dtype: Any = jnp.float32,
    kept_as: Any = None,
    bucket: Bucket | None = None,
    keys: tuple[int, ...] = (),
) -> list[np.ndarray]:
    """Output of each row, decode rows first; checks that padding is finite. ``kept_as``: of the pool, ``dtype`` if it
    is None; ``keys`` name what rows hold."""
    attn, bucket = backend(name), bucket or Bucket(D=5, P=160, F=3)
    decode, prefill = rows_of(case, 0)
    pool = np.full((N_PAGES, Z, A + Y), np.nan, np.float32)
    x_TC = np.zeros((bucket.T, A + Y), np.float32)
    q_TX = np.zeros((bucket.T, N * (H + Y)), np.float32)
    spans, at = [], bucket.D * bucket.J
    for r, row in enumerate([*decode, *prefill]):
        first, n, key = r * bucket.J, len(row.tokens), keys[r] if keys else r
        if r >= len(decode):
            first, at = at, at + n
        kept, asked = content(key, 1, A + Y), content(key, 2, N * (H + Y))
        for p in range(row.start):
            pool[row.pages[p // Z], p % Z] = kept[p]
        x_TC[first : first + n] = kept[row.start : row.start + n]
        q_TX[first : first + n] = asked[row.start : row.start + n]
        spans.append((first, n))
    buf = pack(bucket, DIMS, attn, decode, prefill)
    kept = stored(jnp.asarray(pool), attn.kv_dtype(kept_as or dtype))
    out = np.asarray(_compiled(name, bucket, dtype)(buf, q_TX, x_TC, kept))
    assert np.isfinite(out).all()
    return [out[first : first + n] for first, n in spans]


@lru_cache
def _compiled(name: str, bucket: Bucket, dtype: Any) -> Any:
    attn = backend(name)

    def step(buf: Any, q_TX: Any, x_TC: Any, pool: Any) -> Any:
        zeros = jnp.zeros(DIMS.C, jnp.int32)
        fields = layout(bucket, DIMS, attn.plan_shapes(bucket, DIMS))
        view = unpack(buf, fields, bucket, DIMS, NoSlots(zeros, zeros))
        q_TNX, (k_up, v_up) = q_TX.reshape(-1, N, H + Y), matrices(dtype)
        args = LatentArgs(
            q_TNH=q_TNX[..., :H], q_TNY=q_TNX[..., H:], k_up_NHA=k_up, v_up_NVA=v_up, scale=0.3
        )
        assert attn.attend_latent is not None
        return attn.attend_latent(args, latent_pool.write(pool, x_TC, view), view)

    return jax.jit(step)


@pytest.mark.parametrize("name", ["xla", "dense"])
@pytest.mark.parametrize("case", ["empty", "page border", "block border", "mixed", "late chunk"])
def test_agrees_with_ref(case: str, name: str) -> None:
    for a, b in zip(run(name, CASES[case]), run("ref", CASES[case]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("name", ["xla", "dense"])
@pytest.mark.parametrize("tree", [(), (0, 0)], ids=["chain", "tree"])
def test_rows_of_several_tokens(name: str, tree: tuple[int, ...]) -> None:
    bucket = Bucket(D=5, P=160, F=3, J=3, tree=tree)
    want = run("ref", VERIFY["drafts"], bucket=bucket)
    for a, b in zip(run(name, VERIFY["drafts"], bucket=bucket), want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(("name", "atol"), [("xla", 1e-5), ("dense", 0.01)])
def test_latents_of_8_bits(name: str, atol: float) -> None:
    """``dense`` multiplies them in bfloat16."""
    eight = {"kept_as": jnp.float8_e4m3fn}
    want = run("ref", CASES["mixed"], **eight)
    for a, b in zip(run(name, CASES["mixed"], **eight), want, strict=True):
        np.testing.assert_allclose(a, b, atol=atol)
    assert np.abs(want[1] - run("ref", CASES["mixed"])[1]).max() > 1e-3


def test_ref_is_attention_over_the_keys_and_values_of_every_head() -> None:
    case, (k_up, v_up) = CASES["mixed"], (np.asarray(x, np.float64) for x in matrices(np.float32))
    for r, got in enumerate(run("ref", case)):
        start, n = (case.decode + case.prefill)[r]
        kept = content(r, 1, A + Y)[: start + n].astype(np.float64)
        asked = content(r, 2, N * (H + Y)).reshape(FULL, N, H + Y)
        for i in {0, n - 1}:
            own = np.einsum("sa,nha->snh", kept[: start + i + 1, :A], k_up)
            score = np.einsum("nh,snh->ns", asked[start + i, :, :H], own)
            score += asked[start + i, :, H:] @ kept[: start + i + 1, A:].T
            p = np.exp(0.3 * score)
            value = np.einsum("sa,nva->snv", kept[: start + i + 1, :A], v_up)
            want = np.einsum("ns,snv->nv", p / p.sum(-1, keepdims=True), value)
            np.testing.assert_allclose(got[i], want, atol=1e-5)


def test_a_row_has_the_same_bits_in_any_batch_and_any_chunks() -> None:
    """In float32: also from the length on where 16 bits would expand keys. A decode row rounds otherwise."""
    whole = run("xla", Case(prefill=((0, 300),)), bucket=WIDE)[0]
    beside = run("xla", Case(((9, 1), (77, 1)), ((5, 4), (0, 300))), bucket=WIDE, keys=(4, 5, 6, 0))
    np.testing.assert_array_equal(beside[3], whole)
    for start, end in ((0, 1), (1, 129), (129, 300)):
        part = run("xla", Case(prefill=((start, end - start),)), bucket=WIDE)[0]
        np.testing.assert_array_equal(part, whole[start:end])
    one = run("xla", Case(decode=((299, 1),)))[0]
    np.testing.assert_allclose(one[0], whole[299], atol=1e-6)
    many = Case(decode=((3, 1), (299, 1), (60, 1)))
    np.testing.assert_array_equal(run("xla", many, keys=(7, 0, 8))[1], one)


def test_long_chunks_of_16_bits_expand_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    want = run("ref", LONG, dtype=jnp.bfloat16, bucket=WIDE)
    expanded = run("xla", LONG, dtype=jnp.bfloat16, bucket=WIDE)
    monkeypatch.setattr(attn_latent, "EXPANDED", 1 << 20)
    _compiled.cache_clear()
    absorbed = run("xla", LONG, dtype=jnp.bfloat16, bucket=WIDE)
    _compiled.cache_clear()
    for a, b, c in zip(expanded, absorbed, want, strict=True):
        np.testing.assert_allclose(a, c, atol=0.04)
        np.testing.assert_allclose(b, c, atol=0.04)
    assert np.abs(expanded[2] - absorbed[2]).max() > 0, "one form was used twice"
    for short in (0, 1, 3):  # whoever is beside them
        np.testing.assert_array_equal(expanded[short], absorbed[short])


def shapes(heads: int, dims: StepDims, bucket: Bucket) -> list[jax.ShapeDtypeStruct]:
    """Arguments of ``published``."""
    buf = pack(bucket, dims, backend("xla"), [], [])
    return [
        jax.ShapeDtypeStruct(buf.shape, jnp.int32),
        jax.ShapeDtypeStruct((bucket.T, heads, 192), jnp.float32),
        jax.ShapeDtypeStruct((dims.M + 1, dims.Z, 576), jnp.uint16),
        jax.ShapeDtypeStruct((heads, 128, 512), jnp.bfloat16),
        jax.ShapeDtypeStruct((heads, 128, 512), jnp.bfloat16),
    ]


def published(dims: StepDims, bucket: Bucket, *args: Any) -> jax.Array:
    """``xla`` at the sizes of heads that DeepSeek has."""
    buf, q_TNX, pool, k_up, v_up = args
    zeros = jnp.zeros(dims.C, jnp.int32)
    view = unpack(buf, layout(bucket, dims, {}), bucket, dims, NoSlots(zeros, zeros))
    q_TNH, q_TNY = q_TNX[..., :128], q_TNX[..., 128:]
    args = LatentArgs(q_TNH=q_TNH, q_TNY=q_TNY, k_up_NHA=k_up, v_up_NVA=v_up, scale=0.07)
    return attn_latent.attend(args, pool, view)


def test_published_sizes_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:CPU lacks some products of bfloat16, and only large ones betray it."""
    dims, bucket = StepDims(C=2, M=20, Z=16, V=8), Bucket(D=2, P=256, F=1)
    rng, pages = np.random.default_rng(3), list(range(1, 21))
    _, *large = shapes(2, dims, bucket)
    q, *kept = (rng.standard_normal(x.shape) * 0.1 for x in large)
    pool, k_up, v_up = (jnp.asarray(x, jnp.bfloat16) for x in kept)
    pool = jax.lax.bitcast_convert_type(pool, jnp.uint16)
    rows = [Row(pages, 300, [1])], [Row(pages, 40, [1] * 250)]
    buf = pack(bucket, dims, backend("xla"), *rows)
    args = (buf, jnp.asarray(q, jnp.float32), pool, k_up, v_up)
    out = []
    for least in (256, 257):
        monkeypatch.setattr(attn_latent, "EXPANDED", least)
        out.append(np.asarray(jax.jit(partial(published, dims, bucket))(*args)))
    assert np.isfinite(out[0]).all()
    np.testing.assert_allclose(out[0], out[1], atol=0.02 * np.abs(out[0]).max())


@pytest.mark.parametrize("least", [256, 1 << 20], ids=["expanded", "absorbed"])
def test_keys_of_a_whole_context_are_nowhere(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of a block are expanded; of a whole context they would be the largest array by far."""
    monkeypatch.setattr(attn_latent, "EXPANDED", least)
    heads, dims, bucket = 16, StepDims(C=1, M=1024, Z=16, V=8), Bucket(D=0, P=512, F=1)
    lowered = jax.jit(partial(published, dims, bucket)).lower(*shapes(heads, dims, bucket))
    temporary = lowered.compile().memory_analysis().temp_size_in_bytes
    assert temporary < dims.M * dims.Z * heads * (192 + 128) * 2 / 2


def test_moves_and_padding() -> None:
    """Entries are copied to other places; page 0 belongs to nobody."""
    pool = jnp.arange(4 * 2 * 3.0).reshape(4, 2, 3)
    old, new = (
        (jnp.array([1, 3, 2]), jnp.array([0, 1, 1])),
        (jnp.array([2, 0, 3]), jnp.array([0, 0, 0])),
    )
    got = np.asarray(latent_pool.move(pool, old, new))
    want = np.array(pool)
    want[2, 0], want[3, 0] = pool[1, 0], pool[2, 1]
    np.testing.assert_array_equal(got, want)


def test_a_backend_that_lacks_a_kind_refuses_it() -> None:
    without = dataclasses.replace(
        backend("xla"), name="other", has_chunks=False, attend_latent=None
    )
    latent, chunked = _latent(), resized(_llama(), chunk=16)
    for arch, said in ((latent, "latent attention of deepseek_v3"), (chunked, "chunks .* llama")):
        check_layers(backend("xla"), arch, jnp.float32, (), 64)
        with pytest.raises(ConfigError, match=said) as e:
            check_layers(without, arch, jnp.float32, (), 64)
        assert e.value.field == "attention_backend"


SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def _llama() -> Any:
    return LLAMA.arch(SIZES | {"architectures": ["LlamaForCausalLM"]})


def _latent(**changed: Any) -> Any:
    return FAMILY.arch(
        SIZES
        | {
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 5,
            **changed,
        }
    )


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim"),
        ({"n_routed_experts": 4, "scoring_func": "softmax"}, "scoring_func"),
    ],
)
def test_what_is_not_served_is_refused_by_its_key(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as e:
        _latent(**changed)
    assert e.value.field == field
