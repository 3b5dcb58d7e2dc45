"""Turns retention hints over token ranges into eviction priorities of pages.

It owns the translation and the rule which of several hints a page follows::

    tokens   |------ start .. end ------|          Retention
    pages    [  0  ][  1  ][  2  ][  3  ][  4  ]   Keep(first=0, end=4): every page it touches

Idea: TensorRT-LLM's retention priorities per token range.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass

from jserve.request_options import Retention

EVERYONE = 50
"""The priority of a page without a hint."""
SESSION = 101
"""Above any hint: the pages of a conversation that is expected to go on."""
FOREVER = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Pages ``first .. end`` of a sequence have this priority for ``seconds`` after each use."""

    priority: int
    seconds: float
    first: int = 0
    end: int = FOREVER


def keeps_of(hints: Iterable[Retention], page_size: int) -> tuple[Keep, ...]:
    """The hints over pages: each covers the pages that hold any of its tokens."""
    return tuple(
        Keep(
            priority=hint.priority,
            seconds=hint.seconds,
            first=hint.start // page_size,
            end=FOREVER if hint.end is None else -(-hint.end // page_size),
        )
        for hint in hints
    )


def strongest(keeps: Seq[Keep], page: int) -> Keep | None:
    """The keep of highest priority (then of longest time) that covers page number ``page``."""
    covering = [keep for keep in keeps if keep.first <= page < keep.end]
    return max(covering, key=lambda keep: (keep.priority, keep.seconds), default=None)
