"""Compiles grammars with llguidance and caches them within a byte bound.

It owns compilation within llguidance's limits, and the words for what it refuses. A grammar is compiled once per
text and copied per sequence (1 us).
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from jserve.errors import BadRequest, InvalidSchema
from jserve.grammar.spec import FIELD, lowered
from jserve.sampling import StructuredOutputs

CACHE_BYTES = 64 << 20
_BYTES_EACH = 64 << 10
"""A rough size in bytes of a compiled grammar, besides its text: lexer states and rules."""
_BYTES_PER_CHAR = 40
_LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar in its initial state; copies of ``matcher`` are advanced, never itself."""

    matcher: LLMatcher
    mask_W: np.ndarray
    """Allowed-token bits of the first token, int32[ceil(V / 32)]; read only."""
    forced: tuple[int, ...]
    n_bytes: int


class GrammarCompiler:
    """Compiles grammars for one vocabulary and keeps the ones used last. Safe in many threads."""

    def __init__(self, tokenizer: LLTokenizer, *, cache_bytes: int = CACHE_BYTES) -> None:
        self.tokenizer = tokenizer
        self.n_words = -(-tokenizer.vocab_size // 32)
        self.n_hits = self.n_misses = 0
        self._cache: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._free = cache_bytes
        self._lock = threading.Lock()

    def known(self, spec: StructuredOutputs) -> CompiledGrammar | None:
        """The compiled grammar of ``spec`` if the cache has it. BadRequest as ``compile``."""
        return self._find(_key(lowered(spec)))

    def compile(self, spec: StructuredOutputs) -> CompiledGrammar:
        """The compiled grammar of ``spec``.

        Raises:
            BadRequest: it cannot be enforced; the message names the keyword or the place.
        """
        text = lowered(spec)
        key = _key(text)
        found = self._find(key)
        if found is not None:
            return found
        self.n_misses += 1
        made = self._make(text, spec.given[0])
        self._keep(key, made)
        return made

    def _find(self, key: bytes) -> CompiledGrammar | None:
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
                self.n_hits += 1
            return found

    def _keep(self, key: bytes, made: CompiledGrammar) -> None:
        with self._lock:
            if key in self._cache:
                return
            self._cache[key] = made
            self._free -= made.n_bytes
            while self._free < 0 and len(self._cache) > 1:
                _, old = self._cache.popitem(last=False)
                self._free += old.n_bytes

    def _make(self, text: str, kind: str) -> CompiledGrammar:
        matcher = LLMatcher(self.tokenizer, text, log_level=0, limits=_LIMITS)
        _check(matcher, kind)
        mask_1W = np.zeros((1, self.n_words), np.int32)
        first = matcher.deep_copy()
        fill_next_token_bitmask(first, mask_1W)
        _check(first, kind)
        if not mask_1W.any():
            raise BadRequest(f"{FIELD}.{kind} allows no output", field=f"{FIELD}.{kind}")
        mask_1W.flags.writeable = False
        forced = tuple(first.compute_ff_tokens())
        n_bytes = _BYTES_EACH + _BYTES_PER_CHAR * len(text)
        return CompiledGrammar(matcher, mask_1W[0], forced, n_bytes)

    @property
    def n_cached(self) -> int:
        return len(self._cache)


def _key(text: str) -> bytes:
    return sha256(text.encode()).digest()


def _check(matcher: LLMatcher, kind: str) -> None:
    if matcher.is_error():
        where = f"{FIELD}.{kind}"
        raise InvalidSchema(
            f"{where} cannot be enforced: {_words(matcher.get_error())}", field=where
        )


def _words(error: str) -> str:
    """llguidance's complaint in one line, without its state; keywords in words."""
    line = error.split("<state>")[0].strip()
    keys = re.search(r"Unimplemented keys: \[(.*?)\]", line)
    if keys is not None:
        return f"the keyword {keys[1]} is not supported"
    if "oneOf constraints" in line:
        return 'the keyword "oneOf" is supported only for alternatives that exclude each other'
    return re.sub(r"\s+", " ", line)[:160] or "the grammar can never be satisfied"
