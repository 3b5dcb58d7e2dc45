"""Radix tree of token prefixes over KV pages, with locks, pins and LRU eviction.

It owns the shape of the tree, its locks, its pins and the order of eviction.

    (tenant, salt, adapter, weights)    one root per key: nothing is shared across keys
        |- (t0 .. tZ-1) -> page 7       one node per full page; its key is the page's own tokens,
        |     |- (...)  -> page 12      compared exactly, so there are no hash collisions to craft
        |     '- (...)  -> page 30
        '- (...)        -> page 4

A node's ``locks`` counts the leases and pins whose path runs through it, its ``holds`` those that need
its page. Exactly the pages that nobody holds can be evicted: lowest priority first, then least
recently used. A priority other than ``EVERYONE``'s lasts for some seconds after the page's last use;
then the page is like any other.

Without a window the two counts are equal: an ancestor of a locked node is locked, what nobody holds
forms whole subtrees, and leaves go first. With one (``jserve.window``) a path needs only its last window
of pages, so a page may go from the middle of a path: its node stays, hollow, for what hangs below::

    [ hollow ]-[ hollow ]-[ page 3 ]-[ page 4 ]     a hit of 4 pages, where 2 are out of the window
                                 '---[ page 9 ]     no hit of 2 pages: their window is gone

Idea: SGLang's radix cache, with whole pages as edges.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass

from jserve.kv.retention import EVERYONE, SESSION, Keep, strongest
from jserve.window import NOTHING, Window

RootKey = tuple[str, str, str | None] | tuple[str, str, str | None, str]
"""(tenant, cache salt, what else its KV comes from: an adapter, steering, longrope's long factors; else None), and of
weights that replaced the first ones their name."""


class Node:
    """One page of tokens below its parent. ``page`` is 0 for a root, for a hollow node, and for one
    that is gone."""

    __slots__ = (
        "branches",
        "children",
        "depth",
        "digest",
        "holds",
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
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Pages from the root to the end of this one."""
        self.children: dict[tuple[int, ...], Node] = {}
        self.branches = False
        """True once it had a second child."""
        self.locks = self.holds = self.pins = 0
        self.used = 0
        self.priority = EVERYONE
        self.seconds = self.until = 0.0
        self.digest = b""
        """Name of the whole prefix, once ``kv.tiers`` asked for it."""


@dataclass(slots=True)
class Ticks:
    """Counts what happens to the pages of one pool, so that the last use of any two can be compared."""

    now: int = 0


def path_to(node: Node) -> list[Node]:
    """``node`` and its ancestors below the root, deepest first."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path


class RadixTree:
    """Longest-prefix match, insertion, path locks, pins and eviction over pages."""

    def __init__(
        self, page_size: int, window: Window | None = None, clock: Ticks | None = None
    ) -> None:
        self.page_size = page_size
        self.window = window or Window(page_size=page_size)
        self.roots: dict[RootKey, Node] = {}
        self.n_nodes = 0
        """Nodes that have a page."""
        self.n_hollow = 0
        self.n_evictable = 0
        self.n_pinned = 0
        self.n_evicted = 0
        """Counter: pages forgotten since the start."""
        self._clock = clock or Ticks()
        self._serial = 0
        self._leaves: list[tuple[int, int, int, Node]] = []
        """Heap of (priority, used, serial, node); stale when the node changed since."""
        self._lapses: list[tuple[float, int, Node]] = []
        """Heap of (until, serial, node): when a priority ends; stale when it was prolonged."""

    def root(self, key: RootKey) -> Node:
        return self.roots.get(key) or self.roots.setdefault(key, Node(None, key, 0))

    def match(self, root: Node, tokens: Seq[int], max_pages: int) -> list[Node]:
        """At most ``max_pages`` nodes below ``root`` along the longest known prefix whose pages are
        all there, as far as what follows it reads them."""
        path = self.walk(root, tokens, max_pages)
        if not self.window:
            return path
        n = self.window.longest(len(path), lambda i: path[i].page != 0)
        return path if n == len(path) else path[:n]

    def walk(self, root: Node, tokens: Seq[int], max_pages: int) -> list[Node]:
        """The nodes below ``root`` along ``tokens``, hollow ones too, ``max_pages`` at most."""
        Z, node, path = self.page_size, root, []
        for at in range(0, max_pages * Z, Z):
            child = node.children.get(tuple(tokens[at : at + Z]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def grow(self, node: Node, key: tuple[int, ...]) -> Node:
        """A hollow child of ``node`` for ``key``, of which there is none. The caller locks it, and fills it or lets
        go of it before anybody else looks."""
        node.branches |= bool(node.children)
        child = node.children[key] = Node(node, key, 0)
        self.n_hollow += 1
        return child

    def fill(self, node: Node, page: int) -> None:
        """A hollow ``node``, locked by the caller, has ``page`` now, which the caller holds too."""
        assert node.locks > 0, "fill without a lock"
        assert not node.page, "fill of a node that has a page"
        node.page = page
        node.holds += 1
        self.n_nodes += 1
        self.n_hollow -= 1

    def descend(self, node: Node, key: tuple[int, ...], page: int) -> tuple[Node, bool]:
        """The locked child of ``node`` for ``key``, made over ``page`` if it has none; if ``page`` is
        now the tree's.

        The caller has locked ``node`` and its ancestors already. ``page`` 0: the caller let go of its
        page, so the child is not held, and hollow if it is new.
        """
        child = node.children.get(key)
        if child is None:
            child = self.grow(node, key)
        child.locks += 1
        if not page:
            return child, False
        made = not child.page
        if made:
            child.page = page
            self.n_nodes += 1
            self.n_hollow -= 1
        elif child.holds == 0:
            self.n_evictable -= 1
        child.holds += 1
        return child, made

    def lock_path(self, node: Node, gone: range = NOTHING) -> None:
        """Keep ``node`` and its ancestors until the matching ``unlock_path``, and their pages but
        those whose numbers are in ``gone``. Hollow nodes elsewhere are not held before they are filled."""
        while node.parent is not None:
            node.locks += 1
            if node.page and (not gone or node.depth - 1 not in gone):
                if node.holds == 0:
                    self.n_evictable -= 1
                node.holds += 1
            node = node.parent
        node.locks += 1

    def unlock_path(
        self,
        node: Node,
        now: float = 0.0,
        keeps: Seq[Keep] = (),
        own: int = 0,
        gone: range = NOTHING,
    ) -> None:
        """Undo ``lock_path``. ``keeps`` say how long the pages of the path are worth keeping; one
        of low priority counts only for pages from number ``own`` on, which nobody else made."""
        self._clock.now += 1
        path = path_to(node)
        if keeps:
            self._favour(path, keeps, own, gone, now)
        for below in self._worth_least_first(path):
            assert below.locks > 0, "unlock without a lock"
            below.locks -= 1
            if below.page and (not gone or below.depth - 1 not in gone):
                self._let_go(below, now)
        root = path[-1].parent if path else node
        assert root is not None
        root.locks -= 1
        self._prune(node)

    def pass_by(self, node: Node, pages: range, now: float) -> None:
        """Whoever locked the path to ``node`` needs its ``pages`` (numbers) no longer."""
        self._clock.now += 1
        while node.parent is not None and node.depth > pages.start:
            if node.depth <= pages.stop and node.page:
                self._let_go(node, now)
            node = node.parent

    def pin(self, node: Node) -> None:
        """Keep ``node`` and its ancestors until the matching ``unpin``, and the pages that a hit of
        just this path needs. The caller has seen that they are there."""
        gone = self._behind(node)
        self.lock_path(node, gone)
        for above in path_to(node):
            if above.depth - 1 not in gone:
                self.n_pinned += above.pins == 0
                above.pins += 1

    def unpin(self, node: Node, now: float) -> None:
        gone = self._behind(node)
        for above in path_to(node):
            if above.depth - 1 not in gone:
                above.pins -= 1
                self.n_pinned -= above.pins == 0
        self.unlock_path(node, now, gone=gone)

    def pinnable(self, node: Node) -> bool:
        """True while all pages are there that a hit of just this path needs."""
        gone = self._behind(node)
        return all(above.page or above.depth - 1 in gone for above in path_to(node))

    def _behind(self, node: Node) -> range:
        return self.window.gone(node.depth * self.page_size)

    def passed(self, node: Node) -> bool:
        """True if the page of ``node`` lies two windows before all places below where paths end or branch: no hit that
        ends there, or up to a window earlier, needs it."""
        end, window = node, self.window
        while window and len(end.children) == 1 and not end.branches:
            (end,) = end.children.values()
            if node.depth - 1 in window.gone(end.depth * self.page_size - window.tokens):
                return True
        return False

    def release_priority(self, node: Node) -> None:
        """From now on ``node`` is worth what any page is."""
        node.priority = EVERYONE
        self._offer(node)

    def evict(
        self, n: int, now: float = 0.0, on_evict: Callable[[Node], None] | None = None
    ) -> list[int]:
        """Forget up to ``n`` unlocked pages, least worth keeping first; gives their ids.

        ``on_evict`` is called with each node while it is still whole.
        """
        self._lapse(now)
        pages: list[int] = []
        while len(pages) < n and self._leaves:
            priority, used, _, node = heapq.heappop(self._leaves)
            if self._may_go(node) and (node.priority, node.used) == (priority, used):
                if on_evict is not None:
                    on_evict(node)
                pages.append(self._remove(node))
        return pages

    def least(self, now: float) -> tuple[int, int] | None:
        """(priority, last use) of the page that ``evict`` would forget first; None: there is none."""
        self._lapse(now)
        while self._leaves:
            priority, used, _, node = self._leaves[0]
            if self._may_go(node) and (node.priority, node.used) == (priority, used):
                return priority, used
            heapq.heappop(self._leaves)
        return None

    def nodes(self) -> Iterator[tuple[RootKey, Node]]:
        """(root key, node) for every node, hollow ones too, parents first."""
        stack = [
            (key, child) for key, root in self.roots.items() for child in root.children.values()
        ]
        while stack:
            key, node = stack.pop()
            yield key, node
            stack.extend((key, child) for child in node.children.values())

    def lost(self) -> list[int]:
        """Pages that nobody holds and no eviction would find (for the audit: none)."""
        entries = {(p, u, id(n)) for p, u, _, n in self._leaves}
        free = [node for _, node in self.nodes() if self._may_go(node)]
        return [n.page for n in free if (n.priority, n.used, id(n)) not in entries]

    def _may_go(self, node: Node) -> bool:
        """Nobody holds its page, and no page below it needs it."""
        return node.holds == 0 and node.page != 0 and (not node.children or bool(self.window))

    def _let_go(self, node: Node, now: float) -> None:
        assert node.holds > 0, "let go of what was not held"
        node.holds -= 1
        if node.holds == 0:
            self.n_evictable += 1
            self._touch(node, now)

    def _worth_least_first(self, path: list[Node]) -> list[Node]:
        """``path`` (deepest first) in the order in which it is given up: the front, which slides out
        of windows first, before the end; but sinks, without which nothing is a hit, last."""
        front_first, n = path[::-1], self.window.n_sink_pages
        return [*front_first[n:], *front_first[:n]] if n else front_first

    def _favour(
        self, path: list[Node], keeps: Seq[Keep], own: int, gone: range, now: float
    ) -> None:
        """Give the nodes of ``path`` (deepest first) the priorities that ``keeps`` ask for. The next
        turn of a session needs none of the pages in ``gone``."""
        hints = [keep for keep in keeps if keep.priority < SESSION]
        for number, node in zip(range(len(path) - 1, -1, -1), path, strict=True):
            keep = strongest(hints if number in gone else keeps, number)
            if keep is None or (keep.priority < EVERYONE and number < own):
                continue
            self._prefer(node, keep)
            if number in gone and node.holds == 0:
                self._touch(node, now)

    @staticmethod
    def _prefer(node: Node, keep: Keep) -> None:
        if keep.priority > node.priority or node.priority == EVERYONE:
            node.priority, node.seconds = keep.priority, keep.seconds
        elif keep.priority == node.priority:
            node.seconds = max(node.seconds, keep.seconds)

    def _touch(self, node: Node, now: float) -> None:
        node.used = self._clock.now
        if node.priority != EVERYONE:
            node.until = now + node.seconds
            self._serial += 1
            heapq.heappush(self._lapses, (node.until, self._serial, node))
        self._offer(node)
        if len(self._leaves) + len(self._lapses) > 4 * self.n_nodes + 64:
            self._compact()

    def _offer(self, node: Node) -> None:
        if self._may_go(node):
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
        """A page that is held is in use: its time begins anew when it is let go."""
        alive = node.page != 0 and node.holds == 0
        return alive and node.priority != EVERYONE and node.until == until

    def _compact(self) -> None:
        """Drop stale heap entries, which pile up while the same leaves are locked and unlocked."""
        leaves = {
            id(n): (p, u, s, n)
            for p, u, s, n in self._leaves
            if self._may_go(n) and (n.priority, n.used) == (p, u)
        }
        lapses = {id(n): (t, s, n) for t, s, n in self._lapses if self._lapses_at(n, t)}
        self._leaves, self._lapses = list(leaves.values()), list(lapses.values())
        heapq.heapify(self._leaves)
        heapq.heapify(self._lapses)

    def _remove(self, node: Node) -> int:
        page, node.page = node.page, 0  # marks the node for heap entries that still name it
        self.n_nodes -= 1
        self.n_hollow += 1
        self.n_evicted += 1
        self.n_evictable -= 1
        self._prune(node)
        return page

    def _prune(self, node: Node) -> None:
        """Drop ``node`` and its ancestors as far as they are hollow, below nobody's lock and above no
        page. Roots of salts that hold nothing would pile up for ever, so they go too."""
        while node.parent is not None and not (node.page or node.children or node.locks):
            del node.parent.children[node.key]
            self.n_hollow -= 1
            node = node.parent
            self._offer(node)
        if node.parent is None and not node.children and node.locks == 0:
            self.roots.pop(node.key, None)
