"""Knows which replica holds which pages: one bit a replica under each page's digest.

A page is known to be held by what the replica says (page events), and by what was sent to it: while a request is there,
the pages of its prompt are, or will be as soon as they are computed.

A replica that holds a page holds all before it, since leaves are evicted first. So the replicas that hold the first n
pages of a prompt are fewer for a larger n, and where they become fewer is found by bisection. With a sliding window
pages in the middle may go first; then every page is looked up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence as Seq

import numpy as np

from jserve.engine.view import DIGEST_BYTES, PageEvent
from jserve.fleet.prompts import SentPrompts
from jserve.kv.tiers import TOKEN_BYTES, digest_after, packed, root_digest

BLOCK_TOKENS = 256
"""Tokens whose pages ``PageNames`` remembers together."""


class PageIndex:
    """Pages of all replicas, by digest."""

    def __init__(self) -> None:
        self._held: dict[bytes, int] = {}
        self._sent = SentPrompts()
        self._slides = 0
        """One bit for each replica that may hold a page and none before it."""

    def update(self, replica: int, events: Iterable[PageEvent], *, slides: bool = False) -> None:
        """Take over what ``replica`` says of its pages. ``slides``: it may have given back some before others that
        follow them; otherwise whatever it holds after ``events`` are whole prefixes."""
        bit = 1 << replica
        self._slides = self._slides | bit if slides else self._slides & ~bit
        for event in events:
            if event.added:
                self._held[event.digest] = self._held.get(event.digest, 0) | bit
            else:
                self._clear(event.digest, bit)

    def send(self, replica: int, digests: Seq[bytes]) -> None:
        """A request with these pages goes to ``replica``."""
        self._sent.add(replica, digests)

    def over(self, replica: int, digests: Seq[bytes]) -> None:
        """A request with these pages, sent before, is over."""
        self._sent.remove(replica, digests)

    def forget(self, replica: int) -> None:
        """Whatever ``replica`` held is gone; what was sent to it stays until it is over."""
        for digest in [d for d, mask in self._held.items() if mask >> replica & 1]:
            self._clear(digest, 1 << replica)

    def known(self, digests: Seq[bytes], n: int) -> np.ndarray:
        """Pages of the longest prefix of ``digests`` that each of ``n`` replicas holds, float64 [n]."""
        found, sent = np.zeros(n), self._sent.shared(digests)
        for n_pages, mask in sorted([*self._held_prefixes(digests, (1 << n) - 1), *sent]):
            while mask:
                i = mask.bit_length() - 1
                mask ^= 1 << i
                found[i] = n_pages  # no fewer than before
        slides = self._slides & (1 << n) - 1
        for i in range(slides.bit_length()):
            if slides >> i & 1:
                found[i] = self._one_by_one(digests, i, sent)
        return found

    def _held_prefixes(self, digests: Seq[bytes], mask: int) -> list[tuple[int, int]]:
        """(n, mask) for each n > 0: of the replicas of ``mask``, those whose longest held prefix has n pages."""
        held, found = self._held.get, []
        at_first = held(digests[0], 0) & mask if digests else 0
        # Those in ``at_low`` hold page number ``low``, those in ``at_high`` number ``high`` too.
        parts = [(0, at_first, len(digests), 0)] if at_first else []
        while parts:
            low, at_low, high, at_high = parts.pop()
            while high - low > 1:
                middle = (low + high) >> 1
                here = held(digests[middle], 0) & at_low
                if here == at_low:
                    low = middle
                    continue
                if here != at_high:
                    parts.append((middle, here, high, at_high))
                high, at_high = middle, here
            found.append((low + 1, at_low & ~at_high))
        return found

    def _one_by_one(self, digests: Seq[bytes], replica: int, sent: Seq[tuple[int, int]]) -> int:
        """``known`` of a replica that may hold a page and none before it."""
        at_least = max([n for n, mask in sent if mask >> replica & 1], default=0)
        for i in range(at_least, len(digests)):
            if not self._held.get(digests[i], 0) >> replica & 1:
                return i
        return len(digests)

    def _clear(self, digest: bytes, bit: int) -> None:
        left = self._held.get(digest, 0) & ~bit
        if left:
            self._held[digest] = left
        else:
            self._held.pop(digest, None)

    def __len__(self) -> int:
        return len(self._held)


class PageNames:
    """Names pages as ``digests_of`` does, and remembers the names below prefixes that it met of late: of a prompt whose
    beginning is known only the rest is digested.

    It goes by blocks of ``BLOCK_TOKENS``. A name is found by the digest before its block and all tokens of the block,
    so it is never another prompt's.

    Args:
        most: blocks that are remembered, about 3 KB each.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._known: OrderedDict[tuple[bytes, bytes, int], tuple[bytes, list[bytes]]] = (
            OrderedDict()
        )
        """(Digest before a block, its packed tokens, page size) -> the digest behind it, the names of its pages."""

    def of(self, key: tuple, tokens: Seq[int], page_size: int) -> tuple[bytes, ...]:
        """As ``digests_of``."""
        whole, known = packed(tokens), self._known
        digest, found = root_digest(key), list[bytes]()
        page_bytes = page_size * TOKEN_BYTES
        block_bytes = max(1, BLOCK_TOKENS // page_size) * page_bytes
        n_blocks = max(0, len(whole) - 1) // block_bytes
        for at in range(0, n_blocks * block_bytes, block_bytes):
            block = digest, whole[at : at + block_bytes], page_size
            named = known.get(block)
            if named is None:
                named = known[block] = _named(digest, block[1], page_bytes)
                if len(known) > self._most:
                    known.popitem(last=False)
            else:
                known.move_to_end(block)
            digest, names = named
            found += names
        rest = whole[n_blocks * block_bytes :]
        n_full = max(0, len(rest) - 1) // page_bytes
        found += _named(digest, rest[: n_full * page_bytes], page_bytes)[1]
        return tuple(found)


def digests_of(key: tuple, tokens: Seq[int], page_size: int) -> tuple[bytes, ...]:
    """The names of the full pages of a prompt below the root ``key``, but for a last one that has to be
    computed for its logits: ``bytes[DIGEST_BYTES]`` each."""
    page_bytes, whole = page_size * TOKEN_BYTES, packed(tokens)
    n_full = max(0, len(whole) - 1) // page_bytes
    return tuple(_named(root_digest(key), whole[: n_full * page_bytes], page_bytes)[1])


def _named(digest: bytes, pages: bytes, page_bytes: int) -> tuple[bytes, list[bytes]]:
    """The digest behind whole ``pages`` that follow ``digest``, and their names."""
    found, view = list[bytes](), memoryview(pages)
    for at in range(0, len(pages), page_bytes):
        digest = digest_after(digest, view[at : at + page_bytes])
        found.append(digest[:DIGEST_BYTES])
    return digest, found
