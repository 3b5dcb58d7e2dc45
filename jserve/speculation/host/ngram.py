"""Prompt lookup: indexes n-grams and proposes what followed their latest occurrence.

Appending a token costs one look-up per n, whatever the length of the text; memory is bounded by a window of newest
tokens, which is indexed anew from its newer half whenever it is full (one more insertion per token).

The latest place where the longest n-gram stood before is copied from; a place so near the end that the copy
runs into it goes on with its own period::

    tokens   a b c d e  x  a b c d        n-gram "b c d" stood before, so: e x a ...
                 '---------^ match
    tokens   a b a b a b                  "b a b" stood before, so: a b a b a ...

Idea: prompt lookup decoding (A. Saxena, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq


def copied(tokens: Seq[int], at: int, most: int) -> list[int]:
    """``most`` tokens from place ``at`` on; beyond the end the piece from ``at`` repeats."""
    found = list(tokens[at : at + most])
    period = len(found)
    while period and len(found) < most:
        found.append(found[len(found) - period])
    return found


class NgramIndex:
    """N-grams of ``least`` to ``most`` tokens over the newest ``window`` tokens of one text.

    Raises:
        ValueError: ``least`` exceeds ``most``, or the window has no room for two n-grams.
    """

    def __init__(self, least: int, most: int, window: int) -> None:
        if not 1 <= least <= most or window < 2 * most + 2:
            raise ValueError(f"n-grams of {least} to {most} tokens in a window of {window}")
        self.least, self.most, self.window = least, most, window
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}
        """N-gram -> the place after its latest occurrence."""
        self._match = 0
        self.length = 0
        """Tokens of the n-gram that was found before; 0: none."""

    def append(self, token: int) -> None:
        """The text goes on with ``token``."""
        if len(self.tokens) >= self.window:
            kept, self.tokens, self._places = self.tokens[-(self.window // 2) :], [], {}
            for old in kept:
                self._take(old)
        self._take(token)

    def after(self, most: int) -> list[int]:
        """``most`` tokens that may come next; [] without a match."""
        return copied(self.tokens, self._match, most) if self.length else []

    def _take(self, token: int) -> None:
        tokens, places = self.tokens, self._places
        tokens.append(token)
        end = len(tokens)
        self.length = 0
        for n in range(min(self.most, end), self.least - 1, -1):
            key = tuple(tokens[-n:])
            before = places.get(key)
            places[key] = end
            if before is not None and not self.length:
                self._match, self.length = before, n
