"""Orders running sequences, picks preemption victims and sizes admission headroom, as pure functions.

Why preemption terminates. Running sequences have one fixed order: lane, priority, arrival. Three
facts, each by itself enough to end it, hold for any choice of victims made here:

* a victim is later in that order than the sequence that needs the page, or is that sequence;
  so the first in order is never preempted for a page;
* a sequence is preempted at most ``MAX_PREEMPTIONS`` times, for pages or for a higher lane, so a
  finite set of sequences is preempted finitely often;
* a sequence preempted that often is admitted only with every page it can ever need: it is no
  victim and needs no page again. With an attention window that is one window of pages, which it
  reuses (see ``sched.resources``).

Between two preemptions every step gives each running sequence a row, or its turn in the prefill
budget. When none runs, all pages are free, and admission has checked that any one sequence fits alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence as Seq
from math import inf

from jserve.types import Lane, Sequence

MAX_PREEMPTIONS = 3
OUTPUT_WEIGHT = 2.0
"""Charge of a sampled token, where a computed prompt token costs 1."""
_RANKS = {lane: i for i, lane in enumerate(Lane)}
_SEED_BITS = 48
_WRAP = 2**64


def rank(seq: Sequence) -> int:
    """Place of the lane: 0 for interactive, 2 for bulk."""
    return _RANKS[seq.request.lane]


def order_of(lane: Lane, priority: int, number: int) -> tuple[int, int, int]:
    """``Sequence.order`` of the ``number``-th submission."""
    return _RANKS[lane], priority, number


def order(seq: Sequence) -> tuple[int, int, int]:
    """Sort key of those who run and of those who came back: lane, priority, first come first."""
    return seq.order


def turn(seq: Sequence) -> tuple[int, float, int]:
    """Sort key of what one tenant has waiting in one lane: priority, deadline, first come first.

    Earliest deadline first is best as long as all deadlines can be met, which admission sees to.
    """
    return seq.order[1], seq.due, seq.order[2]


def charge(n_new: int, n_out: int) -> float:
    """The tenant's charge for computed prompt tokens and sampled tokens."""
    return n_new + OUTPUT_WEIGHT * n_out


def protected(seq: Sequence) -> bool:
    """True for a sequence that may not be preempted again."""
    return seq.n_preempted >= MAX_PREEMPTIONS


def waste(seq: Sequence) -> int:
    """Tokens recomputed if ``seq`` is preempted now: those in unpublished pages."""
    lease = seq.lease
    if lease is None:
        return 0
    full = lease.n_published if lease.cacheable else lease.n_shared
    page_size = lease.next_full // (lease.n_published + 1)
    return max(0, seq.scheduled - full * page_size)


def victim(later: Seq[Sequence]) -> Sequence | None:
    """The sequence of ``later`` (in order) to preempt: of the lowest lane, the one that wastes least.

    Among equals the one with the fewest tokens drawn, then the newest. Protected ones never.
    """
    able = [seq for seq in later if not protected(seq)]
    return min(able, key=_regret, default=None)


def _regret(seq: Sequence) -> tuple[int, int, int, int]:
    return -rank(seq), waste(seq), seq.n_output, -seq.order[2]


def preemptible_bulk(running: Iterable[Sequence]) -> list[Sequence]:
    """Bulk sequences that may be preempted for lane interactive, least waste first."""
    bulk = [s for s in running if s.request.lane == Lane.BULK and not protected(s)]
    return sorted(bulk, key=_regret)


def headroom(n_running: int) -> int:
    """Pages of a group that admission reserves for running sequences: one each, for their next page."""
    return n_running


def kv_tokens(seq: Sequence) -> int:
    """Most tokens of the sequence that ever need KV: the last one drawn is never computed."""
    return max(seq.n_prompt, seq.max_len - 1)


def tokens_wanted(seq: Sequence) -> int:
    """Tokens whose pages admission takes at once: the known ones, or all there can be."""
    return kv_tokens(seq) if protected(seq) else len(seq.tokens)


def due_of(first_by: float | None, end_by: float | None) -> float:
    """``Sequence.due``: when the first token is promised, else the last one, else never."""
    return min(inf if first_by is None else first_by, inf if end_by is None else end_by)


def seed_of(request_id: str, salt: int, given: int | None, index: int) -> int:
    """Seed of choice ``index``: ``given`` + index as int64, or one derived from the request id.

    The derived part has 48 bits, so that it survives JSON on its way to the client and back.
    """
    if given is None:
        digest = hashlib.blake2b(f"{salt}:{request_id}".encode(), digest_size=8).digest()
        given = int.from_bytes(digest, "little") % 2**_SEED_BITS
    return (given + index + _WRAP // 2) % _WRAP - _WRAP // 2
