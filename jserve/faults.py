"""Fault injection points: places in host code where a test can make a call fail.

A point costs nothing unless it is armed: it marks a method, which stays as it is; arming puts a counting method in
its place, and disarming puts the old one back::

    @point("disk.write", OSError)        arm("disk.write", 3)
    def _write(self, path, data): ...    the third call from now on raises OSError, the others work
                                         arm("disk.write", 3, hangs=True): it never returns

Only methods can be points: a function that somebody imported by name could not be replaced.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
Raises = Callable[[str], Exception]


@dataclass(frozen=True, slots=True)
class FaultPoint:
    """One method that is marked."""

    module: str
    name: str
    """Dotted name within the module."""
    raises: Raises


POINTS: dict[str, list[FaultPoint]] = {}
"""All points of the modules that are loaded; several methods may share a name."""


def point(name: str, raises: Raises = RuntimeError) -> Callable[[Method], Method]:
    """Mark a method as the point ``name``; armed, it raises ``raises(words)`` instead of running."""

    def mark(method: Method) -> Method:
        assert "." in method.__qualname__, f"{name}: only methods can be points"
        POINTS.setdefault(name, []).append(
            FaultPoint(method.__module__, method.__qualname__, raises)
        )
        return method

    return mark


@dataclass(slots=True)
class Shot:
    """An armed point. ``n_calls`` counts the calls so far; ``fired`` is set by the ``at``-th."""

    name: str
    at: int
    n_calls: int = 0
    fired: bool = False


def arm(name: str, at: int, *, hangs: bool = False) -> tuple[Shot, Callable[[], None]]:
    """Have the ``at``-th call (from 1) of ``name`` raise, or never return; the shot, and what undoes it.

    Raises:
        ValueError: there is no such point among the loaded modules.
    """
    if name not in POINTS:
        raise ValueError(f"{name!r} is not a fault point; there are {', '.join(sorted(POINTS))}")
    shot, lock, undo = Shot(name, at), threading.Lock(), []
    for place in POINTS[name]:
        owner: Any = importlib.import_module(place.module)
        *path, last = place.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        method = owner.__dict__[last]
        setattr(owner, last, _counting(method, shot, lock, None if hangs else place.raises))
        undo.append((owner, last, method))

    def disarm() -> None:
        for owner, last, method in undo:
            setattr(owner, last, method)

    return shot, disarm


@contextmanager
def armed(name: str, at: int) -> Iterator[Shot]:
    """``arm`` for the time of a block."""
    shot, disarm = arm(name, at)
    try:
        yield shot
    finally:
        disarm()


def arm_all(text: str) -> list[str]:
    """Arm ``name@at`` (``name@at=hang`` where it shall not return) for each of a comma-separated list, for
    good; the parts that name a point of the loaded modules. A server has two processes, and each has its own
    points.

    Raises:
        ValueError: a part is not of that form.
    """
    armed = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, how = part.partition("@")
        at, _, mode = how.partition("=")
        if not at.isdigit() or int(at) < 1 or mode not in ("", "hang"):
            raise ValueError(
                f"{part!r} must be a fault point, '@' and a number from 1 on, then '=hang' or nothing"
            )
        if name in POINTS:
            arm(name, int(at), hangs=bool(mode))
            armed.append(part)
    return armed


def _counting(method: Any, shot: Shot, lock: Any, raises: Raises | None) -> Any:
    """``method``, whose call that the shot is for raises; None: never returns."""

    @functools.wraps(method)
    def counting(*args: Any, **kwargs: Any) -> Any:
        with lock:
            shot.n_calls += 1
            fires = shot.n_calls == shot.at
            shot.fired = shot.fired or fires
        if fires and raises is None:
            threading.Event().wait()
        if fires and raises is not None:
            raise raises(f"fault point {shot.name}")
        return method(*args, **kwargs)

    return counting
