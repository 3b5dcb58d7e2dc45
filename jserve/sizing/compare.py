"""Prices the steps of several shardings on a device that need not be there.

A device multiplies its share of the weights with all tokens of a step and reads them once; then come the collectives,
one after the other. Attention, whose share of these two steps is small, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.sharding import Sharding
from jserve.sim.roofline import CHIPS, Chip
from jserve.sizing.explain import Collective, Explained, explain_sharding

SENT = {"all-reduce": 2.0, "all-gather": 1.0, "all-to-all": 1.0, "reduce-scatter": 1.0}
"""Bytes that a device sends of a collective's result, times (n - 1) / n."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrice:
    """One program of a sharding."""

    decode_rows: int
    prefill_tokens: int
    collectives: int
    collective_mib: float
    """Of their results on a device."""
    collective_ms: float
    step_ms: float
    """Collectives among it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A sharding, and what its steps take on a kind of device."""

    sharding: Sharding
    devices: int
    device_bytes: int
    """Of weights."""
    steps: tuple[StepPrice, ...]
    """() where mode auto has more devices than this process."""


def priced(
    model: str,
    sharding: Sharding | Mapping[str, Any] | str | Path,
    device: str,
    *,
    dtype: str = "auto",
) -> Priced:
    """Prices a step of eight sequences and one of 256 prompt tokens under ``sharding``.

    Raises:
        ConfigError: an unknown device, or as ``explain_sharding``.
    """
    if device not in CHIPS:
        raise ConfigError(
            f"device must be one of {', '.join(CHIPS)}, not {device!r}", field="device"
        )
    explained = explain_sharding(model, sharding, dtype=dtype)
    return Priced(
        sharding=explained.sharding,
        devices=explained.sharding.n_devices,
        device_bytes=explained.device_bytes,
        steps=tuple(_steps(explained, CHIPS[device])),
    )


def _steps(explained: Explained, chip: Chip) -> list[StepPrice]:
    numbers = sum(w.device_bytes / jnp.dtype(w.dtype).itemsize for w in explained.weights)
    sizes, found = dict(explained.sharding.mesh), []
    for program in explained.programs:
        if program.collectives is None:
            return []
        tokens = program.decode_rows + program.prefill_tokens
        read = explained.device_bytes / chip.bytes_per_s
        limit = max(read, 2 * numbers * tokens / chip.flops)
        links = sum(_link_s(c, sizes, chip) for c in program.collectives)
        found.append(
            StepPrice(
                decode_rows=program.decode_rows,
                prefill_tokens=program.prefill_tokens,
                collectives=sum(c.count for c in program.collectives),
                collective_mib=sum(c.n_bytes for c in program.collectives) / 2**20,
                collective_ms=links * 1e3,
                step_ms=(limit / chip.reached + links + chip.step_s) * 1e3,
            )
        )
    return found


def _link_s(collective: Collective, sizes: Mapping[str, int], chip: Chip) -> float:
    """Of collectives that are alike. Those of mode auto do not say whom they join: all devices."""
    if not chip.link_bytes_per_s:
        return 0.0
    n = math.prod(sizes[axis] for axis in collective.axes or sizes)
    sent = SENT.get(collective.op, 1.0) * collective.n_bytes * (n - 1) / n
    return collective.count * chip.link_s + sent / chip.link_bytes_per_s
