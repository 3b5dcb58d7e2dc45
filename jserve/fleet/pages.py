"""Knows which replica holds which pages: one bit a replica under each page's digest.

A page is known to be held by what the replica says (page events), and by what was sent to it: while a request is there,
the pages of its prompt are, or will be as soon as they are computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence as Seq

from jserve.engine.view import DIGEST_BYTES, PageEvent
from jserve.kv.tiers import next_digest, root_digest


class PageIndex:
    """Pages of all replicas, by digest."""

    def __init__(self) -> None:
        self._held: dict[bytes, int] = {}
        self._sent: dict[bytes, int] = {}
        self._counts: dict[int, dict[bytes, int]] = defaultdict(dict)
        """Replica -> digest -> requests there that have the page."""

    def update(self, replica: int, events: Iterable[PageEvent]) -> None:
        """Take over what ``replica`` says of its pages."""
        bit = 1 << replica
        for event in events:
            if event.added:
                self._held[event.digest] = self._held.get(event.digest, 0) | bit
            else:
                _clear(self._held, event.digest, bit)

    def send(self, replica: int, digests: Iterable[bytes]) -> None:
        """A request with these pages goes to ``replica``."""
        counts, sent, bit = self._counts[replica], self._sent, 1 << replica
        for digest in digests:
            counts[digest] = counts.get(digest, 0) + 1
            sent[digest] = sent.get(digest, 0) | bit

    def over(self, replica: int, digests: Iterable[bytes]) -> None:
        """A request with these pages, sent before, is over."""
        counts = self._counts[replica]
        for digest in digests:
            left = counts.pop(digest) - 1
            if left:
                counts[digest] = left
            else:
                _clear(self._sent, digest, 1 << replica)

    def forget(self, replica: int) -> None:
        """Whatever ``replica`` held is gone; what was sent to it stays until it is over."""
        for digest in [d for d, mask in self._held.items() if mask >> replica & 1]:
            _clear(self._held, digest, 1 << replica)

    def known(self, digests: Seq[bytes], n: int) -> list[int]:
        """Pages of the longest prefix of ``digests`` that each of ``n`` replicas holds."""
        found, alive = [len(digests)] * n, (1 << n) - 1
        held, sent = self._held.get, self._sent.get
        for i, digest in enumerate(digests):
            here = (held(digest, 0) | sent(digest, 0)) & alive
            gone, alive = alive ^ here, here
            while gone:
                low = gone & -gone
                found[low.bit_length() - 1] = i
                gone ^= low
            if not alive:
                break
        return found

    def __len__(self) -> int:
        return len(self._held)


def _clear(masks: dict[bytes, int], digest: bytes, bit: int) -> None:
    left = masks.get(digest, 0) & ~bit
    if left:
        masks[digest] = left
    else:
        masks.pop(digest, None)


def digests_of(key: tuple, tokens: Seq[int], page_size: int) -> tuple[bytes, ...]:
    """The names of the full pages of a prompt below the root ``key``, but for a last one that has to be
    computed for its logits: ``bytes[DIGEST_BYTES]`` each."""
    digest, found = root_digest(key), []
    for at in range(0, len(tokens) - page_size, page_size):
        digest = next_digest(digest, tokens[at : at + page_size])
        found.append(digest[:DIGEST_BYTES])
    return tuple(found)
