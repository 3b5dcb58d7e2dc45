"""Converts ``bad_words`` to token ids: every tokenisation of a banned word."""

from __future__ import annotations

from collections.abc import Iterable

from jserve.errors import BadRequest
from jserve.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from jserve.text.tokenizer import TextTokenizer


def bad_token_ids(tokenizer: TextTokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell ``words``, at the start of a text and after a blank.

    Raises:
        BadRequest: a word takes more than 8 tokens, or there are more than 32 sequences.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False, parse_special=False))
            if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
                raise BadRequest(
                    f"bad_words entries must be 1 to {MAX_BAD_WORD_TOKENS} tokens long",
                    field="bad_words",
                )
            found[ids] = None
    if len(found) > MAX_BAD_WORDS:
        raise BadRequest(
            f"bad_words may be {MAX_BAD_WORDS} spellings; these are {len(found)}, with and without "
            "a blank in front",
            field="bad_words",
        )
    return tuple(found)
