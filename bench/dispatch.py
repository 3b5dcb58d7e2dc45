"""Microseconds that a compiled call costs before any work, by number of array arguments.

    python -m bench.dispatch

Each argument is a tiny donated or kept array, as the state and the weights of a step are. The
figure is the time until the call returns, so it is what ``ModelRunner.launch`` pays per step on top
of packing. Buffers go down as numpy, as in the runner, or as a device array put there first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def make_call(n_kept: int, n_donated: int) -> tuple[Callable[..., Any], list[Any], list[Any]]:
    """A compiled call of that many arguments beside its buffer, and the arguments."""

    def step(kept: list[Any], state: list[Any], buf: jax.Array) -> tuple[list[Any], jax.Array]:
        return [state[0] + buf[0], *state[1:]], buf[:4] + kept[0][0].astype(jnp.int32)

    kept = [jnp.zeros(8) + i for i in range(n_kept)]
    state = [jnp.zeros(8) for _ in range(n_donated)]
    buf = jax.ShapeDtypeStruct((256,), jnp.int32)
    compiled = jax.jit(step, donate_argnums=(1,)).lower(kept, state, buf).compile()
    return compiled, kept, state


def call_us(n_kept: int, n_donated: int, *, put: bool, repeats: int = 300) -> float:
    """Median microseconds of one call, the transfer of its buffer included."""
    call, kept, state = make_call(n_kept, n_donated)
    times = []
    for i in range(repeats):
        buf = np.full(256, i, np.int32)
        start = time.perf_counter()
        state, out = call(kept, state, jax.device_put(buf) if put else buf)
        times.append(time.perf_counter() - start)
        out.block_until_ready()
    return statistics.median(times) * 1e6


def main() -> None:
    print("kept  donated   numpy buffer us   device buffer us (median of 300)")
    for n_kept, n_donated in ((2, 1), (16, 8), (64, 24), (98, 38), (194, 70)):
        figures = [call_us(n_kept, n_donated, put=put) for put in (False, True)]
        print(f"{n_kept:4d}  {n_donated:7d}   {figures[0]:15.1f}   {figures[1]:16.1f}")


if __name__ == "__main__":
    main()
