"""Tells those of this process who want to know which replicas run.

Apart from ``fleet.on_ray``, whose router class Serve copies by value, so that the copy finds this one.
"""

from __future__ import annotations

from collections.abc import Callable

WATCHERS: dict[str, Callable[[list[str]], None]] = {}
"""By name of the application, who is told; called from any thread."""


def tell(app: str, names: list[str]) -> None:
    """These replicas of ``app`` run now."""
    watcher = WATCHERS.get(app)
    if watcher is not None:
        watcher(names)
