"""Chooses between swapping and recomputing the KV of a preempted sequence, by measured cost.

Swapping moves the private pages twice; computing again takes the prefill of their
tokens::

    swap       2 * pages * (bytes of a page / measured copy bandwidth)
    recompute  tokens / max_prefill_tokens steps, at their measured times

What is in the tree costs neither way, so a sequence that publishes its pages nearly always computes
its last few tokens again; one that may not publish, or whose prefill is slow, goes to the host.
"""

from __future__ import annotations

from jserve.kv import swap
from jserve.kv.ledger import Cache
from jserve.sched import policy
from jserve.timing.prefill_cap import PrefillCap
from jserve.types import Sequence


class SwapPolicy:
    """Swaps over one page cache.

    Args:
        cap: predicts the time of a prefill.
        mode: ``auto``, ``recompute`` or ``swap``.
        page_move_s: measured seconds of one page one way; 0: unknown.
    """

    def __init__(
        self, cache: Cache, cap: PrefillCap | None, *, mode: str, page_move_s: float
    ) -> None:
        self.cache, self.cap, self.mode, self.page_move_s = cache, cap, mode, page_move_s
        self.n_out = self.n_back = self.n_lost = 0

    def leave(self, seq: Sequence) -> None:
        """``seq`` is preempted: saves its pages if swapping is cheaper than recomputing."""
        lease = seq.lease
        if self.cache.tier is None or self.mode == "recompute" or lease is None:
            return
        own = swap.private(self.cache, lease, seq.scheduled)
        n_pages = sum(map(len, own.values()))
        if n_pages and (self.mode == "swap" or self._pays(seq, n_pages)):
            seq.swapped = swap.leave(self.cache, lease, seq.scheduled)
            self.n_out += seq.swapped is not None

    def waits(self, seq: Sequence) -> bool:
        """True while the pages of ``seq`` (in the queue) are on their way to the host."""
        return seq.swapped is not None and swap.under_way(self.cache, seq.swapped)

    def reach(self, seq: Sequence, n_cached: int) -> int:
        """Tokens of ``seq`` that need not be computed: ``n_cached``, or more with its swapped pages."""
        if seq.swapped is None:
            return n_cached
        return max(n_cached, swap.reach(self.cache, seq.swapped, n_cached, len(seq.tokens) - 1))

    def enter(self, seq: Sequence, n_cached: int, n_reached: int) -> None:
        """``seq`` is admitted with ``n_cached`` tokens from elsewhere and continues at ``n_reached``."""
        swapped, seq.swapped = seq.swapped, None
        if swapped is None:
            return
        if n_reached > n_cached and seq.lease is not None:
            swap.enter(self.cache, seq.lease, swapped, n_cached)
            self.n_back += 1
        else:
            swap.drop(self.cache, swapped)
            self.n_lost += 1

    def forget(self, seq: Sequence) -> None:
        """``seq`` is over."""
        if seq.swapped is not None:
            swap.drop(self.cache, seq.swapped)
            seq.swapped = None

    def counters(self) -> dict[str, float]:
        """For /metrics."""
        return {
            "swaps_out_total": float(self.n_out),
            "swaps_back_total": float(self.n_back),
            "swaps_lost_total": float(self.n_lost),
        }

    def _pays(self, seq: Sequence, n_pages: int) -> bool:
        cap = self.cap
        if cap is None or not cap.costs.known or not self.page_move_s:
            return False
        n_full, rest = divmod(policy.waste(seq), cap.most)
        seconds, context = cap.costs.seconds, seq.scheduled
        again = n_full * seconds(0, cap.most, context) + seconds(0, rest, context)
        return 2 * n_pages * self.page_move_s < again
