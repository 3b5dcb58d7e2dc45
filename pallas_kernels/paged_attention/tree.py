"""Trees of drafts as paged attention sees them: which of a row's newest keys each of its tokens sees.

It owns a static shape and what follows from it. The J tokens of a row are the last of X places that begin at
``base``; all keys before it are seen as ever (a window counts positions, and a place's position is ``base`` plus
its depth)::

    keys    | ...  all of them | 0  1  2 | 3  4 |        X 5, J 2: tokens 3 and 4 see 0 and one
              before base        places    tokens        of 1 and 2 each, and themselves
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_PLACES = 26
"""Bits of what a token sees; the rest of a word of 31 is its depth."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Hashable: a static part of a kernel.

    Raises:
        ValueError: shapes that do not fit, or a token that sees places after its own.
    """

    sees: tuple[tuple[bool, ...], ...]
    """[J][X]: whether the token sees the place; its own is ``n_before + j``."""
    depth: tuple[int, ...]
    """[X]: position of each place, counted from the base."""

    def __post_init__(self) -> None:
        J, X = len(self.sees), len(self.depth)
        if not 1 <= J <= X <= MAX_PLACES or any(len(row) != X for row in self.sees):
            raise ValueError(f"a tree of {J} tokens at {X} places, of which {MAX_PLACES} may be")
        for j, row in enumerate(self.sees):
            own = X - J + j
            if not row[own] or any(row[own + 1 :]):
                raise ValueError(f"token {j} of a tree sees itself and nothing later, not {row}")
        if not all(0 <= d < X for d in self.depth):
            raise ValueError(f"depths {self.depth} of a tree of {X} places")

    @classmethod
    def of(cls, parents: tuple[int, ...]) -> Tree:
        """All nodes at once: ``parents`` -1 for the root, which is first, then an earlier node each.

        Raises:
            ValueError: they are no tree in that order.
        """
        if not parents or parents[0] != -1:
            raise ValueError(f"parents {parents}: -1 first, then earlier nodes each")
        sees, depth = [], []
        for j, parent in enumerate(parents):
            if j and not 0 <= parent < j:
                raise ValueError(f"parents {parents}: -1 first, then earlier nodes each")
            above = sees[parent] if j else [False] * len(parents)
            sees.append([seen or i == j for i, seen in enumerate(above)])
            depth.append(depth[parent] + 1 if j else 0)
        return cls(tuple(map(tuple, sees)), tuple(depth))

    @property
    def n_before(self) -> int:
        """Places from the base to the first of the tokens."""
        return len(self.depth) - len(self.sees)

    @property
    def common(self) -> int:
        """Places from the base that all tokens see."""
        columns = list(map(all, zip(*self.sees, strict=True)))
        return (*columns, False).index(False)

    def words(self, window: int) -> tuple[int, ...]:
        """Of each token a bit for each place it sees, within ``window`` positions (0: all), and above
        them its depth: one number, because a kernel has few registers."""
        found = []
        for j, row in enumerate(self.sees):
            deep = self.depth[self.n_before + j]
            near = [
                seen and (not window or deep - d < window)
                for seen, d in zip(row, self.depth, strict=True)
            ]
            bits = sum(1 << i for i, seen in enumerate(near) if seen)
            found.append(bits | deep << MAX_PLACES)
        return tuple(found)
