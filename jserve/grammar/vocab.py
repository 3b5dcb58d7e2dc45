"""Presents the model's vocabulary to llguidance: token bytes and end-of-sequence ids.

Added tokens that a model writes as text (``<tool_call>``, ``<think>``) are text here, whatever their brackets look
like, so a grammar spells them out and either tokenisation of them is allowed; control tokens are no text and are
named by id, ``<[5]>``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from llguidance import LLTokenizer

from jserve.errors import ConfigError


class Bytes(Protocol):
    """The tokenizer interface needed here (``text.TextTokenizer`` has it)."""

    vocab_size: int
    special_ids: frozenset[int]
    byte_level: bool

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Tokens by id, padded with b"" to the width of the logits."""

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    """At least one; the first is appended where the engine ends an answer in the model's place."""
    encode: Callable[[str], list[int]] | None = None
    """The tokenizer, where forced text may be put into the tokens the model would use; None where
    it may not (a tokenizer that adds a blank in front) or need not (checking a grammar)."""


def vocabulary(tokenizer: Bytes, n_vocab: int, eos_ids: Seq[int]) -> Vocabulary:
    """The vocabulary of a tokenizer, ``n_vocab`` wide.

    Raises:
        ConfigError: there is no end token, or the tokenizer has more tokens than the model.
    """
    if not eos_ids:
        raise ConfigError("structured output needs a model with an end token", field="tokenizer")
    n = tokenizer.vocab_size
    if n > n_vocab:
        raise ConfigError(f"{n} tokens for a model of {n_vocab}", field="tokenizer")
    known = [tokenizer.token_bytes(i) for i in range(n)]

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, parse_special=False)

    return Vocabulary(
        tokens=(*known, *[b""] * (n_vocab - n)),
        special_ids=tuple(sorted(tokenizer.special_ids | set(eos_ids))),
        eos_ids=tuple(eos_ids),
        encode=encode if tokenizer.byte_level else None,
    )


def blanks(vocab: Vocabulary) -> frozenset[int]:
    """The tokens of white space alone, as ``str.isspace`` has it; a part of a character is none."""
    special = set(vocab.special_ids)
    return frozenset(
        i
        for i, token in enumerate(vocab.tokens)
        if i not in special and token.decode(errors="replace").isspace()
    )


class _Wrapper:
    """The attributes that ``LLTokenizer`` reads of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocab: Vocabulary) -> None:
        self.eos_token_id = vocab.eos_ids[0]
        self.tokens = list(vocab.tokens)
        self.special_token_ids = list(vocab.special_ids)
        self._encode = vocab.encode
        self.made: LLTokenizer | None = None

    def __call__(self, text: Any) -> list[int]:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        if self._encode is not None:
            return self._encode(text)
        return self.made.greedy_tokenize(text) if self.made is not None else []


def ll_tokenizer(vocab: Vocabulary) -> LLTokenizer:
    """llguidance's own table of ``vocab``; 0.05 s per 100k tokens."""
    wrapper = _Wrapper(vocab)
    wrapper.made = LLTokenizer(
        wrapper,  # type: ignore[arg-type]  # any object with these attributes
        n_vocab=len(vocab.tokens),
        eos_token=list(vocab.eos_ids),
    )
    return wrapper.made
