"""Describes the KV that each layer of a model keeps of a token, and computes all sizes from it.

The device allocates by ``KVLayout``, the planner and the rooflines count by it, and pages move between
memories as it says::

    layer 0   keys [K heads, H]  values [K heads, H]   reads all tokens      split over tp devices
    layer 1   keys [K heads, H]  values [K heads, H]   reads a window        split over tp devices
    layer 2   latents [C]                              reads all tokens      whole on every device
    layer 3   keys [k heads, h]  values [k heads, h]   a drafter's           whole on every device

A page holds ``page_size`` tokens of every layer. The order of axes is the attention backend's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """The positions that a token sees before its own; false where it sees all. Not both bounds at once.

    They are one run that ends at its own, so the lowest of them says all, and is data::

        window 4   position 9 sees 6 7 8 9       lowest  pos - 3
        chunk 4    position 9 sees     8 9       lowest  pos // 4 * 4
    """

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


@dataclass(frozen=True, slots=True)
class KVArray:
    """One array of a layer: ``heads`` vectors of ``width`` numbers for every token."""

    heads: int
    """0: one vector that all heads share, in an array without an axis of heads."""
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayer:
    """The KV that one layer keeps of every token, and its window."""

    arrays: tuple[KVArray, ...]
    window: int = 0
    """Newest tokens that it reads, the token's own among them; 0: all."""
    replicated: bool = False
    """True: every device holds all of it; False: its heads are split over the devices."""

    @classmethod
    def attention(
        cls, heads: int, width: int, *, window: int = 0, replicated: bool = False
    ) -> KVLayer:
        """Keys and values of ``heads`` kv heads."""
        array = KVArray(heads, width)
        return cls(arrays=(array, array), window=window, replicated=replicated)

    @classmethod
    def latent(cls, width: int) -> KVLayer:
        """One vector of ``width`` numbers, of which all heads make their keys and values."""
        return cls(arrays=(KVArray(0, width),), replicated=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The KV of a model on its devices."""

    layers: tuple[KVLayer, ...]
    """The target's, then a drafter's."""
    page_size: int
    """Tokens of a page."""
    dtype: Any
    """numpy dtype of a number as the pool stores it, perhaps its bits."""
    tp: int = 1
    """Devices that split the heads."""
    _kinds: tuple[tuple[KVLayer, int], ...] = field(init=False, compare=False, repr=False)
    """Layers that are alike, and how many."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_kinds", tuple(Counter(self.layers).items()))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on one device."""
        return self.page_size * sum(
            n * self._numbers(layer) // self._share(layer) * self.dtype.itemsize
            for layer, n in self._kinds
        )

    @property
    def host_page_bytes(self) -> int:
        """Bytes of a page in host memory or on disk, where what every device holds whole lies once."""
        numbers = sum(n * self._numbers(layer) for layer, n in self._kinds)
        return self.page_size * numbers * self.dtype.itemsize

    @property
    def window(self) -> int:
        """Tokens that any layer reads at most; 0: some read all."""
        return widest(self.layers)

    def heads(self, layer: KVLayer, array: KVArray) -> int:
        """Heads of ``array`` that all devices together hold."""
        return array.heads if layer.replicated else heads_over(array.heads, self.tp)

    def seen(self, n_context: float) -> float:
        """Tokens that one token reads in all layers together, behind ``n_context`` of them."""
        return sum(n * min(n_context, layer.window or n_context) for layer, n in self._kinds)

    def step_bytes(self, rows: int, tokens: int, n_context: float) -> float:
        """Bytes that a step of ``rows`` behind ``n_context`` tokens each moves on one device, ``tokens``
        new ones included."""
        moved = 0.0
        for layer, n in self._kinds:
            context = min(n_context, layer.window or n_context)
            moved += n * self._numbers(layer) / self._share(layer) * (rows * context + tokens)
        return moved * self.dtype.itemsize

    def _numbers(self, layer: KVLayer) -> int:
        """Of one token, on all devices together."""
        return sum(max(1, self.heads(layer, array)) * array.width for array in layer.arrays)

    def _share(self, layer: KVLayer) -> int:
        return 1 if layer.replicated else self.tp


def heads_over(heads: int, tp: int) -> int:
    """kv heads that ``tp`` devices hold together: each of them at least one, so heads are repeated where
    there are fewer."""
    return max(heads, tp)


def widest(layers: Iterable[KVLayer]) -> int:
    """Tokens that any of ``layers`` reads at most; 0: some read all."""
    windows = [layer.window for layer in layers]
    return max(windows, default=0) if all(windows) else 0
