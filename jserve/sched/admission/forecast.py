"""Predicts how many pages running sequences will still need, so that admission leaves room for them.

Every running sequence grows by one token a step until it finishes and frees its pages, so what is
needed beyond today's pages peaks just before one of them ends. With the expected remaining lengths
``left`` sorted, the peak is the largest of::

    left     3      7         12                  at 3:  3 growing * 3 tokens
    own      40     16        64  tokens          at 7:  2 growing * 7 tokens - 40 given back
             |------|                             at 12: 1 growing * 12 tokens - 40 - 16
             |------------|
             |----------------------|

Lengths are expectations: the pool is overcommitted by their error, and by no more. What turns out
longer is repaired by preemption, which never fails (see ``policy``). Source of the peak: the
past-future scheduler of LightLLM (Gong et al., ASPLOS 2025).
"""

from __future__ import annotations

from collections.abc import Iterable

from jserve.sched import policy
from jserve.types import Lane, Sequence

GAIN = 0.05


class Lengths:
    """Mean output length per lane, from the sequences that ended by themselves."""

    def __init__(self) -> None:
        self._mean = dict.fromkeys(Lane, 0.0)
        self._n = dict.fromkeys(Lane, 0)

    def ended(self, seq: Sequence) -> None:
        lane = seq.request.lane
        self._n[lane] += 1
        gain = max(GAIN, 1 / self._n[lane])
        self._mean[lane] += gain * (seq.n_output - self._mean[lane])

    def expected(self, lane: Lane, most: int, first: int | None = None) -> int:
        """Output tokens to expect of a new sequence; where nothing has ended yet ``first`` or, without that, ``most``
        of them."""
        mean = round(self._mean[lane]) if self._n[lane] else first
        return most if mean is None else min(most, mean)

    def left(self, seq: Sequence) -> int:
        """Tokens ``seq`` is expected to grow by; 0 where nothing has ended yet.

        One that is past the mean is expected to go on for half of it.
        """
        mean, n_out = self._mean[seq.request.lane], seq.n_output
        more = mean - n_out if n_out < mean else mean / 2
        return max(0, min(round(more), policy.kv_tokens(seq) - max(seq.scheduled, seq.given)))


def peak_tokens(members: Iterable[tuple[int, int]]) -> int:
    """Most tokens ever needed beyond those held now, by ``(left, own)`` of every running sequence.

    ``own`` tokens come back when ``left`` more are drawn.
    """
    ordered = sorted(members)
    growing, back, peak = len(ordered), 0, 0
    for left, own in ordered:
        peak = max(peak, growing * left - back)
        growing -= 1
        back += own
    return peak


def reserve(
    running: Iterable[Sequence],
    seq: Sequence,
    lengths: Lengths,
    page_size: int,
    most_pages: int = 0,
    part: int = 0,
) -> int:
    """Pages to reserve for ``running`` and ``seq`` when ``seq`` is admitted with its known tokens, of a group of
    ``part`` of the cache.

    Those who are protected hold all their pages already and only give back. ``most_pages`` is what
    one holds at the most where a window gives pages back; 0 where none does.
    """
    members = [
        (lengths.left(s), _own(s, page_size, part)) for s in running if not policy.protected(s)
    ]
    if not policy.protected(seq):
        members.append((lengths.left(seq), len(seq.tokens)))
    if most_pages:
        most = most_pages * page_size
        members = [(min(left, max(0, most - own)), min(own, most)) for left, own in members]
    return -(-peak_tokens(members) // page_size)


def _own(seq: Sequence, page_size: int, part: int) -> int:
    """Tokens in pages that come back when ``seq`` ends: all but those it found in the cache."""
    lease = seq.lease
    return 0 if lease is None else lease.parts[part].n_own * page_size
