"""Every row of the table of variants in the interpreter, and what the table must hold."""

from __future__ import annotations

from itertools import product

import pytest

from jserve.config import CacheOptions
from pallas_kernels.served import DTYPES, HEAD_DIMS, WIDEST_SPECIAL
from tests.pallas_kernels import test_paged_attention as decode, test_ragged_prefill as prefill
from tests.pallas_kernels.cases import B
from tests.pallas_kernels.variants import CHAINS, F8, I8, VARIANTS, Variant

PAGES = set(CacheOptions.__dataclass_fields__["page_size"].metadata["choices"]) - {
    0
}  # 0: the device's own
LONG = {
    "16 heads, 16 tokens",
    "tree of 16",
    "tree of 16, 8 bits, everything",
    "tree of 16, int8, everything",
    "tree, window",
    "wide, everything",
}
"""Rows of many tiles, which take the interpreter long."""


def rows(names: dict[str, Variant]) -> list:
    return [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in names]


@pytest.mark.parametrize("name", rows(VARIANTS))
def test_decode_rows(name: str) -> None:
    """A row that crosses a block, one that begins, one that uses fewer places, one of nobody."""
    v = VARIANTS[name]
    first = v.tree.n_before if v.tree else 0
    spans = ((2 * B - 2, v.tokens), (first, v.tokens), (70, min(2, v.tokens)), (0, 0))
    decode.run(
        spans, J=v.tokens, G=v.G, K=min(v.K, 2), H=v.H, Z=v.Z, dtype=v.dtype,
        scaled=v.dtype == F8, sinks=v.sinks, tree=v.tree, **v.static,
    )  # fmt: skip


@pytest.mark.parametrize("name", rows(CHAINS))
def test_prefill_chunks(name: str) -> None:
    """A late chunk that crosses a block, one that begins, one token, nobody."""
    v = CHAINS[name]
    prefill.run(
        ((100, 30), (0, 3), (B, 1), (0, 0)), G=v.G, K=min(v.K, 2), H=v.H, Z=v.Z, dtype=v.dtype,
        scaled=v.dtype == F8, sinks=v.sinks, gap=2, **v.static,
    )  # fmt: skip


AXES = {
    "H": set(HEAD_DIMS),
    "dtype": set(DTYPES),
    "Z": PAGES,
    "window": {True, False},
    "soft_cap": {True, False},
    "sinks": {True, False},
    "tree": {True, False},
}


def value(v: Variant, axis: str) -> object:
    found = getattr(v, axis)
    return bool(found) if axis in ("window", "soft_cap", "sinks", "tree") else found


@pytest.mark.parametrize("axis", AXES)
def test_no_value_is_missing(axis: str) -> None:
    assert {value(v, axis) for v in VARIANTS.values()} == AXES[axis]
    if axis != "tree":
        assert {value(v, axis) for v in CHAINS.values()} == AXES[axis], "of prefill"


def test_groups_and_tokens_go_from_one_to_sixteen() -> None:
    for found in ({v.G for v in VARIANTS.values()}, {v.tokens for v in VARIANTS.values()}):
        assert min(found) == 1
        assert max(found) == 16
        assert any(n % 2 for n in found if n > 1)


@pytest.mark.parametrize(
    ("a", "b"),
    [(a, b) for a in ("H", "dtype", "tree") for b in AXES if a != b and b != "Z"],
)
def test_no_pair_is_missing(a: str, b: str) -> None:
    found = {(value(v, a), value(v, b)) for v in VARIANTS.values()}
    missing = set(product(AXES[a], AXES[b])) - found
    assert not {pair for pair in missing if not refused(dict(zip((a, b), pair, strict=True)))}


def refused(wish: dict[str, object]) -> bool:
    special = wish.get("dtype") in (F8, I8) or wish.get("tree")
    return bool(special) and wish.get("H", 0) > WIDEST_SPECIAL  # type: ignore[operator]
