"""Proposes drafts copied from a text, with one index per sequence (``ports.Proposer``).

Reading is apart from proposing, so that a long prompt is read a little at a time, beside the device's work; who is
behind proposes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence as Seq
from typing import Protocol

from jserve.types import Request, Sequence


class Index(Protocol):
    """A text that is read token by token; says what may come next."""

    @property
    def length(self) -> int:
        """Tokens of the match; 0: none."""
        ...

    def append(self, token: int) -> None: ...

    def after(self, most: int) -> list[int]: ...


class _Reader:
    """The indices of one sequence and how far they were read."""

    __slots__ = ("indices", "n_read")

    def __init__(self, indices: tuple[Index, ...]) -> None:
        self.indices = indices
        self.n_read = 0


class Lookup:
    """``ports.Proposer``: the longest match of a sequence's indices, the first of equals.

    Args:
        name: the label in metrics.
        indices: makes the indices of a new sequence.
    """

    blind = False

    def __init__(self, name: str, indices: Callable[[], tuple[Index, ...]]) -> None:
        self.name = name
        self._indices = indices
        self._readers: dict[Sequence, _Reader] = {}
        self.seconds = 0.0

    def check(self, request: Request) -> None:
        """It drafts for any request."""

    def read(self, seq: Sequence, most: int) -> int:
        began = time.perf_counter()
        reader = self._readers.get(seq)
        if reader is None:
            reader = self._readers[seq] = _Reader(self._indices())
        new = seq.tokens[reader.n_read : reader.n_read + most]
        for index in reader.indices:
            for token in new:
                index.append(token)
        reader.n_read += len(new)
        self.seconds += time.perf_counter() - began
        return len(new)

    def propose(self, seq: Sequence, most: int) -> Seq[int]:
        reader = self._readers.get(seq)
        if reader is None or reader.n_read != len(seq.tokens):
            return ()
        best = max(reader.indices, key=_length)
        return best.after(most)

    def mask(self, seq: Sequence, drafts: Seq[int]) -> None:
        return None

    def forget(self, seq: Sequence) -> None:
        self._readers.pop(seq, None)

    def __len__(self) -> int:
        return len(self._readers)


def _length(index: Index) -> int:
    return index.length
