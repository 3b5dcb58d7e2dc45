"""Budgets of ``setmaxnreg``: whatever is asked for, the sum fits the block."""

from __future__ import annotations

import pytest

from pallas_kernels.registers import MOST, compute_budget, pool


def test_the_pool_is_what_ptxas_launches_with() -> None:
    """168 registers a thread for three warpgroups and 128 for four, as its reports say."""
    assert pool(3) == 3 * 168
    assert pool(4) == 4 * 128


@pytest.mark.parametrize("computing", [1, 2, 3, 4])
@pytest.mark.parametrize("loading", [1, 2])
@pytest.mark.parametrize("load", range(24, 80, 8))
def test_budgets_fit_the_block(computing: int, loading: int, load: int) -> None:
    budget = compute_budget(computing, loading, load)
    assert budget % 8 == 0
    assert budget <= MOST
    assert computing * budget + loading * load <= pool(computing + loading)
    # The next larger one would not fit, unless no thread can have more.
    assert budget == MOST or computing * (budget + 8) + loading * load > pool(computing + loading)


def test_three_warpgroups_have_less_than_four() -> None:
    assert compute_budget(2, 1, 56) == 224
    assert compute_budget(2, 1, 24) == 240
    assert compute_budget(2, 1, 40) == 232
    assert compute_budget(2, 2, 56) == 200


def test_a_loader_may_not_take_from_those_that_compute() -> None:
    with pytest.raises(ValueError, match="1 warpgroups with 200 registers"):
        compute_budget(2, 1, 200)
