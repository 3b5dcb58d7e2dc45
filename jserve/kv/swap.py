"""Moves the private KV of preempted sequences to host memory and back.

What the tree knows stays findable there and in the tiers, so only the rest goes, to host pages of its own that
nobody else can find::

    sequence   [ in the tree     ][ private, full ][ private, part ]
    leaves       forgotten or not   save -> host     save -> host
    returns      hit, or from host  load <- host     load <- host      goes on at ``n_tokens``

It is of use only if all before it is there again. Back on the device, pages are private as any that
a sequence has just computed, until a commit publishes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from jserve.kv.ledger import Cache, Lease
from jserve.kv.tiers import HostPage


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Swapped:
    """KV of the first ``n_tokens`` of a sequence (an upper bound under speculation), as far as it was private."""

    pages: dict[tuple[int, int], list[HostPage]]
    """(part of the cache, number of the page in the sequence) -> where it is, in each group of layers."""
    n_tokens: int


def private(cache: Cache, lease: Lease, n_tokens: int) -> dict[tuple[int, int], tuple[int, ...]]:
    """The private pages among the first ``n_tokens``: (part, number) -> pages of the device."""
    end = -(-n_tokens // cache.page_size)
    found = {}
    for p, (part, own) in enumerate(zip(cache.parts, lease.parts, strict=True)):
        for i in range(own.n_published if own.cacheable else own.n_shared, end):
            if own.pages[i]:
                found[p, i] = part.pool.pages_of(own.pages[i])
    return found


def leave(cache: Cache, lease: Lease, n_tokens: int) -> Swapped | None:
    """Have the private pages of ``lease`` saved by the next plan; None if the host has no room."""
    own = private(cache, lease, n_tokens)
    if cache.tier is None or not own:
        return None
    stowed = cache.tier.stow([page for pages in own.values() for page in pages])
    if stowed is None:
        return None
    kept = iter(stowed)
    return Swapped(
        pages={at: [next(kept) for _ in pages] for at, pages in own.items()}, n_tokens=n_tokens
    )


def under_way(cache: Cache, swapped: Swapped) -> bool:
    """True while a step in flight carries pages to the host."""
    return cache.tier is not None and any(map(cache.tier.landing, _all(swapped)))


def reach(cache: Cache, swapped: Swapped, n_cached: int, n_most: int) -> int:
    """Tokens, ``n_most`` at the most, that need not be computed with ``swapped`` where ``n_cached`` (in
    full pages) are had without; 0 if something between is missing."""
    n, tier = min(swapped.n_tokens, n_most), cache.tier
    if tier is None or not all(map(tier.has, _all(swapped))):
        return 0
    between = range(n_cached // cache.page_size, -(-n // cache.page_size))
    for p, part in enumerate(cache.parts):
        gone = part.window.gone(n)
        if not all((p, i) in swapped.pages or i in gone for i in between):
            return 0
    return n


def enter(cache: Cache, lease: Lease, swapped: Swapped, n_cached: int) -> None:
    """Load what ``lease`` lacks beyond ``n_cached`` tokens; the next plan carries it. The rest is
    given up."""
    assert cache.tier is not None
    for (p, i), kept in swapped.pages.items():
        own = lease.parts[p].pages
        if n_cached // cache.page_size <= i < len(own) and own[i]:
            for one, page in zip(kept, cache.parts[p].pool.pages_of(own[i]), strict=True):
                cache.tier.unstow(one, page)
        else:
            for one in kept:
                cache.tier.discard(one)


def drop(cache: Cache, swapped: Swapped) -> None:
    """Its sequence has no use for it."""
    for kept in _all(swapped):
        if cache.tier is not None:
            cache.tier.discard(kept)


def _all(swapped: Swapped) -> Iterator[HostPage]:
    return itertools.chain.from_iterable(swapped.pages.values())
