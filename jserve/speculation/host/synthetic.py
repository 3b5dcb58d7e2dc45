"""Synthetic drafts with a chosen acceptance rate, for benchmarks with random weights.

Masks decide acceptance: a draft to be accepted is the only token its position allows, one to be rejected is the
only token forbidden there. **What comes out is not the model's text**; what it costs is (a verify step, with
masks).

::

    drafts     d1      d2      d3             n = 2 to be accepted
    mask       {d1}    {d2}    all but d3     -
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from jserve.errors import BadRequest
from jserve.types import Request, Sequence

_MASK64 = 2**64 - 1


class Synthetic:
    """``ports.Proposer`` whose drafts are each accepted with chance ``rate``, given those before.

    Chances are a function of the sequence's seed and the number of its drafts so far: a run repeats.
    """

    name = "synthetic"
    blind = True
    seconds = 0.0

    def __init__(self, rate: float, vocab_size: int) -> None:
        self.rate, self.vocab_size = rate, vocab_size
        self._n_rows: dict[Sequence, int] = {}

    def check(self, request: Request) -> None:
        """Drafts to be accepted need every id to be allowed."""
        params = request.params
        wishes = {
            "structured_outputs": params.structured_outputs is not None,
            "thinking_token_budget": params.limits_thought,
            "allowed_token_ids": params.allowed_token_ids is not None,
            "bad_words": bool(params.bad_words or params.bad_token_ids),
            "logit_bias": bool(params.logit_bias),
        }
        for field, wished in wishes.items():
            if wished and request.speculative:
                raise BadRequest(
                    f"{field} does not go with synthetic acceptance, a benchmark mode that forces"
                    " tokens; send speculative: false",
                    field=field,
                )

    def read(self, seq: Sequence, most: int) -> int:
        return 0

    def propose(self, seq: Sequence, most: int) -> Seq[int]:
        """Ids that end nothing, so that lengths are those asked for."""
        n = self._n_rows.get(seq, 0)
        banned, found = {*seq.stop_ids, *seq.request.eos_ids}, []
        for j in range(most):
            token = _hash(seq.seed, n, j, 0) % self.vocab_size
            while token in banned:
                token = (token + 1) % self.vocab_size
            found.append(token)
        return found

    def mask(self, seq: Sequence, drafts: Seq[int]) -> np.ndarray:
        """int32[1 + len(drafts), ceil(V / 32)]; the next row of ``seq`` has other chances."""
        n = self._n_rows.get(seq, 0)
        self._n_rows[seq] = n + 1
        words_JW = np.full((1 + len(drafts), -(-self.vocab_size // 32)), -1, np.int32)
        for j, token in enumerate(drafts):
            bit = np.uint32(1 << (token & 31)).astype(np.int32)
            stands = _hash(seq.seed, n, j, 1) < self.rate * 2**64
            if stands:
                words_JW[j] = 0
                words_JW[j, token >> 5] = bit
            else:
                words_JW[j, token >> 5] &= ~bit
                break
        return words_JW

    def forget(self, seq: Sequence) -> None:
        self._n_rows.pop(seq, None)


def _hash(*values: int) -> int:
    """64 bits of several integers (splitmix64, chained)."""
    z = 0
    for value in values:
        z = (z ^ value) + 0x9E3779B97F4A7C15 & _MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
        z ^= z >> 31
    return z
