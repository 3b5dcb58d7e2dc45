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
from dataclasses import dataclass, field, replace
from typing import Any

from jserve.errors import ConfigError


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


KV_FORMS = ("int8_per_token_head", "int4_per_token_head")
"""Numbers of 8 or 4 bits with a scale for each token and kv head, which lies behind them (``model/kv_bytes.py``)."""
SKIPPED = ("bfloat16", "float32")
"""Of the layers that keep the type of the activations."""
_BYTES = {
    "int8_per_token_head": (1.0, 4),
    "int4_per_token_head": (0.5, 4),
    "fp8_e4m3": (1.0, 0),
    "bfloat16": (2.0, 0),
    "float32": (4.0, 0),
}
"""Of a number, and of what lies behind a vector."""


def stored_width(form: str, width: int) -> int:
    """Bytes of a vector of ``width`` numbers in a form."""
    each, behind = _BYTES[form]
    return int(width * each) + behind


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
    """Tokens that a token reads at most, its own among them; 0: all."""
    chunked: bool = False
    """True: the text is cut every ``window`` tokens, and a token reads its own piece alone."""
    replicated: bool = False
    """True: every device holds all of it; False: its heads are split over the devices."""

    @classmethod
    def attention(
        cls,
        heads: int,
        width: int,
        *,
        window: int = 0,
        chunked: bool = False,
        replicated: bool = False,
    ) -> KVLayer:
        """Keys and values of ``heads`` kv heads."""
        array = KVArray(heads, width)
        return cls(arrays=(array, array), window=window, chunked=chunked, replicated=replicated)

    @classmethod
    def latent(cls, width: int) -> KVLayer:
        """One vector of ``width`` numbers, of which all heads make their keys and values."""
        return cls(arrays=(KVArray(0, width),), replicated=True)

    def as_bytes(self, form: str) -> KVLayer:
        """The same layer, its vectors as bytes in ``form``."""
        arrays = tuple(KVArray(a.heads, stored_width(form, a.width)) for a in self.arrays)
        return replace(self, arrays=arrays)

    @property
    def span(self) -> Span:
        """The positions that a token sees in it."""
        return Span(chunk=self.window) if self.chunked else Span(self.window)


@dataclass(frozen=True, slots=True)
class Reach:
    """Groups of layers that look back equally far."""

    span: Span
    n_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroups:
    """The layers of a model in groups of ``n_arrays``, each of one reach; a page holds ``page_size`` tokens of one
    group, and may go to any::

        array 0    layers 5, 0, 3, 7      the pool has as many arrays as a group has layers
        array 1    layers 11, 1, 4, 8
        group      0     1  2  3
        reach      0     1  1  1          the widest first
    """

    n_arrays: int
    reaches: tuple[Reach, ...]
    places: tuple[tuple[int, int], ...]
    """(group, array) of each layer."""

    @property
    def n_groups(self) -> int:
        return sum(reach.n_groups for reach in self.reaches)

    @property
    def n_padding(self) -> int:
        """Arrays of groups that no layer uses: of their pages, that part is wasted."""
        return self.n_groups * self.n_arrays - len(self.places)


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
    groups: KVGroups | None = None
    """None: a page holds its tokens for all layers."""
    _kinds: tuple[tuple[KVLayer, int], ...] = field(init=False, compare=False, repr=False)
    """Layers that are alike, and how many."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_kinds", tuple(Counter(self.layers).items()))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on one device."""
        return self.page_size * sum(
            n * self._numbers(layer) // self._share(layer) * self.dtype.itemsize
            for layer, n in self._kept
        )

    @property
    def host_page_bytes(self) -> int:
        """Bytes of a page in host memory or on disk, where what every device holds whole lies once."""
        numbers = sum(n * self._numbers(layer) for layer, n in self._kept)
        return self.page_size * numbers * self.dtype.itemsize

    @property
    def pool_layers(self) -> tuple[KVLayer, ...]:
        """The layers whose arrays the pool has: all, or as many as are in a group."""
        if self.groups is None:
            return self.layers
        return self.layers[:1] * self.groups.n_arrays

    @property
    def _kept(self) -> tuple[tuple[KVLayer, int], ...]:
        """The layers that a page holds, and how many of each."""
        if self.groups is None:
            return self._kinds
        return ((self.layers[0], self.groups.n_arrays),)

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


MOST_GROUPS = 16
"""A row of a step has a page table for each group."""
NEARLY = 1.25
"""Counts of layers that differ by less are padded to the larger one, in place of many small groups."""


def grouped(layers: tuple[KVLayer, ...]) -> KVGroups | None:
    """``layers`` in groups; None where all have one reach, or keep different things of a token.

    A group has as many layers as the rarest reach. Where that does not divide another's, its last group is padded.
    """
    kinds = {(layer.arrays, layer.replicated) for layer in layers}
    counts = Counter(layer.span for layer in layers)
    if len(kinds) > 1 or len(counts) < 2:
        return None
    least, most = min(counts.values()), max(counts.values())
    size = most if most < NEARLY * least else least
    size = max(size, -(-len(layers) // (MOST_GROUPS - len(counts) + 1)))
    spans = sorted(counts, key=lambda span: (bool(span), -span.most))
    reaches = tuple(Reach(span, -(-counts[span] // size)) for span in spans)
    first, at = {}, 0
    for reach in reaches:
        first[reach.span], at = at * size, at + reach.n_groups
    places = []
    for layer in layers:
        places.append(divmod(first[layer.span], size))
        first[layer.span] += 1
    return KVGroups(n_arrays=size, reaches=reaches, places=tuple(places))


def chosen_groups(
    layers: tuple[KVLayer, ...], asked: str, obstacles: Iterable[str]
) -> KVGroups | None:
    """The groups that option ``kv_groups`` gives ``layers``; None: pages are of all layers. ``obstacles``: what needs
    such pages, in words.

    Raises:
        ConfigError: ``asked`` is on, and it cannot be.
    """
    groups, why = grouped(layers), next(iter(obstacles), "")
    if asked == "on" and (groups is None or why):
        why = why or "all layers look back equally far, or keep different KV"
        raise ConfigError(f"kv_groups on: {why}", field="kv_groups")
    return None if why or asked == "off" else groups
