"""OpenAI's answers: one object for a whole answer, chunks for a stream, and the list of models.

Owns the shapes that clients parse, and vLLM's extensions (token ids, stop reasons, prompt
log-probabilities; our own is ``seed``). Must not know HTTP or the engine.

The order of a stream, per choice and then for all::

    chat          role chunk . content chunks ... finish chunk then usage chunk if asked  [DONE]
    completions   (echo and) text chunks ... the last with finish then usage chunk if asked  [DONE]
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from jserve.api.ask import ModelCard, Usage
from jserve.api.generate import Counts, Json, Piece
from jserve.api.openai import ChatBody, CompletionBody
from jserve.api.voice import Voice
from jserve.text.tokenizer import TextTokenizer
from jserve.types import Request, TokenLogprob

LOWEST = -9999.0
"""JSON has no minus infinity."""


@dataclass(slots=True, kw_only=True)
class _Whole:
    """The pieces of one choice, put together."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    seed: int | None = None
    finish: str | None = None
    stop_reason: int | str | None = None
    prompt: int = 0

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs or ())
        self.prompt = piece.prompt
        if piece.first:
            self.seed, self.prompt_logprobs = piece.seed, piece.prompt_logprobs
        if piece.finish is not None:
            self.finish, self.stop_reason = piece.finish.value, piece.stop_reason


def gathered(pieces: Sequence[Piece]) -> list[tuple[int, _Whole]]:
    """(choice number, everything it got), in order of number."""
    found: dict[int, _Whole] = {}
    for piece in pieces:
        found.setdefault(piece.choice, _Whole()).add(piece)
    return sorted(found.items())


def usage_of(usage: Usage) -> Json:
    found: Json = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
    details: Json = {}
    if usage.reasoning is not None:
        details["reasoning_tokens"] = usage.reasoning
    if usage.drafted:
        details["accepted_prediction_tokens"] = usage.accepted
        details["rejected_prediction_tokens"] = usage.drafted - usage.accepted
    return found | ({"completion_tokens_details": details} if details else {})


class TokenWriter:
    """Tokens and log-probabilities as JSON; ``as_ids`` writes tokens as "token_id:N"."""

    def __init__(self, tokenizer: TextTokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)

    def chat(self, logprobs: Sequence[TokenLogprob], n_top: int) -> Json:
        """The chat shape: one entry per token with its bytes and the ``n_top`` most likely ones."""
        return {"content": [self._chat_token(t, n_top) for t in logprobs], "refusal": None}

    def _chat_token(self, entry: TokenLogprob, n_top: int) -> Json:
        top = zip(entry.top_ids[:n_top], entry.top_logprobs[:n_top], strict=True)
        return self._pair(entry.token, entry.logprob) | {
            "top_logprobs": [self._pair(token, logprob) for token, logprob in top]
        }

    def _pair(self, token: int, logprob: float) -> Json:
        data = list(self._tokenizer.token_bytes(token))
        return {"token": self.text(token), "logprob": _finite(logprob), "bytes": data}

    def completions(
        self, entries: Sequence[TokenLogprob | None], ids: Sequence[int], n_top: int, offset: int
    ) -> Json:
        """The completions shape: four lists of one length; a None entry (no score) has null.

        ``top_logprobs`` holds the ``n_top`` most likely tokens and the one that was drawn.
        """
        offsets: list[int] = []
        for token in ids:
            offsets.append(offset)
            offset += len(self._tokenizer.token_text(token))
        return {
            "tokens": [self.text(token) for token in ids],
            "token_logprobs": [None if e is None else _finite(e.logprob) for e in entries],
            "top_logprobs": [None if e is None else self._top(e, n_top) for e in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob, n_top: int) -> dict[str, float]:
        pairs = zip(entry.top_ids[:n_top], entry.top_logprobs[:n_top], strict=True)
        found: dict[str, float] = {}
        for token, logprob in (*pairs, (entry.token, entry.logprob)):
            # Different tokens may read the same (broken bytes): the likeliest stands.
            found.setdefault(self.text(token), _finite(logprob))
        return found

    def prompt(self, entries: Sequence[TokenLogprob | None]) -> list[Json | None]:
        """vLLM's ``prompt_logprobs``: per token, id -> log-probability, rank and text."""
        return [None if e is None else self._prompt_token(e) for e in entries]

    def _prompt_token(self, entry: TokenLogprob) -> Json:
        ranked = zip(entry.top_ids, entry.top_logprobs, strict=True)
        rows: list[tuple[int, float, int | None]] = [
            (token, lp, rank) for rank, (token, lp) in enumerate(ranked, 1)
        ]
        if entry.token not in entry.top_ids:
            rows.append((entry.token, entry.logprob, None))
        return {
            str(token): {
                "logprob": _finite(lp),
                "rank": rank,
                "decoded_token": self._tokenizer.token_text(token),
            }
            for token, lp, rank in rows
        }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST) if logprob == logprob else LOWEST


class ChatReply:
    """Answers of /v1/chat/completions for one request. ``calls``: look for tool calls in them."""

    done: str | None = "[DONE]"

    def __init__(
        self,
        body: ChatBody,
        card: ModelCard,
        tokenizer: TextTokenizer,
        requests: Sequence[Request],
        *,
        calls: bool = False,
    ) -> None:
        self._body = body
        self._requests = requests
        self._card, self._tokenizer, self._calls = card, tokenizer, calls
        self._voices: dict[int, Voice] = {}
        self._writer = TokenWriter(tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._head = _head("chatcmpl-", card)

    def chunks(self, piece: Piece, usage: Counts) -> Iterator[Json]:
        """The chunks of one piece: its role when it is the choice's first, what it says, finish."""
        voice = self._voice(piece.choice, piece.prompt)
        if piece.first:
            role = self._choice(piece, {"role": "assistant", "content": ""})
            role["seed"] = piece.seed
            chunk = self._chunk(role, usage)
            if self._body.return_token_ids:
                chunk["prompt_token_ids"] = list(self._requests[piece.prompt].prompt_ids)
            yield chunk
        delta = voice.delta(piece.text, piece.token_ids, last=piece.finish is not None)
        if delta or (piece.token_ids and (self._body.logprobs or self._body.return_token_ids)):
            choice = self._choice(piece, delta or {"content": ""})
            if self._body.logprobs:
                choice["logprobs"] = self._logprobs(piece.logprobs or ())
            if self._body.return_token_ids:
                choice["token_ids"] = list(piece.token_ids)
            yield self._chunk(choice, usage)
        if piece.finish is not None:
            choice = self._choice(piece, {})
            choice["finish_reason"] = voice.finish(piece.finish.value)
            choice["stop_reason"] = piece.stop_reason
            yield self._chunk(choice, usage)

    def last(self, usage: Usage) -> Iterator[Json]:
        if self._body.include_usage:
            head = self._head | {"object": "chat.completion.chunk"}
            yield head | {"choices": [], "usage": usage_of(self._counted(usage))}

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> Json:
        """The ``chat.completion`` object."""
        choices = gathered(pieces)
        answer = self._head | {
            "object": "chat.completion",
            "choices": [self._whole_choice(number, choice) for number, choice in choices],
            "usage": usage_of(self._counted(usage)),
        }
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = list(self._requests[0].prompt_ids)
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._writer.prompt(choices[0][1].prompt_logprobs or ())
        return answer

    def _whole_choice(self, number: int, choice: _Whole) -> Json:
        voice = self._voice(number, choice.prompt)
        found: Json = {
            "index": number,
            "message": voice.message("".join(choice.text), choice.token_ids),
            "logprobs": self._logprobs(choice.logprobs) if self._body.logprobs else None,
            "finish_reason": voice.finish(choice.finish),
            "stop_reason": choice.stop_reason,
            "seed": choice.seed,
        }
        if self._body.return_token_ids:
            found["token_ids"] = choice.token_ids
        return found

    def _voice(self, number: int, prompt: int) -> Voice:
        voice = self._voices.get(number)
        if voice is None:
            speech = self._card.speech
            state = speech.state(self._requests[prompt].prompt_ids, self._tokenizer)
            shows = self._body.include_reasoning is not False
            voice = Voice(speech, state, calls=self._calls, shows_reasoning=shows)
            self._voices[number] = voice
        return voice

    def _counted(self, usage: Usage) -> Usage:
        if self._card.speech.tags is None:
            return usage
        return replace(usage, reasoning=sum(v.n_reasoning for v in self._voices.values()))

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Json:
        return self._writer.chat(entries, self._body.top_logprobs or 0)

    def _choice(self, piece: Piece, delta: Json) -> Json:
        return {"index": piece.choice, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chunk(self, choice: Json, usage: Counts) -> Json:
        chunk = self._head | {"object": "chat.completion.chunk", "choices": [choice]}
        return _with_usage(chunk, self._body, lambda: self._counted(usage()))


class CompletionReply:
    """Answers of /v1/completions for one request."""

    done: str | None = "[DONE]"

    def __init__(
        self,
        body: CompletionBody,
        card: ModelCard,
        tokenizer: TextTokenizer,
        requests: Sequence[Request],
        prompts: Sequence[str | tuple[int, ...]] = (),
    ) -> None:
        self._body = body
        self._requests = requests
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._writer = TokenWriter(tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._head = _head("cmpl-", card) | {"object": "text_completion"}
        self._offsets: dict[int, int] = {}
        self._only_prompt = body.max_tokens == 0

    def chunks(self, piece: Piece, usage: Counts) -> Iterator[Json]:
        """The chunk of one piece, or none where nothing is to be seen yet."""
        show_ids = self._body.return_token_ids or self._body.logprobs is not None
        if not (piece.first or piece.text or piece.finish or (piece.token_ids and show_ids)):
            return
        text, choice = self._text(piece), self._choice(piece.choice)
        choice["text"] = text
        if self._body.logprobs is not None:
            choice["logprobs"] = self._logprobs(piece.choice, piece, first=piece.first)
        if piece.first:
            choice["seed"] = piece.seed
        if self._body.return_token_ids:
            choice |= self._ids(piece.prompt, piece.token_ids, first=piece.first)
        if piece.finish is not None:
            choice |= {"finish_reason": self._finish(piece.finish.value)}
            choice["stop_reason"] = None if self._only_prompt else piece.stop_reason
        chunk = self._head | {"choices": [choice]}
        yield _with_usage(chunk, self._body, lambda: self._counted(usage()))

    def last(self, usage: Usage) -> Iterator[Json]:
        if self._body.include_usage:
            yield self._head | {"choices": [], "usage": usage_of(self._counted(usage))}

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> Json:
        """The ``text_completion`` object."""
        choices = [self._whole_choice(number, c) for number, c in gathered(pieces)]
        return self._head | {"choices": choices, "usage": usage_of(self._counted(usage))}

    def _whole_choice(self, number: int, whole: _Whole) -> Json:
        choice = self._choice(number)
        text = "" if self._only_prompt else "".join(whole.text)
        choice["text"] = self._echo(whole.prompt) + text
        if self._body.logprobs is not None:
            choice["logprobs"] = self._logprobs(number, whole, first=True)
        choice["finish_reason"] = self._finish(whole.finish)
        choice["stop_reason"] = None if self._only_prompt else whole.stop_reason
        choice["seed"] = whole.seed
        if self._body.return_token_ids:
            choice |= self._ids(whole.prompt, whole.token_ids, first=True)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._writer.prompt(whole.prompt_logprobs or ())
        return choice

    def _choice(self, number: int) -> Json:
        return {"index": number, "text": "", "logprobs": None, "finish_reason": None}

    def _text(self, piece: Piece) -> str:
        text = "" if self._only_prompt else piece.text
        return self._echo(piece.prompt) + text if piece.first else text

    def _echo(self, prompt: int) -> str:
        if not self._body.echo:
            return ""
        given = self._prompts[prompt]
        if isinstance(given, str) and self._body.truncate_prompt_tokens is None:
            return given
        skip = self._body.skip_special_tokens is not False
        return self._tokenizer.decode(self._requests[prompt].prompt_ids, skip_special_tokens=skip)

    def _logprobs(self, number: int, part: Piece | _Whole, *, first: bool) -> Json:
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

    def _ids(self, prompt: int, token_ids: Sequence[int], *, first: bool) -> Json:
        found: Json = {"token_ids": [] if self._only_prompt else list(token_ids)}
        if first:
            found["prompt_token_ids"] = list(self._requests[prompt].prompt_ids)
        return found

    def _finish(self, reason: str | None) -> str | None:
        return "length" if self._only_prompt and reason is not None else reason

    def _counted(self, usage: Usage) -> Usage:
        """With max_tokens 0 the one token drawn to score the prompt is not part of the answer."""
        if not self._only_prompt:
            return usage
        return Usage(prompt=usage.prompt, completion=0, cached=usage.cached)


def _head(prefix: str, card: ModelCard) -> Json:
    return {
        "id": prefix + uuid.uuid4().hex,
        "created": int(time.time()),
        "model": card.name,
        "system_fingerprint": card.fingerprint or None,
    }


def _with_usage(chunk: Json, body: ChatBody | CompletionBody, usage: Counts) -> Json:
    if body.include_usage:
        chunk["usage"] = usage_of(usage()) if body.continuous_usage else None
    return chunk


def model_object(card: ModelCard, name: str) -> Json:
    """One entry of the list of models."""
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "jserve",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
    }


def model_list(card: ModelCard) -> Json:
    names = (card.name, *card.aliases)
    return {"object": "list", "data": [model_object(card, name) for name in names]}
