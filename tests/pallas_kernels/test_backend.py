"""The ``hopper`` backend in the interpreter against ``ref``: mixed steps over poisoned pages, and a
whole model through the step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.kv_layout import KV_FORMS, stored_width
from jserve.model import attn_hopper
from jserve.model.arch import Attention, resized, with_kv_forms
from jserve.model.attention import AttendArgs, KVStored, backend, check_layers
from jserve.model.draft_tree import DraftMask, TreeShape
from jserve.model.hand import Row, pack
from jserve.model.kv_bytes import BYTES, widened
from jserve.model.kv_quant import E4M3, stored
from jserve.model.view import Bucket, StepDims, layout, unpack
from jserve.sizing.models import find
from jserve.window import Window
from pallas_kernels.paged_attention import Tree
from tests.model.driver import NoSlots

INT8, INT4 = KV_FORMS
K, G, H, Z, M = 2, 2, 64, 16, 12
TREE = (0, 0, 1, 1, 2)
DIMS = StepDims(C=4, M=M, Z=Z, V=32)
N_PAGES = 60
CASES: dict[str, tuple[Bucket, Any, Any]] = {
    "mixed": (Bucket(D=3, P=48, F=2), [(70, 1), (0, 1)], [(100, 20), (0, 17)]),
    "verify": (Bucket(D=2, P=0, F=0, J=3), [(63, 3), (5, 2)], []),
    "decode, verify and prefill": (
        Bucket(D=4, P=48, F=2, J=3),
        [(70, 1), (63, 3), (5, 2)],
        [(100, 20), (0, 17)],
    ),
    "a tree and prefill": (
        Bucket(D=3, P=16, F=1, J=6, tree=TREE),
        [(61, 6), (0, 4)],
        [(30, 9)],
    ),
    "prefill only": (Bucket(D=0, P=40, F=2), [], [(15, 30)]),
    "empty": (Bucket(D=2, P=16, F=1), [], []),
}


def step(
    name: str,
    case: str,
    window: int,
    *,
    release: bool = False,
    dtype: Any = jnp.bfloat16,
    form: str = "",
    sink_logits_N: Any = None,
    soft_cap: float = 0.0,
) -> np.ndarray:
    """Output of the step's real tokens. ``release`` gives back the pages behind the window: their
    entries are 0, they and page 0 hold NaN. ``form``: of a pool of bytes, whose pages have 32 tokens."""
    bucket, decode, prefill = CASES[case]
    attn = backend(name, "cpu")
    Z, M = (32, 6) if form else (DIMS.Z, DIMS.M)
    dims, dtype = replace(DIMS, Z=Z, M=M), BYTES if form else dtype
    width = stored_width(form, H) if form else H
    rng = np.random.default_rng(3)
    pages = iter(rng.permutation(N_PAGES - 1) + 1)
    spans = [*decode, *prefill]
    rows = [Row([next(pages) for _ in range(-(-(s + c) // Z))], s, [1] * c) for s, c in spans]
    pool = np.full((2, N_PAGES, Z, K, H), np.nan, np.float32)
    for row in rows:
        for i in range(row.start):
            pool[:, row.pages[i // Z], i % Z] = rng.standard_normal((2, K, H))
        for i in Window(page_size=Z, tokens=window).gone(row.start) if release else ():
            pool[:, row.pages[i]] = np.nan
            row.pages[i] = 0
    if attn.kv_axis == 1:
        pool = pool.swapaxes(2, 3)
    kept = attn.kv_dtype(dtype)
    kv = tuple(part for x in pool for part in attn.parts(stored(jnp.asarray(x), kept, width)))
    q, k, v = (
        np.asarray(jnp.asarray(rng.standard_normal((bucket.T, n, H)), jnp.bfloat16), np.float32)
        for n in (K * G, K, K)
    )
    buf = pack(bucket, dims, attn, rows[: len(decode)], rows[len(decode) :])
    zeros = jnp.zeros(dims.C, jnp.int32)
    fields = layout(bucket, dims, attn.plan_shapes(bucket, dims))
    view = unpack(jnp.asarray(buf), fields, bucket, dims, NoSlots(zeros, zeros))
    kv = attn.write_kv(kv, jnp.asarray(k), jnp.asarray(v), view)
    args = AttendArgs(
        q_TNH=jnp.asarray(q),
        window=window,
        scale=0.2,
        sink_logits_N=sink_logits_N,
        soft_cap=soft_cap,
    )
    out = np.asarray(attn.attend(args, kv, view))
    assert out.dtype == np.float32
    assert np.isfinite(out).all()
    return out[np.asarray(view.pos_T) >= 0]


@pytest.mark.parametrize("case", CASES)
def test_steps_agree_with_ref(case: str) -> None:
    np.testing.assert_allclose(step("hopper", case, 0), step("ref", case, 0), atol=2e-2)


def test_sink_logits_agree_with_ref() -> None:
    logits = jnp.linspace(-1.0, 3.0, K * G)
    case = "decode, verify and prefill"
    want = step("ref", case, 40, sink_logits_N=logits)
    assert np.abs(want - step("ref", case, 40)).max() > 0.1
    np.testing.assert_allclose(step("hopper", case, 40, sink_logits_N=logits), want, atol=2e-2)


def test_soft_caps_agree_with_ref() -> None:
    case = "decode, verify and prefill"
    want = step("ref", case, 40, soft_cap=1.0)
    assert np.abs(want - step("ref", case, 40)).max() > 0.1
    np.testing.assert_allclose(step("hopper", case, 40, soft_cap=1.0), want, atol=2e-2)


@pytest.mark.parametrize("case", ["decode, verify and prefill", "a tree and prefill"])
def test_steps_over_8_bits_agree_with_ref(case: str) -> None:
    want = step("ref", case, 40, dtype=E4M3)
    np.testing.assert_allclose(step("hopper", case, 40, dtype=E4M3), want, atol=2e-2)


@pytest.mark.parametrize("form", [INT8, "bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("case", ["decode, verify and prefill", "a tree and prefill"])
def test_steps_over_bytes_agree_with_ref(case: str, form: str) -> None:
    """int8 with its scales, and what layers hold that are skipped beside it."""
    want = step("ref", case, 40, form=form)
    np.testing.assert_allclose(step("hopper", case, 40, form=form), want, atol=2e-2)


@pytest.mark.parametrize("case", CASES)
def test_a_step_has_the_kernels_that_its_bucket_needs(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for rows of drafts or none, one for chunks; a part without tokens has no kernel."""
    called = []
    for name in ("paged_attention", "ragged_prefill"):

        def spy(q: Any, *_: Any, name: str = name, **options: Any) -> Any:
            called.append((name, options.get("tree")))
            return jnp.zeros(q.shape, jnp.float32)

        monkeypatch.setattr(attn_hopper, name, spy)
    bucket = CASES[case][0]
    step("hopper", case, 0)
    decode = [("paged_attention", Tree.of((-1, *TREE)) if bucket.tree else None)]
    assert called == decode * (bucket.D > 0) + [("ragged_prefill", None)] * (bucket.P > 0)


def test_int8_and_its_scales_are_written_where_the_token_is() -> None:
    """What a write leaves in the four arrays; padding writes nothing."""
    attn, dims, n_pages = backend("hopper", "cpu"), replace(DIMS, Z=32), 5
    bucket = Bucket(D=2, P=0, F=0)
    buf = jnp.asarray(pack(bucket, dims, attn, [Row([3], 2, [1])], []))
    zeros = jnp.zeros(dims.C, jnp.int32)
    view = unpack(buf, layout(bucket, dims, {}), bucket, dims, NoSlots(zeros, zeros))
    x = np.random.default_rng(1).standard_normal((2, K, H)).astype(np.float32)
    shapes = attn.pool_shapes(K, stored_width(INT8, H), n_pages, 32)
    assert shapes == [(n_pages, K, 32, H), (n_pages, K, 32, 4)]
    empty = tuple(jnp.full(shape, 7, jnp.int8) for shape in shapes)
    written = attn.write_kv((*empty, *empty), jnp.asarray(x), jnp.asarray(3 * x), view)
    for i, vectors in enumerate((x, 3 * x)):
        scale_K = np.abs(vectors[0]).max(-1) * np.float32(1 / 127)
        numbers, scales = (np.full(shape, 7, np.int8) for shape in shapes)
        numbers[3, :, 2] = np.round(vectors[0] / scale_K[:, None])
        scales[3, :, 2] = scale_K[:, None].view(np.int8)
        np.testing.assert_array_equal(written[2 * i], numbers)
        np.testing.assert_array_equal(written[2 * i + 1], scales)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, E4M3, BYTES], ids=str)
def test_the_path_of_a_tree_is_moved_and_nothing_else(dtype: Any) -> None:
    """As ``ref`` moves it, beside entries of page 0 that are several tokens' at once."""
    rng = np.random.default_rng(0)
    Z = 32 if dtype == BYTES else DIMS.Z
    pool_PZKH = rng.standard_normal((5, Z, K, H)).astype(np.float32)
    width = stored_width(INT8, H) if dtype == BYTES else H
    old = (jnp.array([3, 2, 0, 0, 0]), jnp.array([5, 1, 0, 3, 0]))
    new = (jnp.array([3, 4, 0, 0, 0]), jnp.array([4, 0, 0, 0, 3]))
    moved = {}
    for name in ("ref", "hopper", "dense"):
        attn = backend(name, "cpu")
        pool = pool_PZKH.swapaxes(1, 2) if attn.kv_axis == 1 else pool_PZKH
        kept = attn.kv_dtype(dtype)
        vectors = [stored(jnp.asarray(x), kept, width) for x in (pool, -pool)]
        kv = attn.move(tuple(part for x in vectors for part in attn.parts(x)), old, new)
        n = len(kv) // 2
        both = [jnp.concatenate(kv[i : i + n], axis=-1) for i in (0, n)]
        both = np.asarray(jnp.stack([widened(x, H) for x in both]), np.float32)[:, 1:]
        moved[name] = both.swapaxes(2, 3) if attn.kv_axis == 1 else both
    np.testing.assert_array_equal(moved["hopper"], moved["ref"])
    np.testing.assert_array_equal(moved["dense"], moved["ref"])


def test_a_level_of_a_tree_agrees_with_ref() -> None:
    """A drafter's pass: tokens of one depth that see some of the entries before them."""
    mask = DraftMask(((True, False, True, False), (False, True, False, True)), (0, 0, 1, 1))
    bucket, outs = Bucket(D=2, P=0, F=0, J=2), []
    for name in ("ref", "hopper"):
        attn = backend(name, "cpu")
        rng = np.random.default_rng(5)
        rows = [Row([1, 2, 3], 33, [1, 1]), Row([4], 2, [1, 1])]
        shape = attn.kv_shape(K, H, 6, Z)
        pool = jnp.asarray(rng.standard_normal((2, 6, Z, K, H)), jnp.bfloat16)
        pool = pool.swapaxes(2, 3) if attn.kv_axis == 1 else pool
        assert pool.shape[1:] == shape
        buf = pack(bucket, DIMS, attn, rows, [])
        zeros = jnp.zeros(DIMS.C, jnp.int32)
        view = unpack(
            jnp.asarray(buf), layout(bucket, DIMS, {}), bucket, DIMS, NoSlots(zeros, zeros)
        )
        view = replace(view, tree=mask)
        q = jnp.asarray(rng.standard_normal((4, K * G, H)), jnp.bfloat16)
        outs.append(attn.attend(AttendArgs(q_TNH=q, window=20, scale=0.2), tuple(pool), view))
    np.testing.assert_allclose(outs[1], outs[0], atol=2e-2)


BF16 = KVStored(jnp.dtype(jnp.bfloat16))


def heads(H: int) -> Attention:
    return Attention(N=4, K=2, H=H)


@pytest.mark.parametrize(
    ("H", "kv", "shape", "field"),
    [
        (80, BF16, (), "attention_backend"),
        (256, KVStored(E4M3), (), "kv_cache_dtype"),
        (256, BF16, TREE, "speculative.tree"),
        (256, KVStored(BYTES, INT8), (), "kv_cache_dtype"),
        (128, KVStored(BYTES, INT4), (), "kv_cache_dtype"),
        (128, KVStored(BYTES, "float32"), (), "kv_cache_dtype"),
        (64, KVStored(BYTES, INT8, 16), (), "page_size"),
    ],
)
def test_what_is_not_served_is_refused_by_option(
    H: int, kv: KVStored, shape: TreeShape, field: str
) -> None:
    attn = backend("hopper", "cuda")
    with pytest.raises(ConfigError, match=field) as e:
        attn.check(heads(H), kv, shape)
    assert e.value.field == field
    attn.check(heads(256), BF16, ())
    attn.check(heads(128), KVStored(E4M3), TREE)
    attn.check(heads(64), KVStored(BYTES, INT8, 32), TREE)
    attn.check(heads(256), KVStored(BYTES, "bfloat16", 16), ())


def test_layers_that_are_not_served_are_refused_by_family() -> None:
    attn, bf16 = backend("hopper", "cuda"), jnp.dtype(jnp.bfloat16)
    arch = find("llama-3.1-8b").arch
    check_layers(attn, resized(arch, sink_logits=True), bf16, (), 64)
    skips = with_kv_forms(arch, INT8, ("0",), "bfloat16")
    check_layers(attn, skips, BYTES, TREE, 32)
    with pytest.raises(ConfigError, match="page_size 16"):
        check_layers(attn, skips, BYTES, (), 16)
    with pytest.raises(ConfigError, match=INT4):
        check_layers(attn, with_kv_forms(arch, INT4, ("0",), "bfloat16"), BYTES, (), 64)
    with pytest.raises(ConfigError, match=arch.family) as e:
        check_layers(attn, resized(arch, chunk=64), bf16, (), 64)
    assert e.value.field == "attention_backend"


def test_window_agrees_with_ref() -> None:
    np.testing.assert_allclose(step("hopper", "mixed", 25), step("ref", "mixed", 25), atol=2e-2)


def test_pages_given_back_are_not_missed() -> None:
    want = step("hopper", "mixed", 25)
    np.testing.assert_array_equal(step("hopper", "mixed", 25, release=True), want)


def test_padding_writes_nothing() -> None:
    bucket = Bucket(D=2, P=0, F=0)
    attn = backend("hopper", "cpu")
    fields = layout(bucket, DIMS, {})
    zeros = jnp.zeros(DIMS.C, jnp.int32)
    buf = jnp.asarray(pack(bucket, DIMS, attn, [Row([3], 2, [1])], []))
    view = unpack(buf, fields, bucket, DIMS, NoSlots(zeros, zeros))
    empty = jnp.zeros(attn.kv_shape(K, H, 5, Z), jnp.bfloat16)
    new = jnp.ones((2, K, H))
    keys, values = (
        np.asarray(x, np.float32) for x in attn.write_kv((empty, empty), new, new, view)
    )
    want = np.zeros(keys.shape, np.float32)
    want[3, :, 2] = 1
    np.testing.assert_array_equal(keys, want)
    np.testing.assert_array_equal(values, want)


def test_old_jax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with pytest.raises(ConfigError, match=r"needs jax 0\.11") as e:
        backend("hopper", "cuda")
    assert e.value.field == "attention_backend"
