"""What the peers of ``bench.gpu`` share: torch if there is one, its device, and its clock."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

from bench.gpu_record import NotHere

torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None


def device() -> str:
    """Raises NotHere without torch."""
    if torch is None:
        raise NotHere("torch is not installed")
    return "cuda" if torch.cuda.is_available() else "cpu"


def seconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """Median seconds of a call, by CUDA events; by the clock on a CPU."""
    for _ in range(3):
        call()
    if device() == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    times = []
    for _ in range(repeats):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        call()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) / 1e3)
    return statistics.median(times)
