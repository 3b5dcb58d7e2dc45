"""The pool and the table: who holds which page, in what order they come back."""

import numpy as np
import pytest

from jserve.kv.pages import PagePool, PageTable


def test_scratch_is_never_handed_out():
    pool = PagePool(5)
    assert pool.take(4) == [1, 2, 3, 4]
    assert pool.n_free == 0
    assert pool.n_usable == 4


def test_pages_come_back_in_the_order_of_release():
    pool = PagePool(5)
    pool.take(4)
    pool.drop([3])
    pool.drop([1, 4])
    assert pool.free_pages() == (3, 1, 4)
    assert pool.take(2) == [3, 1]


def test_a_shared_page_is_free_only_after_its_last_holder():
    pool = PagePool(3)
    pages = pool.take(1)
    pool.share(pages)
    assert pool.drop(pages) == 0
    assert pool.n_free == 1
    assert pool.drop(pages) == 1
    assert pool.n_free == 2


@pytest.mark.parametrize("wrong", ["take", "share", "drop"])
def test_misuse_is_an_assertion(wrong):
    pool = PagePool(3)
    with pytest.raises(AssertionError, match="free"):
        pool.take(3) if wrong == "take" else getattr(pool, wrong)([1])


def test_a_pool_needs_a_page_besides_scratch():
    with pytest.raises(ValueError, match="1 pages"):
        PagePool(1)


def test_table_snapshot_does_not_move():
    table = PageTable(3, 4)
    table.append(1, 0, [7, 8])
    seen = table.snapshot([1, 2], 3)
    table.append(1, 2, [9])
    table.clear(1, 1)
    np.testing.assert_array_equal(seen, [[7, 8, 0], [0, 0, 0]])
    np.testing.assert_array_equal(table.rows[1], [0, 8, 9, 0])
    assert seen.dtype == np.int32
