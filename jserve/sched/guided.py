"""Applies a guide's verdict to its sequence, and says when a guided sequence can be planned.

Forced tokens become known ones: the next row carries them like a prompt's, and draws after the last::

    tokens      ... drawn  f0  f1  f2
    scheduled          |               KV is written below it
    given                          |   the row: drawn f0 f1 f2, ids and an exact start
"""

from __future__ import annotations

from jserve.ports import Verdict
from jserve.types import Finish, Sequence


def lacks_mask(seq: Sequence) -> bool:
    """True while ``seq`` cannot be planned for want of a mask."""
    return seq.guide is not None and seq.guide.room(0) <= 0


def apply_verdict(seq: Sequence, verdict: Verdict) -> None:
    """Apply ``verdict`` to a sequence that has just appended its tokens."""
    if verdict.ended and seq.finish is None:
        seq.finish = Finish.STOP
    if verdict.free:
        seq.guide = None
    if seq.lease is not None and verdict.forced:
        seq.given = len(seq.tokens)
