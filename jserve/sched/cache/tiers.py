"""Feeds disk contents and completed reads to the scheduler as journalled inputs.

It owns their order: the clock first, then the journal, then the change, so that a replay does alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq

from jserve.sched.scheduler import Scheduler
from jserve.types import PageFetch


def learn(scheduler: Scheduler, digests: Iterable[bytes], now: float) -> None:
    """There is a disk, and it holds pages of these digests."""
    tier, digests = scheduler.resources.cache.tier, list(digests)
    scheduler.resources.retention.advance(now)
    if scheduler.journal is not None:
        scheduler.journal.stored(digests, now)
    if tier is not None:
        tier.learn(digests)


def take_fetches(scheduler: Scheduler) -> list[PageFetch]:
    """The reads to start, each given once."""
    tier = scheduler.resources.cache.tier
    fetches = [] if tier is None else tier.take_fetches()
    scheduler.speculation.backfill.read(fetches)
    return fetches


def take_exports(scheduler: Scheduler) -> list[tuple[int, bytes]]:
    """(device page, digest) of what is to be written for other engines, each given once. What they hold changes
    with the next plan at the earliest."""
    resources = scheduler.resources
    pages, resources.exports = resources.exports, []
    return pages


def unstored_pages(scheduler: Scheduler) -> list[tuple[int, bytes]]:
    """(device page, digest) of what the prefix cache knows and the disk does not, for a last write."""
    return scheduler.resources.cache.unstored_pages()


def fetched(scheduler: Scheduler, answers: Seq[tuple[int, bool]], now: float) -> None:
    """Reads were answered: (ticket, whether the page is in its host page)."""
    tier = scheduler.resources.cache.tier
    scheduler.resources.retention.advance(now)
    if scheduler.journal is not None:
        scheduler.journal.fetched(answers, now)
    assert tier is not None, "a read was answered and there is no tier"
    for ticket, ok in answers:
        tier.fetched(ticket, ok=ok)
