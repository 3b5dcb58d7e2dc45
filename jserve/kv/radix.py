"""A tree of token prefixes over KV pages: which pages already hold the KV of these tokens.

Owns the shape of the tree, its locks and the order of eviction. Must not know sequences, slots or
time.

    (salt, adapter, version)            one root per key: nothing is shared across keys
        |- (t0 .. tZ-1) -> page 7       one node per full page; its key is the page's own tokens,
        |     |- (...)  -> page 12      compared exactly, so there are no hash collisions to craft
        |     '- (...)  -> page 30
        '- (...)        -> page 4

A node's ``locks`` counts the leases whose path runs through it, so an ancestor of a locked node is
locked and unlocked nodes always form whole subtrees: exactly ``n_evictable`` pages can be had by
evicting leaves, least recently used first. Idea: SGLang's radix cache, with whole pages as edges.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence as Seq

RootKey = tuple[str, str | None, int]
"""(cache salt, adapter, weight version)."""


class Node:
    """One page of tokens below its parent. ``page`` is 0 for a root."""

    __slots__ = ("children", "key", "locks", "page", "parent", "used")

    def __init__(self, parent: Node | None, key: tuple, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[tuple[int, ...], Node] = {}
        self.locks = 0
        self.used = 0


class RadixTree:
    """Longest-prefix match, insertion, path locks and LRU eviction over pages."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.roots: dict[RootKey, Node] = {}
        self.n_nodes = 0
        self.n_evictable = 0
        self.n_evicted = 0
        """Counter: pages forgotten since the start."""
        self._tick = 0
        self._leaves: list[tuple[int, int, Node]] = []
        """Heap of (used, serial, node); an entry is stale when the node changed since."""
        self._serial = 0

    def root(self, key: RootKey) -> Node:
        return self.roots.get(key) or self.roots.setdefault(key, Node(None, key, 0))

    def match(self, root: Node, tokens: Seq[int], max_pages: int) -> list[Node]:
        """At most ``max_pages`` nodes below ``root`` along the longest known prefix."""
        Z, node, path = self.page_size, root, []
        for at in range(0, max_pages * Z, Z):
            child = node.children.get(tuple(tokens[at : at + Z]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def descend(self, node: Node, key: tuple[int, ...], page: int) -> tuple[Node, bool]:
        """The locked child of ``node`` for ``key``, made over ``page`` if missing; if it was made.

        The caller has locked ``node`` and its ancestors already.
        """
        child = node.children.get(key)
        if child is not None:
            if child.locks == 0:
                self.n_evictable -= 1
            child.locks += 1
            return child, False
        child = node.children[key] = Node(node, key, page)
        child.locks = 1
        self.n_nodes += 1
        return child, True

    def lock_path(self, node: Node) -> None:
        """Keep ``node`` and its ancestors from eviction until the matching ``unlock_path``."""
        while node.parent is not None:
            if node.locks == 0:
                self.n_evictable -= 1
            node.locks += 1
            node = node.parent
        node.locks += 1

    def unlock_path(self, node: Node) -> None:
        self._tick += 1
        while node.parent is not None:
            assert node.locks > 0, "unlock without a lock"
            node.locks -= 1
            if node.locks == 0:
                self.n_evictable += 1
                self._touch(node)
            node = node.parent
        node.locks -= 1
        self._drop_empty_root(node)

    def evict(self, n: int) -> list[int]:
        """Forget up to ``n`` unlocked pages, least recently used leaves first; gives their ids."""
        pages: list[int] = []
        while len(pages) < n and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if self._is_leaf(node) and node.used == used:
                pages.append(self._remove(node))
        return pages

    def nodes(self) -> Iterator[tuple[RootKey, Node]]:
        """(root key, node) for every node, parents first."""
        stack = [
            (key, child) for key, root in self.roots.items() for child in root.children.values()
        ]
        while stack:
            key, node = stack.pop()
            yield key, node
            stack.extend((key, child) for child in node.children.values())

    @staticmethod
    def _is_leaf(node: Node) -> bool:
        return node.locks == 0 and not node.children and node.page != 0

    def _touch(self, node: Node) -> None:
        node.used = self._tick
        if self._is_leaf(node):
            self._serial += 1
            heapq.heappush(self._leaves, (node.used, self._serial, node))
        if len(self._leaves) > 2 * self.n_nodes + 64:
            self._compact()

    def _compact(self) -> None:
        """Drop stale heap entries, which pile up while the same leaves are locked and unlocked."""
        fresh = {id(n): (u, s, n) for u, s, n in self._leaves if self._is_leaf(n) and n.used == u}
        self._leaves = list(fresh.values())
        heapq.heapify(self._leaves)

    def _remove(self, node: Node) -> int:
        parent, page = node.parent, node.page
        assert parent is not None
        del parent.children[node.key]
        node.page = 0  # marks the node dead for heap entries that still name it
        self.n_nodes -= 1
        self.n_evicted += 1
        self.n_evictable -= 1
        if self._is_leaf(parent):
            self._serial += 1
            heapq.heappush(self._leaves, (parent.used, self._serial, parent))
        self._drop_empty_root(parent)
        return page

    def _drop_empty_root(self, node: Node) -> None:
        """Roots of salts that hold nothing would pile up for ever."""
        if node.parent is None and not node.children and node.locks == 0:
            self.roots.pop(node.key, None)
