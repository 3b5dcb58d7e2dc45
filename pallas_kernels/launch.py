"""Launches kernels where there is no GPU.

It owns the parameters of the Mosaic interpreter.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # its names differ between releases of jax


def interpreter(*, detect_races: bool = False) -> Any:
    """The value of ``interpret`` so that a kernel runs on a CPU (jax 0.11 or later): shared
    memory begins as NaN and barriers are checked. ``detect_races`` prints a line with RACE for two
    accesses that no barrier puts in order."""
    return plgpu.InterpretGPUParams(detect_races=detect_races)
