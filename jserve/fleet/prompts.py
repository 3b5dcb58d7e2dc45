"""The prompts that are at replicas now: a radix tree over the digests of their pages, counted by replica.

A digest names all tokens up to its page's end, so where two prompts have the same one they share all before it, and the
place where they part is found by bisection. ::

    root --[ d0 .. d255 ]--+--[ d256 .. d299 ]      one branch between two places where prompts part or end;
           2 at replica 3  '--[ e256 ]              nothing costs more for more pages in it
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Branch:
    """The pages of ``prompt`` up to number ``end``, behind the branch above."""

    prompt: Seq[bytes]
    end: int
    mask: int = 0
    """One bit for each replica of ``counts``."""
    counts: dict[int, int] = field(default_factory=dict)
    """Replica -> prompts there that run through this branch."""
    below: dict[bytes, _Branch] = field(default_factory=dict)


class SentPrompts:
    """Prompts by the digests of their pages."""

    def __init__(self) -> None:
        self._root = _Branch((), 0)

    def add(self, replica: int, digests: Seq[bytes]) -> None:
        """A prompt is at ``replica`` from now on."""
        branch = self._root
        while branch.end < len(digests):
            branch = self._next(branch, digests)
            branch.counts[replica] = branch.counts.get(replica, 0) + 1
            branch.mask |= 1 << replica

    def remove(self, replica: int, digests: Seq[bytes]) -> None:
        """A prompt that was added is there no longer.

        Raises:
            KeyError: it was not added.
        """
        branch = self._root
        while branch.end < len(digests):
            above, branch = branch, branch.below[digests[branch.end]]
            left = branch.counts.pop(replica) - 1
            if left:
                branch.counts[replica] = left
                continue
            branch.mask ^= 1 << replica
            if not branch.mask:  # and so none of those below
                del above.below[digests[above.end]]

    def shared(self, digests: Seq[bytes]) -> list[tuple[int, int]]:
        """(n, mask) with growing n: the replicas of ``mask``, a subset of the one before, have prompts whose first n
        pages are those of ``digests``."""
        found, branch = [], self._root
        while branch.end < len(digests):
            at = branch.end
            below = branch.below.get(digests[at])
            if below is None:
                break
            n = _n_same(below, digests, at)
            found.append((n, below.mask))
            if n < below.end:
                break
            branch = below
        return found

    def _next(self, branch: _Branch, digests: Seq[bytes]) -> _Branch:
        """The branch below ``branch`` that ``digests`` run through to its end, made where there is none."""
        at = branch.end
        below = branch.below.get(digests[at])
        if below is None:
            below = branch.below[digests[at]] = _Branch(digests, len(digests))
            return below
        n = _n_same(below, digests, at)
        if n == below.end:
            return below
        upper = _Branch(below.prompt, n, below.mask, dict(below.counts), {below.prompt[n]: below})
        branch.below[digests[at]] = upper
        return upper


def _n_same(branch: _Branch, digests: Seq[bytes], at: int) -> int:
    """The pages up to the end of ``branch`` that are those of ``digests``; the first ``at`` + 1 are."""
    prompt, low, high = branch.prompt, at + 1, min(branch.end, len(digests))
    if prompt[high - 1] == digests[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if prompt[middle] == digests[middle]:
            low = middle + 1
        else:
            high = middle
    return low
