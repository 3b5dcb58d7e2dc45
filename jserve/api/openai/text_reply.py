"""OpenAI text completion replies: one object, or chunks of a stream.

It owns the shapes that clients parse, and vLLM's extensions (token ids, stop reasons, prompt log-probabilities; our
own are ``seed`` and ``extra``, the values of step features). The order of a stream, per choice and then for all::

    (echo and) text chunks ... the last with its finish   usage chunk if asked  [DONE]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jserve.api.http.errors import error_body
from jserve.api.openai.fields import CompletionBody
from jserve.api.openai.usage import head, usage_of, with_usage
from jserve.api.reply.generate import Counts, Json, TextPiece
from jserve.api.reply.logprobs import TokenWriter
from jserve.api.reply.reply import Whole, gathered
from jserve.api.request.parsed import ParsedRequest, Served, Usage
from jserve.errors import JserveError
from jserve.text.tokenizer import TextTokenizer
from jserve.types import Request, TokenLogprob


class CompletionReply:
    """Answers of /v1/completions for one request."""

    done: str | None = "[DONE]"
    named = False

    def __init__(
        self,
        ask: ParsedRequest,
        served: Served,
        tokenizer: TextTokenizer,
        requests: Sequence[Request],
    ) -> None:
        self._body: CompletionBody = ask.body
        self._requests = requests
        self._tokenizer = tokenizer
        self._prompts = ask.prompts
        self._writer = TokenWriter(tokenizer, as_ids=bool(self._body.return_tokens_as_token_ids))
        self._head = head("cmpl-", served.card) | {"object": "text_completion"}
        self._offsets: dict[int, int] = {}
        self._only_prompt = self._body.max_tokens == 0

    def chunks(self, piece: TextPiece, usage: Counts) -> Iterator[Json]:
        """The chunk of one piece, or none where nothing is to be seen yet."""
        shows_tokens = self._body.return_token_ids or self._body.logprobs is not None or piece.extra
        if not (piece.first or piece.text or piece.finish or (piece.token_ids and shows_tokens)):
            return
        text, choice = self._text(piece), self._choice(piece.choice)
        choice["text"] = text
        if self._body.logprobs is not None:
            choice["logprobs"] = self._logprobs(piece.choice, piece, first=piece.first)
        if piece.first:
            choice["seed"] = piece.seed
        if self._body.return_token_ids:
            choice |= self._ids(piece, first=piece.first)
        choice |= self._extra(piece)
        if piece.finish is not None:
            choice |= {"finish_reason": self._finish(piece.finish.value)}
            choice["stop_reason"] = None if self._only_prompt else piece.stop_reason
        chunk = self._head | {"choices": [choice]}
        yield with_usage(chunk, self._body, lambda: self._counted(usage()))

    def last(self, usage: Usage) -> Iterator[Json]:
        if self._body.include_usage:
            yield self._head | {"choices": [], "usage": usage_of(self._counted(usage))}

    def failed(self, error: JserveError) -> Iterator[Json]:
        yield error_body(error)

    def whole(self, pieces: Sequence[TextPiece], usage: Usage) -> Json:
        """The ``text_completion`` object."""
        choices = [self._whole_choice(number, c) for number, c in gathered(pieces)]
        return self._head | {"choices": choices, "usage": usage_of(self._counted(usage))}

    def _whole_choice(self, number: int, whole: Whole) -> Json:
        choice = self._choice(number)
        text = "" if self._only_prompt else "".join(whole.text)
        choice["text"] = self._echo(whole.prompt) + text
        if self._body.logprobs is not None:
            choice["logprobs"] = self._logprobs(number, whole, first=True)
        choice["finish_reason"] = self._finish(whole.finish)
        choice["stop_reason"] = None if self._only_prompt else whole.stop_reason
        choice["seed"] = whole.seed
        choice |= {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}
        if self._body.return_token_ids:
            choice |= self._ids(whole, first=True)
        choice |= self._extra(whole)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._writer.prompt(whole.prompt_logprobs or ())
        return choice

    def _choice(self, number: int) -> Json:
        return {"index": number, "text": "", "logprobs": None, "finish_reason": None}

    def _text(self, piece: TextPiece) -> str:
        text = "" if self._only_prompt else piece.text
        return self._echo(piece.prompt) + text if piece.first else text

    def _echo(self, prompt: int) -> str:
        if not self._body.echo:
            return ""
        given = self._prompts[prompt]
        changed = self._body.truncate_prompt_tokens is not None or self._body.cache is not None
        if isinstance(given, str) and not changed:
            return given
        skip = self._body.skip_special_tokens is not False
        return self._tokenizer.decode(self._requests[prompt].prompt_ids, skip_special_tokens=skip)

    def _logprobs(self, number: int, part: TextPiece | Whole, *, first: bool) -> Json:
        entries: list[TokenLogprob | None] = []
        ids: list[int] = []
        if first and self._body.echo:
            ids += self._requests[part.prompt].prompt_ids
            entries += part.prompt_logprobs or [None] * len(ids)
        if not self._only_prompt:
            ids += part.token_ids
            entries += part.logprobs or ()
        offset = self._offsets.get(number, 0)
        shape = self._writer.completions(entries, ids, self._body.logprobs or 0, offset)
        if ids:
            end = shape["text_offset"][-1] + len(self._tokenizer.token_text(ids[-1]))
            self._offsets[number] = end
        return shape

    def _ids(self, part: TextPiece | Whole, *, first: bool) -> Json:
        found: Json = {"token_ids": [], "weight_versions": []}
        if not self._only_prompt:
            found = {"token_ids": list(part.token_ids), "weight_versions": part.weight_versions}
        if first:
            found["prompt_token_ids"] = list(self._requests[part.prompt].prompt_ids)
        return found

    def _extra(self, part: TextPiece | Whole) -> Json:
        found: Json = {"extra": part.extra} if part.extra and not self._only_prompt else {}
        return found | ({"prompt_extra": part.prompt_extra} if part.prompt_extra else {})

    def _finish(self, reason: str | None) -> str | None:
        return "length" if self._only_prompt and reason is not None else reason

    def _counted(self, usage: Usage) -> Usage:
        """With max_tokens 0 the one token drawn to score the prompt is not part of the answer."""
        if not self._only_prompt:
            return usage
        return Usage(prompt=usage.prompt, completion=0, cached=usage.cached)
