"""Anthropic message replies: one object, or an event stream.

The order of a stream::

    message_start . content_block_start . content_block_delta ... content_block_stop ...
    (a thought's last delta is its signature)
    message_delta (stop reason, usage) . message_stop
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import orjson

from jserve.api.http.error_format import anthropic_error
from jserve.api.openai.usage import new_id
from jserve.api.reply.blocks import AnswerBlocks, Begin, Block, End, Kind, Step
from jserve.api.reply.choice_parser import choice_parsers
from jserve.api.reply.generate import Counts, Json, TextPiece
from jserve.api.request.parsed import ParsedRequest, Served, Usage
from jserve.errors import JserveError
from jserve.text.tokenizer import TextTokenizer
from jserve.types import Finish, Request


class MessageReply:
    """The answer of /v1/messages for one request."""

    done: str | None = None
    named = True

    def __init__(
        self,
        ask: ParsedRequest,
        served: Served,
        tokenizer: TextTokenizer,
        requests: Sequence[Request],
    ) -> None:
        (self._parser,) = choice_parsers(ask, served, tokenizer, requests)
        self._blocks = AnswerBlocks(self._parser)
        self._thinks = served.card.speech.thinks
        self._id, self._model = new_id("msg_"), served.card.name
        self._stop: Json = {"stop_reason": None, "stop_sequence": None}

    def chunks(self, piece: TextPiece, usage: Counts) -> Iterator[Json]:
        """The events of one piece."""
        if piece.first:
            before = replace(usage(), completion=0)
            yield {"type": "message_start", "message": self._message([], before)}
        for step in self._steps(piece):
            if isinstance(step, End) and step.block.kind is Kind.THOUGHT:
                yield _delta(
                    step.block, {"type": "signature_delta", "signature": _signature(step.block)}
                )
            yield _event(step)

    def last(self, usage: Usage) -> Iterator[Json]:
        yield {"type": "message_delta", "delta": self._stop, "usage": self._usage(usage)}
        yield {"type": "message_stop"}

    def whole(self, pieces: Sequence[TextPiece], usage: Usage) -> Json:
        """The ``message`` object."""
        for piece in pieces:
            for _ in self._steps(piece):
                pass
        return self._message([_whole(block) for block in self._blocks.row], usage)

    def failed(self, error: JserveError) -> Iterator[Json]:
        yield anthropic_error(error)

    def _steps(self, piece: TextPiece) -> Iterator[Step]:
        ended = piece.finish is not None
        yield from self._blocks.add(self._parser.feed(piece.text, piece.token_ids, last=ended))
        if ended:
            yield from self._blocks.close()
            self._stop = self._ending(piece)

    def _ending(self, piece: TextPiece) -> Json:
        reason, sequence = "end_turn", None
        if piece.finish is Finish.LENGTH:
            reason = "max_tokens"
        elif self._parser.n_calls:
            reason = "tool_use"
        elif isinstance(piece.stop_reason, str):
            reason, sequence = "stop_sequence", piece.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _message(self, content: list[Json], usage: Usage) -> Json:
        found: Json = {"id": self._id, "type": "message", "role": "assistant"}
        found |= {"model": self._model, "content": content}
        return found | self._stop | {"usage": self._usage(usage)}

    def _usage(self, usage: Usage) -> Json:
        """``input_tokens`` leaves out those that were cached, as Anthropic counts."""
        found: Json = {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
        }
        if self._thinks:
            found["output_tokens_details"] = {"thinking_tokens": self._parser.n_reasoning}
        return found


def _event(step: Step) -> Json:
    index = step.block.index
    if isinstance(step, Begin):
        return {"type": "content_block_start", "index": index, "content_block": _empty(step.block)}
    if isinstance(step, End):
        return {"type": "content_block_stop", "index": index}
    change = {
        Kind.THOUGHT: {"type": "thinking_delta", "thinking": step.text},
        Kind.TEXT: {"type": "text_delta", "text": step.text},
        Kind.CALL: {"type": "input_json_delta", "partial_json": step.text},
    }[step.block.kind]
    return _delta(step.block, change)


def _delta(block: Block, change: Json) -> Json:
    return {"type": "content_block_delta", "index": block.index, "delta": change}


def _signature(block: Block) -> str:
    """An opaque name of the thought: the same text has the same one. It proves nothing, and a thought
    that comes back in a later turn is taken with any signature or none."""
    digest = hashlib.sha256(block.text.encode("utf-8", "surrogatepass")).digest()
    return base64.b64encode(digest).decode()


def _empty(block: Block) -> Json:
    if block.kind is Kind.THOUGHT:
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind is Kind.TEXT:
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _whole(block: Block) -> Json:
    if block.kind is Kind.THOUGHT:
        return _empty(block) | {"thinking": block.text, "signature": _signature(block)}
    if block.kind is Kind.TEXT:
        return _empty(block) | {"text": block.text}
    return _empty(block) | {"input": _input(block.text)}


def _input(text: str) -> Any:
    """A call's arguments as an object; a call that was cut off has none."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
