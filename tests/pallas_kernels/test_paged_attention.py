"""Paged attention in the Mosaic interpreter against float64, and the reference against it too."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.launch import interpreter
from pallas_kernels.paged_attention import Tree, hopper, paged_attention, ref
from pallas_kernels.paged_attention.api import tile_of
from pallas_kernels.served import multiplied
from pallas_kernels.spec import AttentionSpec, Rows
from tests.pallas_kernels.cases import DECODE, LARGEST, VERIFY, B, attention, inputs
from tests.pallas_kernels.variants import LEVEL

F8 = jnp.float8_e4m3fn

TUNE = {"sms": 6, "split_blocks": 1}
"""Few splits: rows share them and long rows lie in several."""
PLAIN, TUNED = AttentionSpec(scale=1.0), AttentionSpec(scale=1.0, tune=TUNE)


def run(
    spans: Any,
    *,
    J: int = 1,
    G: int = 4,
    K: int = 1,
    H: int = 64,
    Z: int = 16,
    tune: dict[str, int] | None = None,
    sinks: bool = False,
    kernel: Any = None,
    dtype: Any = jnp.bfloat16,
    tree: Tree | None = None,
    scaled: bool = False,
    result: Any = jnp.float32,
    **variant: Any,
) -> None:
    """One call on fresh random inputs, compared token by token."""
    reach = variant.get("window", 0)
    reach += tree.n_before if tree and reach else 0
    data = inputs(spans, K=K, H=H, Z=Z, window=reach, dtype=dtype)
    rng = np.random.default_rng([J, G, H])
    q = rng.standard_normal((len(spans), J, K * G, H))
    q = np.asarray(jnp.asarray(q, multiplied(dtype)), np.float32)
    sinks_N = rng.standard_normal(K * G).astype(np.float32) if sinks else None
    scales = rng.uniform(0.3, 3, (2, K)).astype(np.float32) if scaled else np.ones((2, K))
    static: dict[str, Any] = dict(scale=H**-0.5, **variant)
    kwargs: dict[str, Any] = {"sinks_N": sinks_N, "tree": tree}
    if scaled:
        kwargs["scales_2K"] = jnp.asarray(scales)
    if kernel is None:
        kernel = paged_attention
        static |= {"tune": {**TUNE, **(tune or {})}, "interpret": interpreter()}
        kwargs["dtype"] = result
    pages, rows = data.pages, Rows(data.start, data.length)
    got = np.asarray(kernel(jnp.asarray(q), pages, rows, AttentionSpec(**static), **kwargs))
    assert got.shape == q.shape
    assert got.dtype == result
    got = got.astype(np.float32)
    for r, (start, count) in enumerate(spans):
        if count == 0:
            assert not got[r].any(), "a row without keys is not zero"
        for j in range(count):
            k, v = (x[r] * scales[i][:, None] for i, x in enumerate((data.dense_k, data.dense_v)))
            position, where = start + j, None
            if tree is not None:
                base = start - tree.n_before
                where = tuple(base + i for i, seen in enumerate(tree.sees[j]) if seen)
                position = base + len(where) - 1
            options: Any = dict(scale=H**-0.5, sinks=sinks_N, path=where, **variant)
            want = attention(q[r, j], k, v, position, **options)
            # Weights are rounded to the bits of the values, which is relative to what they sum to.
            error = 4e-3 * max(1, scales.max(), LARGEST * (dtype == jnp.int8))
            near = 2**-9 if result == jnp.float32 else 2**-7
            np.testing.assert_allclose(got[r, j], want, rtol=near, atol=error)


@pytest.mark.parametrize("case", DECODE)
def test_decode_rows(case: str) -> None:
    run(DECODE[case])


@pytest.mark.parametrize("case", VERIFY)
@pytest.mark.parametrize("window", [0, 50])
def test_rows_of_several_tokens(case: str, window: int) -> None:
    run(VERIFY[case], J=3, window=window)


@pytest.mark.parametrize("window", [1, 64, 65, 300])
def test_windows(window: int) -> None:
    run(((200, 1), (3, 1), (63, 1), (0, 0), (128, 1)), window=window)


@pytest.mark.parametrize(("G", "J", "K"), [(1, 1, 2), (2, 1, 3), (7, 1, 1), (16, 1, 1), (5, 16, 1)])
def test_heads_fill_tiles(G: int, J: int, K: int) -> None:
    """Odd groups, an odd number of kv heads (teams split keys) and rows of several tiles."""
    run(((70, J), (5, J)), G=G, J=J, K=K)


TREES = {
    "two branches": Tree.of((-1, 0, 0)),
    "a binary tree": Tree.of((-1, 0, 0, 1, 1, 2, 2)),
    "a comb": Tree.of((-1, 0, 1, 0, 3, 0)),
    "a level": LEVEL,
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("window", [0, 2, 40])
def test_trees_of_drafts(name: str, window: int) -> None:
    """Also where the tree crosses a block, where a row uses less of it, and where the window is
    smaller than the tree is deep."""
    tree = TREES[name]
    J = len(tree.sees)
    run(((B - 2, J), (tree.n_before, J), (90, 2), (0, 0)), J=J, G=2, tree=tree, window=window)


@pytest.mark.parametrize("tune", [{"stages": 1}, {"stages": 3}, {"teams": 1}])
def test_eight_bits_of_every_kind(tune: dict[str, int]) -> None:
    """Long and short rows, a window, a soft cap, sinks and a tree, over rings of any depth."""
    variant: Any = {"window": 150, "soft_cap": 3.0, "sinks": True, "tree": Tree.of((-1, 0, 0))}
    run(((300, 3), (5, 2), (0, 0)), J=3, K=2, dtype=F8, scaled=True, tune=tune, **variant)


@pytest.mark.parametrize("tune", [{"teams": 1}, {"sms": 40}, {"sms": 2}, {"stages": 3}])
def test_tunings_agree(tune: dict[str, int]) -> None:
    run(((260, 1), (5, 1), (129, 1)), tune=tune, K=2, G=1)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_result_is_what_is_asked_for(scaled: bool) -> None:
    dtype = F8 if scaled else jnp.bfloat16
    run(((260, 2), (0, 0), (5, 1)), J=2, K=2, dtype=dtype, scaled=scaled, result=jnp.bfloat16)


@pytest.mark.parametrize("case", DECODE)
def test_ref_decode(case: str) -> None:
    run(DECODE[case], kernel=ref.paged_attention, K=2, window=30)


@pytest.mark.parametrize("name", TREES)
def test_ref_trees(name: str) -> None:
    tree, kernel = TREES[name], ref.paged_attention
    J = len(tree.sees)
    spans = ((60, J), (tree.n_before, 2))
    for window in (2, 20):
        run(spans, J=J, tree=tree, kernel=kernel, window=window, dtype=F8, scaled=True)


@pytest.mark.parametrize("parents", [(), (0,), (-1, 1), (-1, 0, 2), (-1, -1)])
def test_what_is_no_tree_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="parents"):
        Tree.of(parents)


@pytest.mark.parametrize(
    ("sees", "depth"),
    [
        (((True, True),) * 2, (0, 1)),
        (((True, False), (True, False)), (0, 1)),
        (((True,), (True,)), (0, 1)),
        (((True,),) * 2, (0,)),
        (((True,) * 27,), tuple(range(27))),
        (((True, True),), (0, 2)),
    ],
)
def test_shapes_that_are_no_tree_are_refused(sees: Any, depth: Any) -> None:
    with pytest.raises(ValueError, match="tree"):
        Tree(sees, depth)


def test_a_tree_of_other_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="tree of 3 tokens for rows of 2"):
        tile_of(
            np.empty((2, 2, 4, 64)),
            jnp.empty((3, 2, 16, 64), jnp.bfloat16),
            PLAIN,
            tree=TREES["two branches"],
        )


@pytest.mark.parametrize("case", VERIFY)
def test_ref_verify(case: str) -> None:
    run(VERIFY[case], J=3, kernel=ref.paged_attention, soft_cap=2.0, sinks=True)


def test_slots_are_unique_and_blocks_are_shared_equally() -> None:
    """The work list itself: every visible block in one split, no slot used twice."""
    shape = (9, 1, 4, 64)
    tile = tile_of(np.empty(shape), jnp.empty((1, 1, 16, 64), jnp.bfloat16), TUNED)
    length = np.array([0, 700, 1, 64, 0, 65, 128, 3, 900], np.int32)
    rows = Rows(jnp.asarray(np.maximum(length - 1, 0)), jnp.asarray(length))
    work = hopper.plan(rows, tile)
    cum, per = np.asarray(work.cum_E), int(work.per_1[0])
    seen, slots = set(), set()
    for s in range(tile.splits):
        for r in range(int(work.row0_S[s]), int(work.row1_S[s])):
            mine = range(max(cum[r], s * per), min(cum[r + 1], (s + 1) * per))
            if mine:
                assert r + s not in slots
                slots.add(r + s)
                seen.update((r, b - cum[r]) for b in mine)
    assert seen == {(r, b) for r, n in enumerate(length) for b in range(-(-n // 64))}


@pytest.mark.parametrize("least", [1, 4])
@pytest.mark.parametrize("length", [1, 64, 255, 257, 900, 64 * 70])
def test_no_split_is_below_the_floor(length: int, least: int) -> None:
    """The last one has what is left. The floor costs nobody else: with more keys all splits have their part."""
    kv = jnp.empty((1, 1, 16, 64), jnp.bfloat16)
    tune = {"sms": 6, "split_blocks": least}
    tile = tile_of(np.empty((2, 1, 4, 64)), kv, AttentionSpec(scale=1.0, tune=tune))
    lengths = jnp.array([length, 0], jnp.int32)
    per = int(hopper.plan(Rows(jnp.maximum(lengths - 1, 0), lengths), tile).per_1[0])
    blocks = -(-length // 64)
    assert per == max(least, -(-blocks // tile.splits))


def test_the_floor_is_four_blocks() -> None:
    for dtype in (jnp.bfloat16, F8):
        assert (
            tile_of(np.empty((1, 1, 4, 64)), jnp.empty((1, 1, 16, 64), dtype), PLAIN).split_blocks
            == 4
        )


@pytest.mark.parametrize(
    ("q", "kv", "says"),
    [
        ((2, 1, 4, 80), (3, 2, 16, 80), "head dimension 80"),
        ((2, 1, 5, 64), (3, 2, 16, 64), "5 query heads"),
        ((2, 17, 4, 64), (3, 2, 16, 64), "17 tokens"),
        ((2, 1, 4, 64), (3, 2, 12, 64), "page size 12"),
    ],
)
def test_bad_shapes_are_named(q: Any, kv: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tile_of(np.empty(q), jnp.empty(kv, jnp.bfloat16), PLAIN)


def test_wide_heads_have_no_tree_and_no_eight_bits() -> None:
    q = np.empty((2, 3, 4, 256))
    with pytest.raises(ValueError, match="heads of 256"):
        tile_of(q, jnp.empty((3, 2, 16, 256), F8), PLAIN)
    with pytest.raises(ValueError, match="heads of 256"):
        tile_of(q, jnp.empty((3, 2, 16, 256), jnp.bfloat16), PLAIN, tree=Tree.of((-1, 0, 0)))


def test_bad_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="float32"):
        tile_of(np.empty((1, 1, 2, 64)), jnp.empty((1, 1, 16, 64)), PLAIN)
