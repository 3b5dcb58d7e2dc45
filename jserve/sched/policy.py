"""Who runs first, who gives way, and how much room admission leaves: functions over explicit state.

Owns no state. Must not know pages' ids, plans or devices.

Progress (why preemption ends): victims are always later in order than the sequence that needs the
page, or that sequence itself; nobody is preempted more than ``MAX_PREEMPTIONS`` times; after that a
sequence is admitted only with every page it can ever need, so it neither gives way nor asks again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq

from jserve.types import Sequence

MAX_PREEMPTIONS = 3
_SEED_BITS = 48
_WRAP = 2**64


def order(seq: Sequence) -> tuple[int, int]:
    """Sort key of the waiting and the running: priority, then first come first served."""
    return seq.order


def protected(seq: Sequence) -> bool:
    """True when the sequence has given way often enough."""
    return seq.n_preempted >= MAX_PREEMPTIONS


def victim(later: Seq[Sequence]) -> Sequence | None:
    """The sequence to preempt among ``later`` (in order): the newest that is not protected."""
    return next((seq for seq in reversed(later) if not protected(seq)), None)


def headroom(n_running: int) -> int:
    """Pages that admission leaves for those who run: one each, for their next page border."""
    return n_running


def kv_tokens(seq: Sequence) -> int:
    """Most tokens of the sequence that ever need KV: the last one drawn is never computed."""
    return max(seq.n_prompt, seq.max_len - 1)


def tokens_wanted(seq: Sequence) -> int:
    """Tokens whose pages admission takes at once: the known ones, or all there can be."""
    return kv_tokens(seq) if protected(seq) else len(seq.tokens)


def seed_of(request_id: str, salt: int, given: int | None, index: int) -> int:
    """Seed of choice ``index``: ``given`` + index as int64, or one derived from the request id.

    The derived part has 48 bits, so that it survives JSON on its way to the client and back.
    """
    if given is None:
        digest = hashlib.blake2b(f"{salt}:{request_id}".encode(), digest_size=8).digest()
        given = int.from_bytes(digest, "little") % 2**_SEED_BITS
    return (given + index + _WRAP // 2) % _WRAP - _WRAP // 2
