"""OpenAI's chat completions: one object for a whole answer, chunks for a stream.

Owns the shapes that clients parse, and vLLM's extensions (token ids, stop reasons, prompt
log-probabilities; our own is ``seed``). Must not know HTTP or the engine. The order of a stream,
per choice and then for all::

    role chunk . content, reasoning and tool call chunks ... the last with its finish
    usage chunk if asked  [DONE]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jserve.api.ask import Ask, Served, Usage
from jserve.api.errors import error_body
from jserve.api.generate import Counts, Json, Piece
from jserve.api.logprobs import TokenWriter
from jserve.api.openai import ChatBody
from jserve.api.openai_usage import head, usage_of, with_usage
from jserve.api.reply import Whole, gathered
from jserve.api.voice import Voice, voices
from jserve.errors import JserveError
from jserve.text.chat.parsers.said import CallPiece, Said
from jserve.text.tokenizer import TextTokenizer
from jserve.types import Request, TokenLogprob


class ChatReply:
    """Answers of /v1/chat/completions for one request."""

    done: str | None = "[DONE]"
    named = False

    def __init__(
        self, ask: Ask, served: Served, tokenizer: TextTokenizer, requests: Sequence[Request]
    ) -> None:
        self._body: ChatBody = ask.body
        self._requests = requests
        self._thinks = served.card.speech.tags is not None
        shows = self._body.include_reasoning is not False
        self._null_names = served.thought_names
        self._thought_names = served.thought_names if shows and self._thinks else ()
        self._shows_tokens = bool(self._body.logprobs or self._body.return_token_ids)
        self._voices = voices(ask, served, tokenizer, requests)
        self._writer = TokenWriter(tokenizer, as_ids=bool(self._body.return_tokens_as_token_ids))
        self._head = head("chatcmpl-", served.card)

    def chunks(self, piece: Piece, usage: Counts) -> Iterator[Json]:
        """The chunks of one piece: its role when it is the choice's first, what it says, finish."""
        voice = self._voices[piece.choice]
        if piece.first:
            yield self._role(piece, usage)
        said = voice.hear(piece.text, piece.token_ids, last=piece.finish is not None)
        choices = [self._choice(piece, delta) for delta in self._deltas(voice, said)]
        nothing = {"content": ""} | self._reasoning(Said())
        if self._shows_tokens and piece.token_ids:
            choices = choices or [self._choice(piece, nothing)]
            choices[0] |= self._tokens(piece)
        if piece.finish is not None:
            choices = choices or [self._choice(piece, nothing)]
            choices[-1]["finish_reason"] = voice.finish(piece.finish.value)
            choices[-1]["stop_reason"] = piece.stop_reason
        for choice in choices:
            yield self._chunk(choice, usage)

    def _role(self, piece: Piece, usage: Counts) -> Json:
        """The first chunk of a choice, which counts nothing of the piece that comes with it."""
        role = self._choice(piece, {"role": "assistant", "content": ""} | self._reasoning(Said()))
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

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> Json:
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
        voice = self._voices[number]
        said = voice.hear("".join(choice.text), choice.token_ids, last=True)
        return {
            "index": number,
            "message": self._message(voice, said),
            "logprobs": self._logprobs(choice.logprobs) if self._body.logprobs else None,
            "finish_reason": voice.finish(choice.finish),
            "stop_reason": choice.stop_reason,
            "seed": choice.seed,
            "token_ids": choice.token_ids if self._body.return_token_ids else None,
        }

    def _deltas(self, voice: Voice, said: Said) -> list[Json]:
        """What a stream's next piece adds, a call's beginning and its arguments apart; none while
        nothing is to be seen."""
        calls = [{"tool_calls": [step]} for piece in said.calls for step in _steps(voice, piece)]
        thought = self._thought_names and said.reasoning
        if not (said.content or thought):
            return calls
        text: Json = {"content": said.content} if said.content else {}
        return [text | self._reasoning(said), *calls]

    def _message(self, voice: Voice, said: Said) -> Json:
        calls: list[Json] = []
        for piece in said.calls:
            if piece.name is not None:
                calls.append(_call(voice, piece.name))
            calls[piece.index]["function"]["arguments"] += piece.arguments
        found: Json = {"role": "assistant", "content": said.content, "refusal": None}
        if calls:
            found |= {"content": said.content or None, "tool_calls": calls}
        return found | dict.fromkeys(self._null_names) | self._reasoning(said)

    def _reasoning(self, said: Said) -> Json:
        """Under the names that clients read; null where a model that has thoughts says none."""
        return dict.fromkeys(self._thought_names, said.reasoning or None)

    def _counted(self, usage: Usage) -> Usage:
        if not self._thinks:
            return usage
        return replace(usage, reasoning=sum(voice.n_reasoning for voice in self._voices))

    def _tokens(self, piece: Piece) -> Json:
        found: Json = {}
        if self._body.logprobs:
            found["logprobs"] = self._logprobs(piece.logprobs or ())
        if self._body.return_token_ids:
            found["token_ids"] = list(piece.token_ids)
        return found

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Json:
        return self._writer.chat(entries, self._body.top_logprobs or 0)

    def _choice(self, piece: Piece, delta: Json) -> Json:
        return {"index": piece.choice, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chunk(self, choice: Json, usage: Counts) -> Json:
        chunk = self._head | {"object": "chat.completion.chunk", "choices": [choice]}
        return with_usage(chunk, self._body, lambda: self._counted(usage()))


def _steps(voice: Voice, piece: CallPiece) -> Iterator[Json]:
    """A call begins with its name and without arguments; these follow."""
    if piece.name is not None:
        yield {"index": piece.index} | _call(voice, piece.name)
    if piece.arguments:
        yield {"index": piece.index, "function": {"arguments": piece.arguments}}


def _call(voice: Voice, name: str) -> Json:
    function = {"name": name, "arguments": ""}
    return {"id": voice.call_id(), "type": "function", "function": function}
