"""Microseconds that a compiled call costs before any work, by number of array arguments.

    python -m bench.dispatch [--json FILE]

Each argument is a tiny donated or kept array, as the state and the weights of a step are. The
figure is the time until the call returns, so it is what ``ModelRunner.launch`` pays per step on top
of packing. Buffers go down as numpy, as in the runner, or as a device array put there first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import report
from bench.probe import record

ARGUMENTS = ((2, 1), (16, 8), (64, 24), (98, 38), (194, 70), (130, 70), (194, 8), (130, 8))
"""(kept, donated) of each measured call."""


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


def measure(n_kept: int, n_donated: int, repeats: int = 300) -> dict[str, Any]:
    """One line of the record: the two counts, and the microseconds from either kind of buffer."""
    numpy_us, device_us = (
        round(call_us(n_kept, n_donated, put=put, repeats=repeats), 1) for put in (False, True)
    )
    return {
        "kept": n_kept,
        "donated": n_donated,
        "numpy_buffer_us": numpy_us,
        "device_buffer_us": device_us,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.dispatch", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repeats", type=int, default=300, help="calls of each kind (300)")
    parser.add_argument("--json", type=Path, default=None, help="result file to write")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    print(f"kept  donated   numpy buffer us   device buffer us (median of {args.repeats})")
    lines = []
    for counts in ARGUMENTS:
        lines.append(line := measure(*counts, args.repeats))
        print(
            "{kept:4d}  {donated:7d}   {numpy_buffer_us:15}   {device_buffer_us:16}".format(**line)
        )
    if args.json is not None:
        report.write(record("dispatch", {"repeats": args.repeats}, lines), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
