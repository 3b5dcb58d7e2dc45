"""Computes which pages of a sequence slid out of the attention window.

It owns the arithmetic, for the ledger of pages and for whoever sizes the pool. It holds for models in which every
layer has a window; ``tokens`` is the largest of them. The token at position n reads positions n - tokens + 1 .. n,
and the first ``sinks`` ones for ever (StreamingLLM)::

    pages     [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ][ 6 ]
    read by   sink                 |<- window ->|n
    gone            1    2    3
"""

from __future__ import annotations

from dataclasses import dataclass

from jserve.config import SchedulerOptions

NOTHING = range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """``tokens`` 0: every token reads all before it, and nothing is ever gone."""

    page_size: int
    tokens: int = 0
    sinks: int = 0
    """Tokens at the start that all later ones read too."""

    def __bool__(self) -> bool:
        return self.tokens > 0

    @property
    def n_sink_pages(self) -> int:
        return -(-self.sinks // self.page_size)

    def gone(self, n_tokens: int) -> range:
        """Numbers of the pages that no token from position ``n_tokens`` on reads."""
        if not self.tokens:
            return NOTHING
        edge = max(0, n_tokens - self.tokens + 1) // self.page_size
        first = self.n_sink_pages
        return range(first, edge) if edge > first else NOTHING

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
