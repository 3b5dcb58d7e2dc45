"""Audits the page ledger: recomputes every count from the owners.

It owns the invariants of pages (conservation, reference sums, exclusive writers, tables, free list, tree shape,
pinned paths, one root per node; I-numbers as in the tests). It repairs nothing. Linear in the pages held: it can
run after every step in tests and when idle in production.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from jserve.kv.pages import GroupTable, PageLease, PagePool, PageSets, PageTable
from jserve.kv.radix import Node, RadixTree


def check(
    pool: PagePool | PageSets,
    table: PageTable,
    tree: RadixTree,
    leases: list[PageLease],
    held: list[int],
    pinned: list[Node],
) -> None:
    """Raises AssertionError at the first invariant that does not hold."""
    cached = [node.page for _, node in tree.nodes() if node.page]
    _references(pool, cached, leases, held)
    _free_list(pool)
    _tables(table, leases)
    _writers(pool, set(cached), leases)
    _shape(tree)
    _locks(tree, leases, pinned)
    _pins(tree, pinned)


def check_sets(pool: PagePool, sets: list[PageSets], held: list[int]) -> None:
    """Raises AssertionError unless every page of ``pool`` is free, in one set that is in use, or held outside."""
    owners = Counter(held)
    for part in sets:
        for one in range(1, part.n_pages):
            pages = part.pages_of(one)
            assert all(pages) == any(pages) == (part.refs[one] > 0), f"set {one} is {pages}"
            owners.update(page for page in pages if page)
    _free_list(pool)
    wrong = [page for page in range(1, pool.n_pages) if pool.refs[page] != owners[page]]
    assert not wrong, f"pages {wrong[:8]} count other owners than they have"
    assert max(owners.values(), default=0) < 2, "a page is in two sets"
    n_free = len(pool.free_pages())
    assert len(owners) + n_free == pool.n_usable, f"{len(owners)} owned + {n_free} free pages"


def check_group_table(table: GroupTable, sets: PageSets, leases: list[PageLease]) -> None:
    """Raises AssertionError unless the device finds the pages of every lease in its columns, and nothing else."""
    expected = np.zeros_like(table.pages_NCW)
    for lease in leases:
        for number, page in enumerate(lease.pages):
            if page:
                expected[:, lease.slot, number % table.width] = sets.pages_of(page)
    assert np.array_equal(table.pages_NCW, expected), (
        "the table of a group is not that of its leases"
    )


def _references(
    pool: PagePool | PageSets, cached: list[int], leases: list[PageLease], held: list[int]
) -> None:
    """I1 and I2: each page's count equals its owners, and owned + free pages are all pages."""
    owners = Counter(cached) + Counter(held)
    for lease in leases:
        assert not lease.released, f"slot {lease.slot} lives on a released lease"
        owners.update(page for page in lease.pages if page)
        given_back = [i for i, page in enumerate(lease.pages) if not page]
        assert given_back == list(lease.gone), f"slot {lease.slot} lacks {given_back}, {lease.gone}"
    assert len(cached) == len(set(cached)), "a page stands in the tree twice"
    assert owners[0] == 0, "the scratch page is owned"
    for page in range(1, pool.n_pages):
        refs = pool.refs[page]
        assert refs == owners[page], f"page {page} counts {refs} owners, has {owners[page]}"
    n_owned = sum(1 for page in owners if owners[page])
    n_free = len(pool.free_pages())
    assert n_owned + n_free == pool.n_usable, (
        f"{n_owned} owned + {n_free} free != {pool.n_usable} pages"
    )


def _free_list(pool: PagePool | PageSets) -> None:
    """I5: no duplicates, nothing that is owned, never scratch."""
    free = pool.free_pages()
    assert len(free) == len(set(free)), "a page is in the free list twice"
    assert all(0 < page < pool.n_pages for page in free), "the free list holds a page of no pool"
    assert all(pool.refs[page] == 0 for page in free), "an owned page is in the free list"


def _tables(table: PageTable, leases: list[PageLease]) -> None:
    """I4: a slot's row is its lease's pages, each once; slots without a lease point at scratch."""
    rows = {lease.slot: lease for lease in leases}
    assert len(rows) == len(leases), "two leases share a slot"
    for slot in range(len(table.rows)):
        pages = rows[slot].pages if slot in rows else []
        held = [page for page in pages if page]
        assert len(held) == len(set(held)), f"slot {slot} holds a page twice: {pages}"
        row = table.rows[slot]
        assert row[: len(pages)].tolist() == pages, f"slot {slot}: table {row}, lease {pages}"
        assert not row[len(pages) :].any(), f"slot {slot} keeps stale pages behind its own: {row}"


def _writers(pool: PagePool | PageSets, cached: set[int], leases: list[PageLease]) -> None:
    """I3: a page that is still written has one owner and is not in the tree."""
    for lease in leases:
        for page in lease.pages[max(lease.n_published, lease.n_shared, lease.gone.stop) :]:
            assert pool.refs[page] == 1, f"page {page} is written and shared"
            assert page not in cached, f"page {page} is written and in the tree"


def _shape(tree: RadixTree) -> None:
    """I6 and I8: keys are full pages, parents and children agree, every node hangs on one root."""
    seen: set[int] = set()
    for _, node in tree.nodes():
        assert id(node) not in seen, "a node is reachable twice"
        seen.add(id(node))
        assert len(node.key) == tree.page_size, f"a key of {len(node.key)} tokens"
        if not node.page:
            assert tree.window, "an evicted node is still reachable"
            assert node.locks or node.children, "a hollow node stays for nothing"
            assert not node.holds, "somebody holds a page that is gone"
        assert node.parent is not None, "a node without a parent"
        assert node.parent.children.get(node.key) is node, "parent and child disagree"
    counted = tree.n_nodes + tree.n_hollow
    assert len(seen) == counted, f"{len(seen)} nodes, counted {counted}"
    n_hollow = sum(not node.page for _, node in tree.nodes())
    assert n_hollow == tree.n_hollow, f"{n_hollow} hollow nodes, counted {tree.n_hollow}"


def _locks(tree: RadixTree, leases: list[PageLease], pinned: list[Node]) -> None:
    """I7: locks are the leases and pins on the path, holds those that need its page; pages that
    nobody holds are the evictable ones."""
    behind = [tree.window.gone(node.depth * tree.page_size) for node in pinned]
    ends = [*((lease.node, lease.gone) for lease in leases), *zip(pinned, behind, strict=True)]
    locks = Counter(id(node) for end, _ in ends for node in _path(end))
    holds = Counter(
        id(node) for end, gone in ends for node in _path(end)[:-1] if node.depth - 1 not in gone
    )
    for lease in leases:
        root = _path(lease.node)[-1]
        assert tree.roots.get(root.key) is root, f"slot {lease.slot} hangs on a dropped root"
        depth = len(_path(lease.node)) - 1
        full = lease.n_published if lease.cacheable else lease.n_shared
        assert depth == full, f"slot {lease.slot} locks {depth} pages, published {full}"
    nodes = [node for _, node in tree.nodes()]
    for node in [*nodes, *tree.roots.values()]:
        assert node.locks == locks[id(node)], f"{node.locks} locks, {locks[id(node)]} leases"
        assert node.holds == holds[id(node)], f"{node.holds} holds, {holds[id(node)]} leases"
    free = sum(1 for node in nodes if node.page and node.holds == 0)
    assert free == tree.n_evictable, f"{free} evictable pages, counted {tree.n_evictable}"
    assert all(root.children or root.locks for root in tree.roots.values()), "an empty root stays"


def _pins(tree: RadixTree, pinned: list[Node]) -> None:
    """I7: pins are those of the owners, and every page that nobody holds can be found for eviction."""
    expected = Counter(
        id(node)
        for end in pinned
        for node in _path(end)[:-1]
        if node.depth - 1 not in tree.window.gone(end.depth * tree.page_size)
    )
    nodes = [node for _, node in tree.nodes()]
    for node in nodes:
        assert node.pins == expected[id(node)], f"{node.pins} pins, {expected[id(node)]} owners"
    assert tree.n_pinned == len(expected), f"{len(expected)} pinned pages, counted {tree.n_pinned}"
    assert all(end.page > 0 for end in pinned), "a pinned node was evicted"
    assert not tree.lost(), f"free pages {tree.lost()} are in no heap"


def _path(node: Node) -> list[Node]:
    return list(_ancestors(node))


def _ancestors(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent
