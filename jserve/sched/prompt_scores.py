"""Collects log-probabilities of prompts, and what step features give their tokens, from chunks into one list per
sequence.

A chunk that is computed again after a preemption overwrites itself, so every position ends up filled exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from jserve.types import PromptLogprobs, Sequence, TokenLogprob


class PromptScores:
    """Partial prompt log-probabilities of the sequences that asked for them."""

    def __init__(self) -> None:
        self._lists: dict[Sequence, list[TokenLogprob | None]] = {}

    def add(self, seq: Sequence, chunk: PromptLogprobs) -> None:
        """Take over one row's chunk; positions outside the prompt are ignored."""
        scores = self._lists.setdefault(seq, [None] * seq.n_prompt)
        k = seq.request.params.prompt_logprobs or 0
        scored = zip(chunk.logprob_n.tolist(), chunk.rank_n.tolist(), strict=True)
        ids_nL, tops_nL = chunk.top_ids_nL[:, :k].tolist(), chunk.top_logprobs_nL[:, :k].tolist()
        for i, (logprob, rank) in enumerate(scored):
            at = chunk.start + 1 + i
            if at < seq.n_prompt:
                scores[at] = TokenLogprob(
                    token=seq.tokens[at],
                    logprob=logprob,
                    rank=rank,
                    top_ids=tuple(ids_nL[i]),
                    top_logprobs=tuple(tops_nL[i]),
                )

    def take(self, seq: Sequence) -> tuple[TokenLogprob | None, ...] | None:
        """The complete list (first entry None), or None when the request did not ask for it."""
        if seq.request.params.prompt_logprobs is None:
            return None
        scores = self._lists.pop(seq, [None] * seq.n_prompt)
        assert all(scores[1:]), f"{seq.request.id}: prompt log-probabilities have gaps"
        return tuple(scores)

    def forget(self, seq: Sequence) -> None:
        """``seq`` is over."""
        self._lists.pop(seq, None)

    def __len__(self) -> int:
        return len(self._lists)


class PromptValues:
    """Partial values of prompt tokens, of the sequences whose step features give them."""

    def __init__(self) -> None:
        self._lists: dict[Sequence, dict[str, list[Any]]] = {}

    def add(self, seq: Sequence, name: str, start: int, values: Seq[Any]) -> None:
        """Take over what ``name`` gives the tokens of one row, which begins at position ``start``."""
        found = self._lists.setdefault(seq, {n: [None] * seq.n_prompt for n in seq.prompt_features})
        found[name][start : start + len(values)] = values

    def take(self, seq: Sequence) -> dict[str, tuple[Any, ...]] | None:
        """A value for each prompt token, by step feature; None when the request did not ask for any."""
        if not seq.prompt_features:
            return None
        found = self._lists.pop(seq)
        for name, values in found.items():
            whole = len(values) == seq.n_prompt and all(value is not None for value in values)
            assert whole, f"{seq.request.id}: {name} has gaps"
        return {name: tuple(values) for name, values in found.items()}

    def forget(self, seq: Sequence) -> None:
        """``seq`` is over."""
        self._lists.pop(seq, None)

    def __len__(self) -> int:
        return len(self._lists)
