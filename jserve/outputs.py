"""``RequestOutput`` and its parts, returned by the Python interface. Field names are vLLM's.

It owns the way from the engine's ``Output``s to one ``RequestOutput``: text, stop strings, log-probabilities
gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jserve.errors import JserveError, error_of
from jserve.text.stream import TextDelta, TextStream
from jserve.types import Finish, Output, Request, TokenLogprob


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position."""

    logprob: float
    """Under the model's raw logits, or as option ``logprobs_mode`` says."""
    rank: int | None = None
    """1 for the most likely token; None where the rank was not counted."""
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]
"""Token id -> ``Logprob``: the token of the position first, then the alternatives, best first."""


@dataclass(slots=True)
class WeightSpan:
    """Tokens ``start`` to before ``end`` of an output were drawn by the weights ``version``."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    """One entry per token of ``token_ids``; None where the request asks for none."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """Name in ``SamplingParams.extra_args`` -> what that step feature gives, one entry per token of
    ``token_ids``."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seed: int | None = None
    """The seed in use; giving it again gives the same tokens."""
    weight_versions: list[WeightSpan] = field(default_factory=list)
    """The weights that drew ``token_ids``: one span after the other, without gaps."""


@dataclass(slots=True)
class RequestMetrics:
    """Times and counts of an answered request, all choices together."""

    num_draft_tokens: int = 0
    """Drafts tried by speculative decoding."""
    num_accepted_tokens: int = 0
    """Of these, drafts that are part of the output."""


@dataclass(slots=True)
class RequestOutput:
    """A request and what came of it so far. ``finished`` is True when every choice has ended."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprobs | None] | None = None
    """One entry per prompt token, the first None; None where the request asks for none."""
    prompt_extra: dict[str, list[Any]] = field(default_factory=dict)
    """Name in ``SamplingParams.extra_args`` -> what that step feature gives, one entry per prompt token, where it is
    asked for that."""
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


class PartialOutput:
    """Collects the engine's outputs of one request into a ``RequestOutput``."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Any) -> None:
        self.request = request
        self._tokenizer = tokenizer
        params = request.params
        choices = [CompletionOutput(i) for i in range(params.n)]
        self.output = RequestOutput(request.id, prompt, list(request.prompt_ids), choices)
        self.streams = [
            TextStream.of(tokenizer, params, request.prompt_ids) for _ in range(params.n)
        ]

    def take(self, out: Output) -> str | None:
        """Add one output. Returns the stop string that ends its choice now, if one does.

        Raises:
            JserveError: the request failed.
        """
        choice = self.output.outputs[out.index]
        if choice.finish_reason is not None:
            return None
        if out.finish is Finish.ERROR:
            raise failure_of(out)
        self._head(out, choice)
        delta = self._text(out, choice)
        if delta.stop is not None:
            choice.finish_reason, choice.stop_reason = "stop", delta.stop
        elif out.finish is not None:
            choice.finish_reason, choice.stop_reason = out.finish.value, out.stop_reason
        self.output.finished = all(c.finish_reason is not None for c in self.output.outputs)
        return delta.stop

    def _head(self, out: Output, choice: CompletionOutput) -> None:
        if out.seed is not None:
            choice.seed = out.seed
        if out.prompt_logprobs is not None:
            self.output.prompt_logprobs = [
                None if entry is None else self._by_id(entry) for entry in out.prompt_logprobs
            ]
        for name, values in (out.prompt_extra or {}).items():
            self.output.prompt_extra[name] = list(values)
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, out.n_cached)

    def _text(self, out: Output, choice: CompletionOutput) -> TextDelta:
        stream = self.streams[out.index]
        delta = stream.push(out.token_ids, terminator=out.finish is Finish.STOP)
        taken = out.token_ids[: delta.n_tokens]
        self.output.metrics.num_draft_tokens += out.n_drafted
        self.output.metrics.num_accepted_tokens += min(out.n_accepted, len(taken))
        choice.token_ids.extend(taken)
        if taken:
            _extend(choice.weight_versions, out.weights, len(choice.token_ids))
        if out.logprobs is not None:
            kept = out.logprobs[: len(taken)]
            choice.logprobs = (choice.logprobs or []) + [self._by_id(entry) for entry in kept]
            said = sum(entry.logprob for entry in kept)
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + said
        for name, values in (out.extra or {}).items():
            choice.extra.setdefault(name, []).extend(values[: len(taken)])
        choice.text += delta.text
        if out.finish is not None and delta.stop is None:
            choice.text += stream.flush().text
        return delta

    def _by_id(self, entry: TokenLogprob) -> Logprobs:
        ranked = sorted(entry.ranked(), key=lambda row: row[0] != entry.token)
        return {
            token: Logprob(logprob, rank, self._tokenizer.token_text(token))
            for token, logprob, rank in ranked
        }


def _extend(spans: list[WeightSpan], version: str, end: int) -> None:
    """Let ``spans`` reach to ``end``; the tokens since their end are of ``version``."""
    if spans and spans[-1].version == version:
        spans[-1].end = end
    else:
        spans.append(WeightSpan(version, spans[-1].end if spans else 0, end))


def failure_of(out: Output) -> JserveError:
    """The error that ended a request."""
    return error_of(
        out.error_code,
        out.error or "the request failed",
        field=out.error_field,
        retry_after=out.retry_after,
    )
