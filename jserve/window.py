"""Computes which pages of a sequence slid out of the attention window, and how many one holds at the most.

It owns the arithmetic, for the ledger of pages and for whoever sizes the pool. A window is that of one group of
layers, or of a model in which every layer has one; ``tokens`` is the largest of them. The token at position n reads
positions n - tokens + 1 .. n, and the first ``sinks`` ones for ever (StreamingLLM)::

    pages     [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ][ 6 ]
    read by   sink                 |<- window ->|n
    gone            1    2    3

Of layers that cut the text into chunks all pages of a chunk are gone where the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jserve.config import SchedulerOptions
from jserve.kv_layout import Reach

NOTHING = range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """``tokens`` 0: every token reads all before it, and nothing is ever gone."""

    page_size: int
    tokens: int = 0
    sinks: int = 0
    """Tokens at the start that all later ones read too."""
    chunked: bool = False
    """True: the text is cut every ``tokens``, and a token reads its own piece."""

    def __bool__(self) -> bool:
        return self.tokens > 0

    @property
    def n_sink_pages(self) -> int:
        return -(-self.sinks // self.page_size)

    def gone(self, n_tokens: int) -> range:
        """Numbers of the pages that no token from position ``n_tokens`` on reads."""
        if not self.tokens:
            return NOTHING
        edge = self._lowest(n_tokens) // self.page_size
        first = self.n_sink_pages
        return range(first, edge) if edge > first else NOTHING

    def needed(self, n_pages: int) -> list[int]:
        """Numbers of those of the first ``n_pages`` that what follows them reads."""
        gone = self.gone(n_pages * self.page_size)
        return [*range(gone.start), *range(gone.stop, n_pages)] if gone else [*range(n_pages)]

    def longest(self, n_pages: int, present: Callable[[int], bool]) -> int:
        """The most pages, up to ``n_pages``, all of which are ``present`` that what follows them reads."""
        head = min(n_pages, self.n_sink_pages)
        n = next((i for i in range(head) if not present(i)), n_pages)
        at = n  # all pages from here to n are present
        while at > max(head, self.gone(n * self.page_size).stop):
            at -= 1
            if not present(at):
                n = at
        return n

    def _lowest(self, position: int) -> int:
        if self.chunked:
            return position // self.tokens * self.tokens
        return max(0, position - self.tokens + 1)

    def most_pages(self, n_ahead: int) -> int:
        """Pages that a sequence holds at the very most when up to ``n_ahead`` tokens beyond the last
        committed one have pages; 0 where there is no bound.

        Two more than the tokens fill: the window begins within a page, and what slid out of it is
        given back when the next page is full.
        """
        if not self.tokens:
            return 0
        return 2 - (-(self.tokens + n_ahead) // self.page_size) + self.n_sink_pages


def chunk_of(options: SchedulerOptions, max_prefill_tokens: int) -> int:
    """Most prefill tokens of one sequence in one step."""
    most = min(max_prefill_tokens, options.max_num_batched_tokens)
    return min(most, options.max_prefill_tokens or most, options.max_prefill_chunk or most)


def tokens_ahead(options: SchedulerOptions, max_prefill_tokens: int, max_drafts: int) -> int:
    """Most tokens beyond the last committed one for which a sequence holds pages: the rows in flight, the
    one being planned, and what the device may draft after it."""
    row = max(chunk_of(options, max_prefill_tokens), 1 + max_drafts)
    return (options.overlap + 2) * row


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDemand:
    """The pages that one sequence holds at once, of all groups of layers together."""

    page_size: int
    parts: tuple[tuple[int, int], ...] = ((1, 0),)
    """(groups, most pages that one of them holds where a window gives pages back, else 0) of each reach."""

    @classmethod
    def of(
        cls,
        reaches: tuple[Reach, ...],
        page_size: int,
        n_ahead: int,
        window: int = 0,
        sinks: int = 0,
    ) -> PageDemand:
        """Of ``reaches``, or of one group that sees ``window`` and ``sinks`` where there are none. ``n_ahead`` as of
        ``Window.most_pages``."""
        windows = windows_of(reaches, page_size) or (
            (1, Window(page_size=page_size, tokens=window, sinks=sinks)),
        )
        parts = tuple((n, part.most_pages(n_ahead)) for n, part in windows)
        return cls(page_size=page_size, parts=parts)

    @property
    def n_groups(self) -> int:
        return sum(n for n, _ in self.parts)

    @property
    def slides(self) -> bool:
        """True where some group gives pages back."""
        return any(bound for _, bound in self.parts)

    def pages(self, n_tokens: int) -> int:
        """Pages of ``n_tokens`` in one group."""
        return -(-n_tokens // self.page_size)

    def most(self, n_tokens: int, scale: int = 1) -> int:
        """Most pages of a sequence of ``n_tokens``; ``scale``: so many times the bounds."""
        n = self.pages(n_tokens)
        return sum([groups * min(n, scale * bound or n) for groups, bound in self.parts])

    def columns(self, pages_per_slot: int) -> tuple[int, ...]:
        """Columns of the page tables of each reach: of the first one for every page of a sequence, of others for as
        many as one holds at once."""
        others = [min(bound or pages_per_slot, pages_per_slot) for _, bound in self.parts[1:]]
        return (pages_per_slot, *others)

    def exceeds(self, n_tokens: int) -> bool:
        """True if some group gives pages back before ``n_tokens`` are there."""
        return any([0 < bound * self.page_size < n_tokens for _, bound in self.parts])

    def room(self, n_pages: int, n_most: int) -> int:
        """Most tokens, up to ``n_most``, of a sequence that ``n_pages`` suffice for."""
        if self.most(n_most) <= n_pages:
            return n_most
        low, high = 0, self.pages(n_most)
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.most(middle * self.page_size) <= n_pages
            low, high = (middle, high) if fits else (low, middle)
        return low * self.page_size


def windows_of(reaches: tuple[Reach, ...], page_size: int) -> tuple[tuple[int, Window], ...]:
    """(groups, window) of each reach."""
    return tuple(
        (
            reach.n_groups,
            Window(page_size=page_size, tokens=reach.span.most, chunked=reach.span.chunk > 0),
        )
        for reach in reaches
    )
