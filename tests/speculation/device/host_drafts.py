"""The proposers of the host as ``chances`` uses them: the real ones, over the texts of many rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from jserve.config import SpeculativeOptions
from jserve.grammar.guides import TokenGuides
from jserve.grammar.vocab import Vocabulary
from jserve.ports import Proposer
from jserve.sampling import SamplingParams, StructuredOutputs
from jserve.speculation.host.methods import proposer_of
from jserve.types import Request, Sequence
from tests.speculation.device.chances import ROWS, START, After, HostDrafts, Setting, V, chances

REQUEST = Request(id="r", prompt_ids=(START,), params=SamplingParams(max_tokens=1000))
RATE = 0.6
"""Of synthetic drafts, those that shall stand."""


class Proposed:
    """A ``ports.Proposer`` asked for every row."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.seqs: list[Sequence] = []

    def propose(self, texts: list[list[int]], most: int) -> list[Seq[int]]:
        if not self.seqs:
            self.seqs = [
                Sequence(
                    request=REQUEST, index=0, seed=r, tokens=text, n_prompt=1, max_len=1000, slot=r
                )
                for r, text in enumerate(texts)
            ]
        for seq in self.seqs:
            self.proposer.read(seq, 1000)
        return [self.proposer.propose(seq, most) for seq in self.seqs]

    def mask(self, row: int, drafts: Seq[int]) -> np.ndarray | None:
        return self.proposer.mask(self.seqs[row], drafts)


class Forced:
    """What guides leave no choice about; ``follows`` says the same without them."""

    grammar = r"(ab|dff|b|c|e|f){200}"

    def __init__(self) -> None:
        self.guides = [_guides().guide(_guided(), 1000) for _ in range(ROWS)]
        self.n_read = [1] * ROWS

    def propose(self, texts: list[list[int]], most: int) -> list[Seq[int]]:
        for guide, text, n in zip(self.guides, texts, self.n_read, strict=True):
            assert guide.take(text[n:]).error is None
        self.n_read = [len(text) for text in texts]
        return [guide.forced[:most] for guide in self.guides]

    def mask(self, row: int, drafts: Seq[int]) -> np.ndarray | None:
        return self.guides[row].mask(drafts)


def follows(output: Seq[int]) -> np.ndarray:
    """bool[V]: what ``Forced.grammar`` allows, a = 0 ... f = 5; 6 ends the text."""
    allowed = np.arange(V) < 6
    if output and output[-1] == 0:
        return np.arange(V) == 1
    # d f f: an f after d is the first of two, any other may be followed by anything.
    first_f = len(output) > 1 and output[-1] == 5 and output[-2] == 3
    if (output and output[-1] == 3) or first_f:
        return np.arange(V) == 5
    return allowed


def _guided() -> Request:
    params = SamplingParams(
        max_tokens=1000, logprobs=0, structured_outputs=StructuredOutputs(regex=Forced.grammar)
    )
    return Request(id="g", prompt_ids=(START,), params=params)


@lru_cache
def _guides() -> TokenGuides:
    letters = [bytes([b]) for b in b"abcdef"]
    vocab = Vocabulary(
        tokens=(*letters, b""),
        special_ids=(6,),
        eos_ids=(6,),
        encode=lambda text: [b"abcdef".index(b) for b in text.encode()],
    )
    made = TokenGuides(lambda: vocab)
    compiling = made.compile(_guided())
    if compiling is not None:
        compiling.result()
    return made


def host(kind: str) -> HostDrafts:
    """Rows of a kind of host drafts, at their start."""
    if kind == "grammar":
        return Forced()
    corpus = np.random.default_rng(5).integers(0, V, 300).tolist() if kind == "corpus" else []
    method = "suffix" if kind == "corpus" else kind
    options: dict[str, Any] = {"prompt_lookup_min": 1, "suffix_min_match": 1}
    if kind == "synthetic":
        options = {"synthetic_acceptance_rate": RATE}
    made = proposer_of(SpeculativeOptions(method=method, **options), V, corpus)
    assert made is not None
    return Proposed(made)


def expected(kind: str, setting: Setting) -> After:
    """The chances of what comes next; synthetic acceptance changes them where there was a draft."""
    if kind == "grammar":
        setting = replace(setting, allowed=follows)
    plain = chances(setting)
    if kind != "synthetic":
        return plain
    fallen = [chances(replace(setting, allowed=_barring(token))) for token in range(V)]

    def after(text: list[int], draft: int) -> np.ndarray:
        if draft < 0:
            return plain(text, draft)
        stands = np.arange(V) == draft
        return RATE * stands + (1 - RATE) * fallen[draft](text, draft)

    return after


def _barring(token: int) -> Callable[[Seq[int]], np.ndarray]:
    return lambda output: np.arange(V) != token
