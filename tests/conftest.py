"""What all tests share: eight CPU devices, set before jax is first imported, and programs let go in time.

A compiled program takes some hundred memory maps, and Linux gives a process 65,530 of them: one that asks for more is
aborted in the compiler. Tests of one worker keep runners in caches for one another, so these are emptied when
the maps run short.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

_FLAG = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

MOST_MAPS, MOST_MAPS_WITHIN = 20_000, 35_000
"""Between modules, and between two tests of one. The largest test adds 17,000."""
_MAPS = Path("/proc/self/maps")


def pytest_runtest_teardown(item: Any, nextitem: Any) -> None:
    if "jax" not in sys.modules or not _MAPS.exists():
        return
    within = nextitem is not None and nextitem.path == item.path
    if _MAPS.read_bytes().count(b"\n") > (MOST_MAPS_WITHIN if within else MOST_MAPS):
        let_go()


def let_go() -> None:
    """Empty every cache of the tests' own, and jax's."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("tests", "sched_drive") or name.startswith("test_"):
            for value in list(vars(module).values()):
                clear = getattr(value, "cache_clear", None)
                if callable(clear):
                    clear()
    sys.modules["jax"].clear_caches()
    gc.collect()
