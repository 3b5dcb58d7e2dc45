"""Register budgets of warp-specialised kernels: ``setmaxnreg`` moves registers between warpgroups.

A block is launched with the same number of registers in every thread, so its pool is that number times its
warpgroups. ``setmaxnreg.inc`` blocks until the pool can serve it: budgets that sum to more than the pool
hang the kernel, and neither the compiler nor an interpreter reports that.

Source: PTX ISA, ``setmaxnreg``; CUDA programming guide, registers per multiprocessor.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # its names differ between releases of jax

PER_BLOCK = 65536
"""32-bit registers that one block may have on sm_90."""
UNIT = 8
"""Registers of a thread are given out in multiples of this."""
MOST = 240
"""The most that ptxas honours for a thread that computes (255 can be named, less some reserved)."""


def pool(warpgroups: int) -> int:
    """Registers per thread, summed over the ``warpgroups`` of a block that has a multiprocessor to itself."""
    return PER_BLOCK // (128 * warpgroups) // UNIT * UNIT * warpgroups


def compute_budget(computing: int, loading: int, load_budget: int) -> int:
    """Registers per thread of each of ``computing`` warpgroups, if ``loading`` others keep ``load_budget``.

    Raises:
        ValueError: the loading warpgroups leave less than the block was launched with.
    """
    warpgroups = computing + loading
    left = (pool(warpgroups) - loading * load_budget) // computing // UNIT * UNIT
    if left < pool(warpgroups) // warpgroups:
        raise ValueError(
            f"{loading} warpgroups with {load_budget} registers leave {left} for {computing}"
        )
    return min(left, MOST)


def set_compute(computing: int, loading: int, load_budget: int) -> None:
    """Inside a kernel: a computing warpgroup takes what the loading ones leave."""
    budget = compute_budget(computing, loading, load_budget)
    plgpu.set_max_registers(budget, action="increase")


def set_load(load_budget: int) -> None:
    """Inside a kernel: a loading warpgroup keeps ``load_budget`` registers per thread."""
    plgpu.set_max_registers(load_budget, action="decrease")
