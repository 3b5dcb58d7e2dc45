"""Arrays on huge pages: which regions are asked for, and that values stay where and what they are."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jserve.runner.huge_pages import REGION, HugePages, regions, use_huge_pages

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes() -> int:
    """Bytes of this process on huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


needs_them = pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text(), reason="this system has no huge pages"
)
spans = st.lists(
    st.tuples(st.integers(0, 40 * REGION), st.integers(1, 3 * REGION)).map(
        lambda at: (at[0], at[0] + at[1])
    ),
    max_size=12,
)


@given(spans)
def test_regions_are_the_whole_ones_that_touch_a_span(spans):
    touched = {n for a, b in spans for n in range(a // REGION, -(-b // REGION))}
    runs = regions(spans)
    assert [n for a, b in runs for n in range(a // REGION, b // REGION)] == sorted(touched)
    assert all(a % REGION == b % REGION == 0 for a, b in runs)
    assert all(runs[i][1] < runs[i + 1][0] for i in range(len(runs) - 1))  # as few as there can be


@needs_them
def test_arrays_move_in_place():
    tree = {"w": [jnp.full((1 << 20,), i, jnp.float32) for i in range(8)], "b": jnp.ones(3)}
    jax.block_until_ready(tree)
    where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]
    before = huge_bytes()
    moved = HugePages(tree).wait()
    if not moved:
        pytest.skip("this kernel moves nothing at once, or has no free huge pages")
    assert moved >= 28 << 20  # all but the ends of a run
    assert huge_bytes() >= before + (20 << 20)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)] == where
    for i, x in enumerate(tree["w"]):
        np.testing.assert_array_equal(x, i)


def test_small_arrays_are_left_alone():
    assert use_huge_pages([jnp.ones(100)]) == 0
    assert use_huge_pages({}) == 0
