"""Finds how much of a prefix is on the device and in the tiers below it, of all parts of a page cache together.

Every part (layers of one reach) has a tree of its own and needs other pages of the same tokens: those that see all need
every page, a window needs the last ones. Names of pages begin with the digest of the whole prefix, which is that of all
parts::

    tokens          [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ]
    part 0, full     dev  dev  dev  host host      a hit of 5 pages: host pages 3 and 4 are loaded,
    part 1, window    -    -    -   host dev       and host page 3 of the window
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jserve.kv.radix import Node, RootKey
from jserve.kv.tiers import HostPage, HostTier, digest_of, next_digest

if TYPE_CHECKING:
    from jserve.kv.cache import PageCache

Has = Callable[[bytes], bool]
"""True if a tier has the page of that name."""


class Digests:
    """``digest_of`` the first pages of ``tokens``, also beyond the ``nodes`` below ``root``, made when asked for."""

    def __init__(self, root: Node, nodes: Seq[Node], tokens: Seq[int], page_size: int) -> None:
        self._nodes, self._tokens, self._page_size = (root, *nodes), tokens, page_size
        self._made: list[bytes] = []
        """Of one page more than there are nodes, and so on."""

    def of(self, n_pages: int) -> bytes:
        if n_pages < len(self._nodes):
            return digest_of(self._nodes[n_pages])
        Z = self._page_size
        while (n := len(self._nodes) + len(self._made)) <= n_pages:
            before = self._made[-1] if self._made else digest_of(self._nodes[-1])
            self._made.append(next_digest(before, self._tokens[(n - 1) * Z : n * Z]))
        return self._made[n_pages - len(self._nodes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The first pages of a sequence as one part of the cache has them."""

    part: PageCache
    root: Node
    nodes: list[Node]
    """As far as the part's tree goes along the tokens, hollow ones too."""
    tokens: Seq[int]
    digests: Digests

    def names(self, number: int) -> list[bytes]:
        """Of page ``number`` in each group of layers."""
        return self.part.names(self.digests.of(number + 1))

    def on_device(self, number: int) -> bool:
        return number < len(self.nodes) and self.nodes[number].page != 0

    def longest(self, n_pages: int, has: Has | None) -> int:
        """The most pages, up to ``n_pages``, of which all that is needed is on the device or in a tier."""

        def below(number: int) -> bool:
            return has is not None and all(map(has, self.names(number)))

        if self.part.window:
            return self.part.window.longest(n_pages, lambda i: self.on_device(i) or below(i))
        n = min(len(self.nodes), n_pages)  # all nodes have pages
        while n < n_pages and below(n):
            n += 1
        return n

    def missing(self, n_pages: int) -> list[int]:
        """Numbers of those that a hit of ``n_pages`` needs and that are not on the device."""
        needed = self.part.window.needed(n_pages)
        return [number for number in needed if not self.on_device(number)]

    def path(self, n_pages: int) -> list[Node]:
        """The nodes of the first ``n_pages``; hollow ones are made where the tree has none."""
        path, Z = self.nodes[:n_pages], self.part.page_size
        for i in range(len(path), n_pages):
            above = path[-1] if path else self.root
            path.append(self.part.tree.grow(above, tuple(self.tokens[i * Z : (i + 1) * Z])))
        return path

    def held(self, number: int) -> list[HostPage]:
        """Page ``number`` in host memory, in each group of layers; it stays there until it was loaded or let be."""
        tier, kept = self.part.tier, []
        assert tier is not None
        for name in self.names(number):
            page = tier.hold(name)
            assert page is not None, "a page that is not there is held"
            kept.append(page)
        return kept


def prefixes(parts: Seq[PageCache], roots: Seq[Node], tokens: Seq[int], n: int) -> list[Prefix]:
    """The first ``n`` pages of ``tokens`` in each of ``parts``."""
    nodes = [part.tree.walk(root, tokens, n) for part, root in zip(parts, roots, strict=True)]
    digests = Digests(roots[0], nodes[0], tokens, parts[0].page_size)
    return [
        Prefix(part=part, root=root, nodes=found, tokens=tokens, digests=digests)
        for part, root, found in zip(parts, roots, nodes, strict=True)
    ]


def longest(found: Seq[Prefix], n_pages: int, has: Has | None) -> int:
    """The most pages, up to ``n_pages``, that every part can have."""
    while True:
        n = n_pages
        for prefix in found:
            n_pages = prefix.longest(n_pages, has)
        if n_pages == n:
            return n


def fetch(
    parts: Seq[PageCache], tier: HostTier, key: RootKey, tokens: Seq[int], source: str | None
) -> list[int]:
    """``PageCache.fetch`` of all ``parts``; the tickets."""

    def known(name: bytes) -> bool:
        return source is not None or tier.holds(name) or name in tier.on_disk

    keys = [part.of_weights(key) for part in parts]
    roots = [
        part.tree.roots.get(k) or Node(None, k, 0) for part, k in zip(parts, keys, strict=True)
    ]
    n = (len(tokens) - 1) // parts[0].page_size
    found = prefixes(parts, roots, tokens, n)
    while n := longest(found, n, known):
        names = [name for p in found for i in p.missing(n) for name in p.names(i)]
        short = tier.n_lacking(names)
        if short <= 0:
            return _read(tier, names, source)
        n = max(0, n - max(1, short // sum(part.n_groups for part in parts)))
    return []


def _read(tier: HostTier, names: Seq[bytes], source: str | None) -> list[int]:
    tickets: list[int] = []
    for name in names:
        if tier.holds(name):
            tier.touch(name)
            continue
        ticket = tier.fetch(name, source or "")
        if ticket is None:
            break
        tickets.append(ticket)
    return tickets
