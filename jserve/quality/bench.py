"""Runs one model on texts and questions, through the engine: its score path, and greedy answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jserve import build
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.feed import Feed
from jserve.outputs import failure_of
from jserve.quality.metrics import TokenScores
from jserve.quality.texts import Question
from jserve.request_options import RequestOptions
from jserve.sampling import MAX_PROMPT_LOGPROBS, SamplingParams
from jserve.types import Finish, Output, Request, TokenLogprob

TOP = 512
"""Most likely ids that are compared."""
AT_ONCE = 16
"""Texts whose scores are held as they come from the engine."""
ANSWER = 160
"""Tokens of an answer."""


def judged(config: EngineConfig) -> EngineConfig:
    """``config`` for an engine that scores: what it does not need is not compiled."""
    assert TOP <= MAX_PROMPT_LOGPROBS
    own = {
        "max_prompt_logprobs": TOP,
        "prompt_logprobs": True,
        "structured_outputs": False,
        "max_logprob_token_ids": 0,
        "prefix_caching": False,
        "speculative.method": "off",
    }
    return EngineConfig.of(**{**config.flat(), **own})


class Bench:
    """One engine. Close it before the next is made: both have the device's memory to themselves."""

    def __init__(self, config: EngineConfig, progress: build.Progress | None = None) -> None:
        self._text = build.text_side(config)
        self._engine, self.info = build.engine(judged(config), progress)
        self._ids = itertools.count()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        build.close(self._engine)

    def check(self, texts: Sequence[Sequence[int]]) -> None:
        """Refuse texts that do not fit. Raises ConfigError; ``field`` is text."""
        most = self.info["max_model_len"] - 1
        longest = max(map(len, texts))
        if longest > most:
            raise ConfigError(f"text: {longest} tokens, the model takes {most}", field="text")

    def scores(self, texts: Sequence[Sequence[int]]) -> Iterator[TokenScores]:
        """The scores of each text but its first token, some texts at a time, in order."""
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=TOP)
        for i in range(0, len(texts), AT_ONCE):
            found = self._run([(ids, params) for ids in texts[i : i + AT_ONCE]])
            told = [_first(outputs) for outputs in found]
            yield _scores([entry for entries in told for entry in entries])

    def answers(self, questions: Sequence[Question]) -> list[str]:
        """The greedy answer to each."""
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER)
        found = self._run([(q.prompt_ids, params) for q in questions])
        decode = self._text.tokenizer.decode
        ends = set(self._text.eos_ids)
        return [
            decode([t for out in outputs for t in out.token_ids if t not in ends])
            for outputs in found
        ]

    def _run(self, asked: list[tuple[Sequence[int], SamplingParams]]) -> list[list[Output]]:
        """The outputs of each request."""
        requests = [
            Request.of(
                RequestOptions(),
                id=f"quality-{next(self._ids)}",
                prompt_ids=tuple(ids),
                params=params,
                eos_ids=self._text.eos_ids,
            )
            for ids, params in asked
        ]
        found: dict[str, list[Output]] = {request.id: [] for request in requests}
        feed, left = Feed(self._engine, requests), {*found}
        while left:
            feed.push()
            for out in feed.sift(self._engine.step()):
                if out.finish is Finish.ERROR:
                    raise failure_of(out)
                found[out.request_id].append(out)
                if out.finish is not None:
                    left.discard(out.request_id)
        return list(found.values())


def _first(outputs: list[Output]) -> list[TokenLogprob]:
    entries = next(out.prompt_logprobs for out in outputs if out.prompt_logprobs is not None)
    return [entry for entry in entries if entry is not None]


def _scores(entries: list[TokenLogprob]) -> TokenScores:
    return TokenScores(
        logprob_n=np.array([entry.logprob for entry in entries], np.float32),
        ids_nK=np.array([entry.top_ids for entry in entries], np.int32),
        top_nK=np.array([entry.top_logprobs for entry in entries], np.float32),
    )
