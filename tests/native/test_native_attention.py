"""Attention by the native kernel against ``ref``, on what bfloat16 keeps of queries, keys and values."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.model import attn_native, attn_ref, native
from jserve.model.attention import AttendArgs, Sinks, candidates
from jserve.native.library import LEVELS, Library

ATTENTIONS = tuple(name for name in LEVELS[1:] if name != "avx512f")
"""avx512f has the code of avx2."""
K, M, P = 2, 6, 101
APART = 2e-5
"""Largest error of a row of few tokens, of outputs of unit size."""
APART_TILES = 6e-3
"""The same where weights of the softmax are rounded to bfloat16."""
WINDOWS = ((0, 0), (20, 0), (20, 3), (33, 18), (1, 1))
"""(window, sinks)."""


@pytest.fixture(params=ATTENTIONS)
def level(request: pytest.FixtureRequest, kernels: Library, level: str) -> str:
    """Each in turn, of those that this processor has; XLA knows the kernels by ``level`` of conftest.py."""
    if request.param not in kernels.levels():
        pytest.skip(f"this processor has no {request.param}")
    return request.param


def lengths(Z: int) -> np.ndarray:
    """Around a block of 16, around a page, none, and all that a row can hold."""
    found = [1, 15, 16, 17, Z - 1, Z, Z + 1, 2 * Z, 2 * Z + 1, 0, 47, M * Z - 1, M * Z]
    return np.asarray(found, np.int32)


def a_view(length_T: np.ndarray, J: int = 1) -> Any:
    """Rows of at most J tokens, which see so many positions (0: padding)."""
    counts = (length_T.reshape(-1, J) > 0).sum(axis=1)
    starts = np.maximum(length_T[::J] - 1, 0)
    return rows_view([(s, n) for s, n in zip(starts, counts, strict=True)], J, D=len(counts))


def rows_view(
    rows: list[tuple[int, int]], J: int = 1, D: int = 0, padding: int = 0, pages: int = M
) -> Any:
    """As much of a StepView as attention reads, of rows on random pages: (position of the first token, tokens) of each.
    The first D are decode rows of J places, the others lie one after the other, with padding at the end."""
    rng, R = np.random.default_rng(3), len(rows)
    table = np.stack([rng.permutation(P - 1)[:pages] + 1 for _ in rows]).astype(np.int32)
    start, count = (np.asarray(x, np.int32) for x in zip(*rows, strict=True))
    first = np.concatenate([np.arange(D) * J, D * J + np.cumsum(count[D:]) - count[D:]])
    T = D * J + int(count[D:].sum()) + padding
    row_T, pos_T = np.full(T, R, np.int32), np.full(T, -1, np.int32)
    for r in range(R):
        at = slice(first[r], first[r] + count[r])
        row_T[at], pos_T[at] = r, start[r] + np.arange(count[r])
    return SimpleNamespace(
        D=D,
        J=J,
        P=T - D * J,
        tree=None,
        page_table_RM=jnp.asarray(table),
        start_R=jnp.asarray(start),
        count_R=jnp.asarray(count),
        first_R=jnp.asarray(first.astype(np.int32)),
        pos_T=jnp.asarray(pos_T),
        row_T=jnp.asarray(row_T),
    )


@dataclasses.dataclass
class Setting:
    args: AttendArgs
    view: Any
    pools: list[np.ndarray]
    """float32[P, K, Z, H], values of bfloat16."""


def drawn(Z: int, H: int, G: int, window: int, sinks: int, view: Any) -> Setting:
    rng = np.random.default_rng([Z, H, G, window])
    T = len(view.pos_T)

    def queries() -> jax.Array:  # so that the scaled ones are bfloat16
        q = rng.standard_normal((T, K * G, H)).astype(jnp.bfloat16).astype(np.float32)
        return jnp.asarray(q / 0.125)

    far = Sinks(n=sinks, q_TNH=queries()) if sinks else None
    args = AttendArgs(q_TNH=queries(), window=window, scale=0.125, sinks=far)
    pools = [rng.standard_normal((P, K, Z, H)) * size for size in (2 * H**-0.5, 1.0)]
    return Setting(args, view, [x.astype(jnp.bfloat16).astype(np.float32) for x in pools])


def got(s: Setting, level: str) -> np.ndarray:
    kv = tuple(jnp.asarray(x.astype(jnp.bfloat16).view(np.uint16)) for x in s.pools)
    with native.kernels(level):
        assert native.attends(kv[0], s.args.q_TNH.shape[1] // K)
        return np.asarray(jax.jit(lambda kv: attn_native.attend(s.args, kv, s.view))(kv))


def wanted(s: Setting) -> np.ndarray:
    kv = tuple(jnp.asarray(x.swapaxes(1, 2)) for x in s.pools)
    return np.asarray(attn_ref.attend(s.args, kv, s.view))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("window", "sinks"), WINDOWS)
@pytest.mark.parametrize(("Z", "H"), [(16, 64), (32, 128)])
def test_attention_is_that_of_the_reference(level, Z, H, window, sinks):
    s = drawn(Z, H, 2, window, sinks, a_view(lengths(Z)))
    np.testing.assert_allclose(got(s, level), wanted(s), atol=APART)


@pytest.mark.parametrize("G", [1, 3, 4, 8, 16])
def test_query_heads_of_a_kv_head(level, G):
    s = drawn(16, 64, G, 20, 3, a_view(lengths(16)))
    np.testing.assert_allclose(got(s, level), wanted(s), atol=APART)


PREFILL = [
    (0, 1),
    (0, 9),
    (0, 33),
    (3, 16),
    (0, 64),
    (5, 17),
    (0, 0),
    (16, 32),
    (31, 65),
    (47, 31),
    (15, 8),
    (62, 20),
]
"""(start, tokens) of prefill rows: below, at and beyond a tile, half of one and a block, from any place of a page. The
first token of the last one sees all but one of the positions that are scored at once."""


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("window", "sinks"), WINDOWS)
@pytest.mark.parametrize(("Z", "H"), [(16, 64), (32, 128)])
def test_tiles_are_those_of_the_reference(level, Z, H, window, sinks):
    rows = [(M * Z - 40, 40) if n == 0 else (start, n) for start, n in PREFILL]
    s = drawn(Z, H, 2, window, sinks, rows_view(rows, padding=3))
    found = got(s, level)
    np.testing.assert_allclose(found, wanted(s), atol=APART_TILES)
    assert (found[-3:] == 0).all()


@pytest.mark.parametrize("G", [1, 3, 8, 16])
def test_query_heads_in_tiles(level, G):
    s = drawn(16, 32, G, 20, 3, rows_view(PREFILL))
    np.testing.assert_allclose(got(s, level), wanted(s), atol=APART_TILES)


@pytest.mark.parametrize(("H", "window", "sinks"), [(64, 0, 0), (96, 20, 3), (256, 0, 0)])
def test_decode_and_prefill_rows_in_one_step(level, H, window, sinks):
    decode = [(40, 1), (0, 0), (70, 3), (8, 2)]
    view = rows_view([*decode, *PREFILL], J=3, D=len(decode), padding=7)
    s = drawn(16, H, 2, window, sinks, view)
    found, n = got(s, level), 3 * len(decode)
    np.testing.assert_allclose(found, wanted(s), atol=APART_TILES)
    np.testing.assert_allclose(found[:n], wanted(s)[:n], atol=APART)
    assert (found[np.asarray(s.view.pos_T) < 0] == 0).all()


def test_a_tile_knows_nothing_of_what_it_may_not_see(level):
    """NaN and infinity beyond a row's last token, behind the first one's window, and in pages of nobody."""
    Z, window, rows = 16, 20, [(24, 20), (0, 33), (50, 12)]
    view = rows_view(rows)
    s = drawn(Z, 64, 2, window, 0, view)
    clean, seen = got(s, level), np.zeros((P, Z), bool)
    for row, (start, n) in enumerate(rows):
        for pos in range(max(start + 1 - window, 0), start + n):
            seen[np.asarray(view.page_table_RM)[row, pos // Z], pos % Z] = True
    for pool, bad in zip(s.pools, (np.nan, -np.inf), strict=True):
        pool.swapaxes(1, 2)[~seen] = bad
    assert np.array_equal(got(s, level), clean)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_in_a_tile(level, bad):
    """A key shows in the tokens of its row that see it, a value reads as zero."""
    view = rows_view([(0, 40), (0, 40)])
    s = drawn(16, 64, 2, 0, 0, view)
    page = int(np.asarray(view.page_table_RM)[0, 1])
    assert page not in np.asarray(view.page_table_RM)[1, :3]
    s.pools[1][page, 1, 3, 9] = 0.0
    clean = got(s, level)
    s.pools[1][page, 1, 3, 9] = bad
    assert np.array_equal(got(s, level), clean)
    s.pools[0][page, 0, 5, 7] = bad
    found = got(s, level)
    assert np.isnan(found[21:40, :2]).all(), "position 21 and later, queries of kv head 0"
    assert np.array_equal(found[:21], clean[:21])
    assert np.array_equal(found[:, 2:], clean[:, 2:])
    assert np.array_equal(found[40:], clean[40:])


def test_scores_far_apart_in_tiles(level):
    s = drawn(16, 64, 1, 0, 0, rows_view([(0, 96)]))
    s.pools[0] *= 64
    np.testing.assert_allclose(got(s, level), wanted(s), atol=APART_TILES)
    s.pools[0][..., 0] = -512.0
    q = np.asarray(s.args.q_TNH).copy()
    q[..., 0] = 8.0
    s.args = dataclasses.replace(s.args, q_TNH=jnp.asarray(q))
    np.testing.assert_allclose(got(s, level), wanted(s), atol=APART_TILES)


@pytest.mark.parametrize("row", [(M * 16 - 1, 2), (-1, 1), (0, 5)])
def test_rows_beyond_their_arrays_are_refused(level, row):
    view = rows_view([(0, 4)])
    view.start_R, view.count_R = (jnp.asarray([x], jnp.int32) for x in row)
    with pytest.raises(Exception, match="beyond their arrays"):
        got(drawn(16, 64, 1, 0, 0, view), level)


def test_writes_are_those_of_xla(level):
    """In place, rounded as XLA rounds, and nothing for scratch and for a page that does not exist."""
    Z, H, T = 16, 32, 75
    rng = np.random.default_rng(5)
    places = rng.permutation((P - 1) * Z)[:T]
    page_T, off_T = (places // Z + 1).astype(np.int32), (places % Z).astype(np.int32)
    page_T[3], page_T[4], page_T[70] = 0, P, P + 7
    view = SimpleNamespace(write_page_T=jnp.asarray(page_T), write_off_T=jnp.asarray(off_T))
    new = [rng.standard_normal((T, K, H)).astype(np.float32) for _ in range(2)]
    new[0][5, 0, :3] = np.inf, -np.inf, np.nan
    new[1][6, 1, 0] = np.float32(1 + 2**-8)  # halfway: to the even one
    kv = tuple(jnp.asarray(rng.integers(0, 2**16, (P, K, Z, H)), jnp.uint16) for _ in range(2))
    with native.kernels(level):
        write = jax.jit(lambda kv: attn_native.write_kv(kv, new[0], new[1], view))
        assert "jserve.write_kv" in write.lower(kv).as_text()
        found = write(kv)
    for got, want in zip(found, attn_native.XLA.write_kv(kv, *new, view), strict=True):
        got, want = (np.asarray(x).view(jnp.bfloat16)[1:].astype(np.float32) for x in (got, want))
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(found[0][0], kv[0][0])


@pytest.mark.parametrize(
    ("window", "sinks"), [pytest.param(0, 0, marks=pytest.mark.slow), (270, 3)]
)
def test_contexts_beyond_what_is_scored_at_once(level, window, sinks):
    starts = (254, 255, 256, 300, 511, 512, 600)
    s = drawn(16, 64, 3, window, sinks, rows_view([(n, 1) for n in starts], pages=40))
    np.testing.assert_allclose(got(s, level), wanted(s), atol=APART)
    s = drawn(16, 64, 1, window, sinks, rows_view([(n, 33) for n in starts], pages=40))
    np.testing.assert_allclose(got(s, level), wanted(s), atol=APART_TILES)


def test_drafts_in_a_chain_see_one_another(level):
    length_T = np.asarray([31, 32, 33, 1, 2, 0, 64, 65, 66], np.int32)
    s = drawn(16, 64, 2, 0, 0, a_view(length_T, J=3))
    np.testing.assert_allclose(got(s, level), wanted(s), atol=APART)


def test_what_nobody_may_see_changes_nothing(level):
    """NaN and infinity beyond a row's length, behind its window, and in pages of nobody."""
    Z, window = 16, 20
    view = a_view(lengths(Z))
    s = drawn(Z, 64, 2, window, 0, view)
    clean, seen = got(s, level), np.zeros((P, Z), bool)
    table = np.asarray(view.page_table_RM)
    for row, n in enumerate(lengths(Z)):
        for pos in range(max(n - window, 0), n):
            seen[table[row, pos // Z], pos % Z] = True
    for pool, bad in zip(s.pools, (np.nan, -np.inf), strict=True):
        pool.swapaxes(1, 2)[~seen] = bad
    assert np.array_equal(got(s, level), clean)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_key_that_is_not_finite_shows_in_its_row_alone(level, bad):
    view = a_view(np.asarray([40, 40, 40], np.int32))
    s = drawn(16, 64, 2, 0, 0, view)
    clean = got(s, level)
    page = int(np.asarray(view.page_table_RM)[1, 1])
    others = [r for r in (0, 2) if page not in np.asarray(view.page_table_RM)[r, :3]]
    s.pools[0][page, 0, 5, 7] = bad
    found = got(s, level)
    assert np.isnan(found[1, :2]).all(), "queries of kv head 0"
    assert np.array_equal(found[1, 2:], clean[1, 2:])
    assert others
    assert np.array_equal(found[others], clean[others])


def test_a_value_that_is_not_finite_reads_as_zero(level):
    view = a_view(np.asarray([40], np.int32))
    s = drawn(16, 64, 2, 0, 0, view)
    at = int(np.asarray(view.page_table_RM)[0, 0])
    s.pools[1][at, 1, 3, 9] = 0.0
    clean = got(s, level)
    s.pools[1][at, 1, 3, 9] = np.inf
    assert np.array_equal(got(s, level), clean)


def test_scores_far_apart_keep_their_weights(level):
    """A running top that rises by hundreds, and one that is far below zero throughout."""
    view = a_view(np.asarray([64, 64], np.int32))
    s = drawn(16, 64, 1, 0, 0, view)
    s.pools[0] *= 64
    np.testing.assert_allclose(got(s, level), wanted(s), atol=APART)
    s.pools[0][..., 0] = -512.0
    q = np.asarray(s.args.q_TNH).copy()
    q[..., 0] = 8.0
    s.args = dataclasses.replace(s.args, q_TNH=jnp.asarray(q))
    np.testing.assert_allclose(got(s, level), wanted(s), atol=APART)


def test_without_kernels_or_in_pages_of_8_a_step_is_xlas(level):
    assert candidates("auto", "cpu", native=True) == ("native", "xla")
    assert candidates("auto", "cpu") == ("xla",)
    with pytest.raises(ConfigError, match="attention_backend native"):
        candidates("native", "cpu")
    pool = jax.ShapeDtypeStruct((4, K, 8, 64), jnp.uint16)
    with native.kernels(level):
        assert not native.attends(pool, 2), "pages of 8 tokens"  # type: ignore[arg-type]
