"""Latent attention in the Mosaic interpreter against float64, and the reference against it too."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jserve.config import CacheOptions
from pallas_kernels.mla_attention import LatentPages, LatentSpec, chunks, mla_chunks, ref, unserved
from pallas_kernels.mla_attention.api import DTYPES, MAX_TOKENS, MOST_VALUES, tile_of, tiles_of
from pallas_kernels.spec import Chunks
from tests.pallas_kernels.cases import DECODE, PREFILL, VERIFY, B
from tests.pallas_kernels.latents import VARIANTS, Latents, run_chunks, run_rows

SMALL = Latents(N=4, A=128, Z=16)


def few(names: Any, *default: str) -> list:
    """In the default tier the ``default`` ones: the interpreter takes ten seconds for each."""
    return [n if n in default else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("case", few(DECODE, "page and block borders", "one long, rest short"))
def test_decode_rows(case: str) -> None:
    run_rows(SMALL, DECODE[case])


@pytest.mark.parametrize("case", few(VERIFY, "fewer drafts than places"))
def test_rows_of_several_tokens(case: str) -> None:
    """One tile of three tokens, and rows of two tiles of which the last holds tokens beyond the row's length."""
    run_rows(Latents(N=4, J=3, A=128, Z=16), VERIFY[case])


@pytest.mark.slow
def test_rows_of_several_tiles() -> None:
    run_rows(Latents(N=48, J=3, A=128, Z=16), ((62, 1), (B - 1, 3), (0, 2), (0, 0)))


@pytest.mark.parametrize("case", few(PREFILL, "prefixes of all kinds"))
def test_chunks_of_prompts(case: str) -> None:
    run_chunks(SMALL, PREFILL[case])


@pytest.mark.slow
@pytest.mark.parametrize("N", [3, 24, 128])
def test_chunks_of_any_number_of_heads(N: int) -> None:
    """A token's heads in several tiles, or a tile of tokens that end within it."""
    run_chunks(Latents(N=N, A=128, Z=32), ((B - 2, 5), (0, 1), (0, 0), (3, 9)), gap=1)


@pytest.mark.parametrize("name", few(VARIANTS, "v2-lite"))
def test_variants_of_rows(name: str) -> None:
    """A row that crosses a block, one that begins, one that uses fewer places, one of nobody."""
    v = VARIANTS[name]
    run_rows(v, ((2 * B - 2, v.J), (0, v.J), (70, min(2, v.J)), (0, 0)))


@pytest.mark.parametrize("name", few(VARIANTS))
def test_variants_of_chunks(name: str) -> None:
    run_chunks(VARIANTS[name], ((100, 7), (0, 3), (B, 1), (0, 0)), gap=2)


@pytest.mark.slow
@pytest.mark.parametrize("tune", [{"sms": 40}, {"sms": 1}, {"stages": 1}, {"stages": 3}])
def test_tunings_agree(tune: dict[str, int]) -> None:
    """A split a block, one split for all rows, rings of any depth."""
    run_rows(SMALL, ((260, 1), (5, 1), (129, 1)), tune=tune, result=jnp.bfloat16)
    if "stages" in tune:
        run_chunks(SMALL, ((200, 20),), tune=tune)


@pytest.mark.parametrize("name", ["one head", "odd heads, many tokens"])
def test_ref(name: str) -> None:
    v = VARIANTS[name]
    run_rows(v, ((2 * B - 2, v.J), (0, v.J), (0, 0)), kernel=ref.mla_attention)
    run_chunks(v, ((100, 7), (0, 3), (0, 0)), gap=2, kernel=ref.mla_chunks)


def test_tokens_of_nobody_are_zero_in_ref() -> None:
    q, none = jnp.full((4, 2, 192), jnp.nan), jnp.zeros(1, jnp.int32)
    kept = jnp.zeros((2, 16, 192), jnp.bfloat16), none[:, None]
    found = ref.mla_chunks(q, LatentPages(*kept), Chunks(none, none, none), SMALL.spec)
    assert not np.asarray(found).any()


def test_no_tile_crosses_a_sequence() -> None:
    """Every (token, head) pair of every sequence in one tile."""
    count, N = np.array([7, 0, 1, 16, 3], np.int32), 24
    most = chunks.most_tiles(int(count.sum()), len(count), N)
    work = chunks.plan(jnp.asarray(count), N, most)
    n = int(work.n_1[0])
    assert n <= most
    found = [(int(r), int(s)) for r, s in zip(work.row_I[:n], work.skip_I[:n], strict=True)]
    want = [(r, s) for r, c in enumerate(count) for s in range(0, int(c) * N, 64)]
    assert found == want


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "values": ({"A": 192}, "values of 192 numbers"),
    "too many values": ({"A": MOST_VALUES + 128}, "values of 640 numbers"),
    "latents": ({"A": 128, "Y": 32}, "latents of 160 numbers"),
    "nothing beside values": ({"A": 128, "Y": 0}, "latents of 128 numbers"),
    "8 bits": ({"dtype": jnp.float8_e4m3fn}, "float8_e4m3fn, only bfloat16, float16"),
    "pages": ({"Z": 24}, "page size 24"),
    "tokens": ({"J": MAX_TOKENS + 1}, "17 tokens a row"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_named(name: str) -> None:
    change, says = REFUSED[name]
    v = Latents(**change)
    q, pool = np.empty((1, v.J, v.N, v.C)), jnp.empty((1, v.Z, v.C), v.dtype)
    with pytest.raises(ValueError, match=says):
        tiles_of(q, pool, v.spec)


def test_more_blocks_than_shared_memory_holds_are_refused() -> None:
    v = Latents()
    pool, q = jnp.empty((1, 64, v.C), v.dtype), np.empty((1, 16, v.C))
    for tune, fits in (({}, True), ({"stages": 3}, False), ({"register_p": False}, False)):
        spec = LatentSpec(rank=v.A, scale=1.0, tune=tune)
        if fits:
            tile_of(q, pool, spec)
        else:
            with pytest.raises(ValueError, match=r"blocks of 576 numbers take \d+ bytes"):
                tile_of(q, pool, spec)
    with pytest.raises(ValueError, match="queries of 192 numbers"):
        mla_chunks(
            jnp.empty((1, 16, 192)), LatentPages(pool, None), Chunks(*[jnp.zeros(1)] * 3), v.spec
        )


def test_the_table_holds_every_kind() -> None:
    assert {v.dtype for v in VARIANTS.values()} == set(DTYPES)
    pages = set(CacheOptions.__dataclass_fields__["page_size"].metadata["choices"]) - {0}
    assert {v.Z for v in VARIANTS.values()} == pages
    assert {v.A for v in VARIANTS.values()} == set(range(128, MOST_VALUES + 1, 128))
    assert not any(unserved(v.A, v.C, v.dtype) for v in VARIANTS.values())
