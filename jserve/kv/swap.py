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

from dataclasses import dataclass

from jserve.kv.ledger import Cache, Lease
from jserve.kv.tiers import HostPage


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Swapped:
    """KV of the first ``n_tokens`` of a sequence (an upper bound under speculation), as far as it was
    private: number of the page in the sequence -> where it is."""

    pages: dict[int, HostPage]
    n_tokens: int


def private(cache: Cache, lease: Lease, n_tokens: int) -> list[int]:
    """Numbers of the private pages among the first ``n_tokens``."""
    first = lease.n_published if lease.cacheable else lease.n_shared
    end = -(-n_tokens // cache.page_size)
    return [i for i in range(first, end) if lease.pages[i]]


def leave(cache: Cache, lease: Lease, n_tokens: int) -> Swapped | None:
    """Have the private pages of ``lease`` saved by the next plan; None if the host has no room."""
    numbers = private(cache, lease, n_tokens)
    if cache.tier is None or not numbers:
        return None
    kept = cache.tier.stow([lease.pages[i] for i in numbers])
    if kept is None:
        return None
    return Swapped(pages=dict(zip(numbers, kept, strict=True)), n_tokens=n_tokens)


def under_way(cache: Cache, swapped: Swapped) -> bool:
    """True while a step in flight carries pages to the host."""
    return cache.tier is not None and any(map(cache.tier.landing, swapped.pages.values()))


def reach(cache: Cache, swapped: Swapped, n_cached: int, n_most: int) -> int:
    """Tokens, ``n_most`` at the most, that need not be computed with ``swapped`` where ``n_cached`` (in
    full pages) are had without; 0 if something between is missing."""
    n, tier = min(swapped.n_tokens, n_most), cache.tier
    if tier is None or not all(map(tier.has, swapped.pages.values())):
        return 0
    gone = cache.parts[0].window.gone(n)
    needed = range(n_cached // cache.page_size, -(-n // cache.page_size))
    return n if all(i in swapped.pages or i in gone for i in needed) else 0


def enter(cache: Cache, lease: Lease, swapped: Swapped, n_cached: int) -> None:
    """Load what ``lease`` lacks beyond ``n_cached`` tokens; the next plan carries it. The rest is
    given up."""
    assert cache.tier is not None
    for i, kept in swapped.pages.items():
        if n_cached // cache.page_size <= i < len(lease.pages) and lease.pages[i]:
            cache.tier.unstow(kept, lease.pages[i])
        else:
            cache.tier.discard(kept)


def drop(cache: Cache, swapped: Swapped) -> None:
    """Its sequence has no use for it."""
    for kept in swapped.pages.values():
        if cache.tier is not None:
            cache.tier.discard(kept)
