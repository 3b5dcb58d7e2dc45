"""Formats tokens and log-probabilities as JSON for chats, completions and vLLM prompts."""

from __future__ import annotations

from collections.abc import Sequence

from jserve.api.reply.generate import Json
from jserve.text.tokenizer import TextTokenizer
from jserve.types import TokenLogprob

LOWEST = -9999.0
"""JSON has no minus infinity."""


class TokenWriter:
    """Tokens and log-probabilities as JSON; ``as_ids`` writes tokens as "token_id:N"."""

    def __init__(self, tokenizer: TextTokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)

    def chat(self, logprobs: Sequence[TokenLogprob], n_top: int) -> Json:
        """The chat shape: one entry per token with its bytes and the ``n_top`` most likely ones, or
        those that the request names."""
        return {"content": [self._chat_token(t, n_top) for t in logprobs], "refusal": None}

    def _chat_token(self, entry: TokenLogprob, n_top: int) -> Json:
        top = _shown(entry, n_top)
        return self._pair(entry.token, entry.logprob) | {
            "top_logprobs": [self._pair(token, logprob) for token, logprob in top]
        }

    def _pair(self, token: int, logprob: float) -> Json:
        data = list(self._tokenizer.token_bytes(token))
        return {"token": self.text(token), "logprob": finite(logprob), "bytes": data}

    def completions(
        self, entries: Sequence[TokenLogprob | None], ids: Sequence[int], n_top: int, offset: int
    ) -> Json:
        """The completions shape: four lists of one length; a None entry (no score) has null.

        ``top_logprobs`` holds the ``n_top`` most likely tokens, or those that the request names, and
        the one that was drawn.
        """
        offsets: list[int] = []
        for token in ids:
            offsets.append(offset)
            offset += len(self._tokenizer.token_text(token))
        return {
            "tokens": [self.text(token) for token in ids],
            "token_logprobs": [None if e is None else finite(e.logprob) for e in entries],
            "top_logprobs": [None if e is None else self._top(e, n_top) for e in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob, n_top: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, logprob in (*_shown(entry, n_top), (entry.token, entry.logprob)):
            # Different tokens may read the same (broken bytes): the likeliest is kept.
            found.setdefault(self.text(token), finite(logprob))
        return found

    def prompt(self, entries: Sequence[TokenLogprob | None]) -> list[Json | None]:
        """vLLM's ``prompt_logprobs``: per token, id -> log-probability, rank and text."""
        return [None if e is None else self._prompt_token(e) for e in entries]

    def _prompt_token(self, entry: TokenLogprob) -> Json:
        return {
            str(token): {
                "logprob": finite(lp),
                "rank": rank,
                "decoded_token": self._tokenizer.token_text(token),
            }
            for token, lp, rank in entry.ranked()
        }


def _shown(entry: TokenLogprob, n_top: int) -> list[tuple[int, float]]:
    """(id, log-probability) of the ``n_top`` most likely tokens, or of those that the request names."""
    pairs = list(zip(entry.top_ids, entry.top_logprobs, strict=True))
    return pairs if entry.named else pairs[:n_top]


def finite(logprob: float) -> float:
    return max(logprob, LOWEST) if logprob == logprob else LOWEST
