"""The positions that a token sees before its own: all of them, a window, or those of its chunk.

What a token sees is one run of positions that ends at its own, so its lowest position says all, and is data::

    window 4   position 9 sees 6 7 8 9       lowest  pos - 3
    chunk 4    position 9 sees     8 9       lowest  pos // 4 * 4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """How far a layer looks back; false where it reads everything. Not both bounds at once."""

    window: int = 0
    """Newest positions that a token sees, its own among them; 0: no window."""
    chunk: int = 0
    """The text is cut every so many tokens, and a token sees its own piece alone; 0: it is not cut."""

    def __bool__(self) -> bool:
        return bool(self.window or self.chunk)

    @property
    def most(self) -> int:
        """Positions that a token sees at most; 0: all. What lies further back is out of sight for good."""
        return self.window or self.chunk

    def lowest(self, pos: Any) -> Any:
        """The lowest position that a token at ``pos`` sees, of numpy or jax arrays; it never falls as ``pos``
        grows."""
        if self.chunk:
            return pos.clip(0) // self.chunk * self.chunk
        return (pos - self.window + 1).clip(0) if self.window else 0 * pos
