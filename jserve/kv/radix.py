"""A tree of token prefixes over KV pages: which pages already hold the KV of these tokens.

Owns the shape of the tree, its locks, its pins and the order of eviction. Must not know sequences
or slots, nor read a clock: whoever evicts or unlocks says what time it is.

    (tenant, salt, adapter, version)    one root per key: nothing is shared across keys
        |- (t0 .. tZ-1) -> page 7       one node per full page; its key is the page's own tokens,
        |     |- (...)  -> page 12      compared exactly, so there are no hash collisions to craft
        |     '- (...)  -> page 30
        '- (...)        -> page 4

A node's ``locks`` counts the leases and pins whose path runs through it, so an ancestor of a locked
node is locked and unlocked nodes always form whole subtrees: exactly ``n_evictable`` pages can be
had by evicting leaves: lowest priority first, then least recently used. A priority other than
``EVERYONE``'s holds for some seconds after the page's last use; then the page is like any other.
Idea: SGLang's radix cache, with whole pages as edges.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence as Seq

from jserve.kv.retention import EVERYONE, Keep, strongest

RootKey = tuple[str, str, str | None, int]
"""(tenant, cache salt, adapter, weight version)."""


class Node:
    """One page of tokens below its parent. ``page`` is 0 for a root, and for a node that is gone."""

    __slots__ = (
        "children",
        "digest",
        "key",
        "locks",
        "page",
        "parent",
        "pins",
        "priority",
        "seconds",
        "until",
        "used",
    )

    def __init__(self, parent: Node | None, key: tuple, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[tuple[int, ...], Node] = {}
        self.locks = self.pins = 0
        self.used = 0
        self.priority = EVERYONE
        self.seconds = self.until = 0.0
        self.digest = b""
        """Name of the whole prefix, once ``kv.tiers`` asked for it."""


def path_to(node: Node) -> list[Node]:
    """``node`` and its ancestors below the root, deepest first."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path


class RadixTree:
    """Longest-prefix match, insertion, path locks, pins and eviction over pages."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.roots: dict[RootKey, Node] = {}
        self.n_nodes = 0
        self.n_evictable = 0
        self.n_pinned = 0
        self.n_evicted = 0
        """Counter: pages forgotten since the start."""
        self._tick = 0
        self._serial = 0
        self._leaves: list[tuple[int, int, int, Node]] = []
        """Heap of (priority, used, serial, node); stale when the node changed since."""
        self._lapses: list[tuple[float, int, Node]] = []
        """Heap of (until, serial, node): when a priority ends; stale when it was prolonged."""

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

    def unlock_path(
        self, node: Node, now: float = 0.0, keeps: Seq[Keep] = (), own: int = 0
    ) -> None:
        """Undo ``lock_path``. ``keeps`` say how long the pages of the path are worth keeping; one
        of low priority counts only for pages from number ``own`` on, which nobody else made."""
        self._tick += 1
        path = path_to(node)
        if keeps:
            self._favour(path, keeps, own)
        for below in path:
            assert below.locks > 0, "unlock without a lock"
            below.locks -= 1
            if below.locks == 0:
                self.n_evictable += 1
                self._touch(below, now)
        root = path[-1].parent if path else node
        assert root is not None
        root.locks -= 1
        self._drop_empty_root(root)

    def pin(self, node: Node) -> None:
        """Keep ``node`` and its ancestors until the matching ``unpin``."""
        self.lock_path(node)
        for above in path_to(node):
            self.n_pinned += above.pins == 0
            above.pins += 1

    def unpin(self, node: Node, now: float) -> None:
        for above in path_to(node):
            above.pins -= 1
            self.n_pinned -= above.pins == 0
        self.unlock_path(node, now)

    def release_priority(self, node: Node) -> None:
        """From now on ``node`` is worth what any page is."""
        node.priority = EVERYONE
        self._offer(node)

    def evict(
        self, n: int, now: float = 0.0, farewell: Callable[[Node], None] | None = None
    ) -> list[int]:
        """Forget up to ``n`` unlocked pages, least worth keeping first; gives their ids.

        ``farewell`` is called with each node while it is still whole.
        """
        self._lapse(now)
        pages: list[int] = []
        while len(pages) < n and self._leaves:
            priority, used, _, node = heapq.heappop(self._leaves)
            if self._is_leaf(node) and (node.priority, node.used) == (priority, used):
                if farewell is not None:
                    farewell(node)
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

    def lost(self) -> list[int]:
        """Pages of unlocked leaves that no eviction would find (for the audit: none)."""
        entries = {(p, u, id(n)) for p, u, _, n in self._leaves}
        leaves = [node for _, node in self.nodes() if self._is_leaf(node)]
        return [n.page for n in leaves if (n.priority, n.used, id(n)) not in entries]

    @staticmethod
    def _is_leaf(node: Node) -> bool:
        return node.locks == 0 and not node.children and node.page != 0

    def _favour(self, path: list[Node], keeps: Seq[Keep], own: int) -> None:
        """Give the nodes of ``path`` (deepest first) the priorities that ``keeps`` ask for."""
        for number, node in zip(range(len(path) - 1, -1, -1), path, strict=True):
            keep = strongest(keeps, number)
            if keep is None or (keep.priority < EVERYONE and number < own):
                continue
            if keep.priority > node.priority or node.priority == EVERYONE:
                node.priority, node.seconds = keep.priority, keep.seconds
            elif keep.priority == node.priority:
                node.seconds = max(node.seconds, keep.seconds)

    def _touch(self, node: Node, now: float) -> None:
        node.used = self._tick
        if node.priority != EVERYONE:
            node.until = now + node.seconds
            self._serial += 1
            heapq.heappush(self._lapses, (node.until, self._serial, node))
        self._offer(node)
        if len(self._leaves) + len(self._lapses) > 4 * self.n_nodes + 64:
            self._compact()

    def _offer(self, node: Node) -> None:
        if self._is_leaf(node):
            self._serial += 1
            heapq.heappush(self._leaves, (node.priority, node.used, self._serial, node))

    def _lapse(self, now: float) -> None:
        """Take the priorities back whose time is over."""
        while self._lapses and self._lapses[0][0] <= now:
            until, _, node = heapq.heappop(self._lapses)
            if self._lapses_at(node, until):
                node.priority = EVERYONE
                self._offer(node)

    @staticmethod
    def _lapses_at(node: Node, until: float) -> bool:
        """A locked node is in use: its time begins anew when it is unlocked."""
        alive = node.page != 0 and node.locks == 0
        return alive and node.priority != EVERYONE and node.until == until

    def _compact(self) -> None:
        """Drop stale heap entries, which pile up while the same leaves are locked and unlocked."""
        leaves = {
            id(n): (p, u, s, n)
            for p, u, s, n in self._leaves
            if self._is_leaf(n) and (n.priority, n.used) == (p, u)
        }
        lapses = {id(n): (t, s, n) for t, s, n in self._lapses if self._lapses_at(n, t)}
        self._leaves, self._lapses = list(leaves.values()), list(lapses.values())
        heapq.heapify(self._leaves)
        heapq.heapify(self._lapses)

    def _remove(self, node: Node) -> int:
        parent, page = node.parent, node.page
        assert parent is not None
        del parent.children[node.key]
        node.page = 0  # marks the node dead for heap entries that still name it
        self.n_nodes -= 1
        self.n_evicted += 1
        self.n_evictable -= 1
        self._offer(parent)
        self._drop_empty_root(parent)
        return page

    def _drop_empty_root(self, node: Node) -> None:
        """Roots of salts that hold nothing would pile up for ever."""
        if node.parent is None and not node.children and node.locks == 0:
            self.roots.pop(node.key, None)
