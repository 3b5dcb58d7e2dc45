"""OpenAI chat completion replies: one object, or chunks of a stream.

It owns the shapes that clients parse, and vLLM's extensions (token ids, stop reasons, prompt log-probabilities; our
own are ``seed`` and ``extra``, the values of step features). The order of a stream, per choice and then for all::

    role chunk . content, reasoning and tool call chunks ... the last with its finish
    usage chunk if asked  [DONE]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jserve.api.http.errors import error_body
from jserve.api.openai.fields import ChatBody
from jserve.api.openai.usage import head, usage_of, with_usage
from jserve.api.reply.choice_parser import ChoiceParser, choice_parsers
from jserve.api.reply.generate import Counts, Json, TextPiece
from jserve.api.reply.logprobs import TokenWriter
from jserve.api.reply.reply import Whole, gathered
from jserve.api.request.parsed import ParsedRequest, Served, Usage
from jserve.errors import JserveError
from jserve.text.chat.parsers.delta import CallPiece, ParsedDelta
from jserve.text.tokenizer import TextTokenizer
from jserve.types import Request, TokenLogprob


class ChatReply:
    """Answers of /v1/chat/completions for one request."""

    done: str | None = "[DONE]"
    named = False

    def __init__(
        self,
        ask: ParsedRequest,
        served: Served,
        tokenizer: TextTokenizer,
        requests: Sequence[Request],
    ) -> None:
        self._body: ChatBody = ask.body
        self._requests = requests
        self._thinks = served.card.speech.thinks
        shows = self._body.include_reasoning is not False
        self._null_names = served.thought_names
        self._thought_names = served.thought_names if shows and self._thinks else ()
        self._shows_tokens = bool(
            self._body.logprobs or self._body.return_token_ids or self._body.vllm_xargs
        )
        self._parsers = choice_parsers(ask, served, tokenizer, requests)
        self._writer = TokenWriter(tokenizer, as_ids=bool(self._body.return_tokens_as_token_ids))
        self._head = head("chatcmpl-", served.card)

    def chunks(self, piece: TextPiece, usage: Counts) -> Iterator[Json]:
        """The chunks of one piece: its role when it is the choice's first, what it says, finish."""
        parser = self._parsers[piece.choice]
        if piece.first:
            yield self._role(piece, usage)
        parsed = parser.feed(piece.text, piece.token_ids, last=piece.finish is not None)
        choices = [self._choice(piece, delta) for delta in self._deltas(parser, parsed)]
        nothing = {"content": ""} | self._reasoning(ParsedDelta())
        if self._shows_tokens and piece.token_ids:
            choices = choices or [self._choice(piece, nothing)]
            choices[0] |= self._tokens(piece)
        if piece.finish is not None:
            choices = choices or [self._choice(piece, nothing)]
            choices[-1]["finish_reason"] = parser.finish(piece.finish.value)
            choices[-1]["stop_reason"] = piece.stop_reason
        for choice in choices:
            yield self._chunk(choice, usage)

    def _role(self, piece: TextPiece, usage: Counts) -> Json:
        """The first chunk of a choice, which counts nothing of the piece that comes with it."""
        role = self._choice(
            piece, {"role": "assistant", "content": ""} | self._reasoning(ParsedDelta())
        )
        role["seed"] = piece.seed

        def before() -> Usage:
            now = usage()
            return replace(now, completion=now.completion - len(piece.token_ids))

        chunk = self._chunk(role, before)
        if self._body.return_token_ids:
            chunk["prompt_token_ids"] = list(self._requests[piece.prompt].prompt_ids)
        return chunk

    def last(self, usage: Usage) -> Iterator[Json]:
        if self._body.include_usage:
            end = {"choices": [], "usage": usage_of(self._counted(usage))}
            yield self._head | {"object": "chat.completion.chunk"} | end

    def failed(self, error: JserveError) -> Iterator[Json]:
        yield error_body(error)

    def whole(self, pieces: Sequence[TextPiece], usage: Usage) -> Json:
        """The ``chat.completion`` object."""
        choices, body = gathered(pieces), self._body
        scores = None
        if body.prompt_logprobs is not None:
            scores = self._writer.prompt(choices[0][1].prompt_logprobs or ())
        ids = list(self._requests[0].prompt_ids) if body.return_token_ids else None
        return self._head | {
            "object": "chat.completion",
            "choices": [self._whole_choice(number, choice) for number, choice in choices],
            "usage": usage_of(self._counted(usage)),
            "prompt_token_ids": ids,
            "prompt_logprobs": scores,
        }

    def _whole_choice(self, number: int, choice: Whole) -> Json:
        parser = self._parsers[number]
        parsed = parser.feed("".join(choice.text), choice.token_ids, last=True)
        found = {
            "index": number,
            "message": self._message(parser, parsed),
            "logprobs": self._logprobs(choice.logprobs) if self._body.logprobs else None,
            "finish_reason": parser.finish(choice.finish),
            "stop_reason": choice.stop_reason,
            "seed": choice.seed,
            "token_ids": choice.token_ids if self._body.return_token_ids else None,
        }
        return found | self._versions(choice) | _extra(choice)

    def _deltas(self, parser: ChoiceParser, parsed: ParsedDelta) -> list[Json]:
        """The deltas that a stream's next piece adds, a call's beginning and its arguments apart; none while
        nothing is to be seen."""
        calls = [{"tool_calls": [step]} for piece in parsed.calls for step in _steps(parser, piece)]
        thought = self._thought_names and parsed.reasoning
        if not (parsed.content or thought):
            return calls
        text: Json = {"content": parsed.content} if parsed.content else {}
        return [text | self._reasoning(parsed), *calls]

    def _message(self, parser: ChoiceParser, parsed: ParsedDelta) -> Json:
        calls: list[Json] = []
        for piece in parsed.calls:
            if piece.name is not None:
                calls.append(_call(parser, piece.name))
            calls[piece.index]["function"]["arguments"] += piece.arguments
        found: Json = {"role": "assistant", "content": parsed.content, "refusal": None}
        if calls:
            found |= {"content": parsed.content or None, "tool_calls": calls}
        return found | dict.fromkeys(self._null_names) | self._reasoning(parsed)

    def _reasoning(self, parsed: ParsedDelta) -> Json:
        """Under the names that clients read; null where a model that has thoughts says none."""
        return dict.fromkeys(self._thought_names, parsed.reasoning or None)

    def _counted(self, usage: Usage) -> Usage:
        if not self._thinks:
            return usage
        return replace(usage, reasoning=sum(parser.n_reasoning for parser in self._parsers))

    def _tokens(self, piece: TextPiece) -> Json:
        found: Json = {}
        if self._body.logprobs:
            found["logprobs"] = self._logprobs(piece.logprobs or ())
        if self._body.return_token_ids:
            found["token_ids"] = list(piece.token_ids)
        return found | self._versions(piece) | _extra(piece)

    def _versions(self, part: TextPiece | Whole) -> Json:
        """The weights that drew the tokens, where their ids are asked for."""
        asked = self._body.return_token_ids
        return {"weight_versions": part.weight_versions} if asked else {}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Json:
        return self._writer.chat(entries, self._body.top_logprobs or 0)

    def _choice(self, piece: TextPiece, delta: Json) -> Json:
        return {"index": piece.choice, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chunk(self, choice: Json, usage: Counts) -> Json:
        chunk = self._head | {"object": "chat.completion.chunk", "choices": [choice]}
        return with_usage(chunk, self._body, lambda: self._counted(usage()))


def _extra(part: TextPiece | Whole) -> Json:
    """The values of step features, where they gave any."""
    found = {"extra": part.extra, "prompt_extra": part.prompt_extra}
    return {name: values for name, values in found.items() if values}


def _steps(parser: ChoiceParser, piece: CallPiece) -> Iterator[Json]:
    """A call begins with its name and without arguments; these follow."""
    if piece.name is not None:
        yield {"index": piece.index} | _call(parser, piece.name)
    if piece.arguments:
        yield {"index": piece.index, "function": {"arguments": piece.arguments}}


def _call(parser: ChoiceParser, name: str) -> Json:
    function = {"name": name, "arguments": ""}
    return {"id": parser.call_id(), "type": "function", "function": function}
