"""OpenAI Responses replies: one object, or an event stream with sequence numbers.

The order of a stream, items one after the other::

    response.created . response.in_progress
        response.output_item.added
            response.content_part.added . <delta> ... <done> . response.content_part.done   text, thought
            response.function_call_arguments.delta ... response.function_call_arguments.done       call
        response.output_item.done
    response.completed | response.incomplete | response.failed
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from jserve.api.http.errors import error_body
from jserve.api.openai.usage import new_id
from jserve.api.reply.blocks import AnswerBlocks, Begin, Block, Grow, Kind, Step
from jserve.api.reply.choice_parser import choice_parsers
from jserve.api.reply.generate import Counts, Json, TextPiece
from jserve.api.reply.logprobs import TokenWriter
from jserve.api.request.parsed import ParsedRequest, Served, Usage
from jserve.api.responses.fields import ResponseBody
from jserve.errors import JserveError
from jserve.text.tokenizer import TextTokenizer
from jserve.types import Finish, Request, TokenLogprob

_PREFIX = {Kind.THOUGHT: "rs_", Kind.TEXT: "msg_", Kind.CALL: "fc_"}
_WORDS = {Kind.THOUGHT: "response.reasoning_text", Kind.TEXT: "response.output_text"}


class ResponseReply:
    """The answer of /v1/responses for one request."""

    done: str | None = None
    named = True

    def __init__(
        self,
        ask: ParsedRequest,
        served: Served,
        tokenizer: TextTokenizer,
        requests: Sequence[Request],
    ) -> None:
        self._body: ResponseBody = ask.body
        self._params = ask.params
        (self._parser,) = choice_parsers(ask, served, tokenizer, requests)
        self._blocks = AnswerBlocks(self._parser)
        self._writer = TokenWriter(tokenizer, as_ids=False)
        self._logprobs: list[Json] = []
        self._extra: dict[str, list[Any]] = {}
        self._prompt_extra: dict[str, tuple[Any, ...]] = {}
        self._n_told = 0
        self._id, self._created = new_id("resp_"), int(time.time())
        self._model = served.card.name
        self._finish: Finish | None = None
        self._n_sent = 0

    def chunks(self, piece: TextPiece, usage: Counts) -> Iterator[Json]:
        """The events of one piece."""
        if piece.first:
            yield from self._opening()
        for step in self._steps(piece):
            for event in self._told(step):
                yield self._numbered(event)

    def last(self, usage: Usage) -> Iterator[Json]:
        response = self._response(self._status, usage)
        yield self._numbered({"type": f"response.{self._status}", "response": response})

    def whole(self, pieces: Sequence[TextPiece], usage: Usage) -> Json:
        """The ``response`` object."""
        for piece in pieces:
            for _ in self._steps(piece):
                pass
        return self._response(self._status, usage)

    def failed(self, error: JserveError) -> Iterator[Json]:
        """``error``, which clients raise, behind the response that says the same."""
        words = error_body(error)["error"]
        if not self._n_sent:
            yield from self._opening()
        told = {"code": "server_error", "message": words["message"]}
        response = self._response("failed", None) | {"error": told}
        yield self._numbered({"type": "response.failed", "response": response})
        yield self._numbered({"type": "error", "error": words} | words | {"type": "error"})

    def _opening(self) -> Iterator[Json]:
        for name in ("created", "in_progress"):
            response = self._response("in_progress", None)
            yield self._numbered({"type": f"response.{name}", "response": response})

    def _numbered(self, event: Json) -> Json:
        event["sequence_number"] = self._n_sent
        self._n_sent += 1
        return event

    def _steps(self, piece: TextPiece) -> Iterator[Step]:
        if self._body.wants_logprobs:
            self._logprobs += self._tokens(piece.logprobs or ())
        for name, values in (piece.extra or {}).items():
            self._extra.setdefault(name, []).extend(values)
        self._prompt_extra |= piece.prompt_extra or {}
        ended = piece.finish is not None
        yield from self._blocks.add(self._parser.feed(piece.text, piece.token_ids, last=ended))
        if ended:
            self._finish = piece.finish
            yield from self._blocks.close()

    def _tokens(self, entries: Sequence[TokenLogprob]) -> list[Json]:
        return self._writer.chat(entries, self._body.top_logprobs or 0)["content"]

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish is Finish.LENGTH else "completed"

    def _told(self, step: Step) -> Iterator[Json]:
        if isinstance(step, Begin):
            return self._begun(step.block)
        if isinstance(step, Grow):
            return self._grown(step.block, step.text)
        return self._ended(step.block)

    def _begun(self, block: Block) -> Iterator[Json]:
        item = self._item(block, "in_progress", empty=True)
        yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
        if block.kind is not Kind.CALL:
            part = self._part(block, empty=True)
            yield {"type": "response.content_part.added", **_at(block), "part": part}

    def _grown(self, block: Block, text: str) -> Iterator[Json]:
        if block.kind is Kind.CALL:
            where = {"item_id": _item_id(block), "output_index": block.index}
            yield {"type": "response.function_call_arguments.delta", **where, "delta": text}
            return
        event: Json = {"type": f"{_WORDS[block.kind]}.delta", **_at(block), "delta": text}
        if block.kind is Kind.TEXT:
            event["logprobs"] = self._spoken()[self._n_told :]
            self._n_told += len(event["logprobs"])
        yield event

    def _ended(self, block: Block) -> Iterator[Json]:
        if block.kind is Kind.CALL:
            yield {
                "type": "response.function_call_arguments.done",
                "item_id": _item_id(block),
                "output_index": block.index,
                "name": block.name,
                "arguments": block.text,
            }
        else:
            part = self._part(block)
            done: Json = {"type": f"{_WORDS[block.kind]}.done", **_at(block), "text": block.text}
            if block.kind is Kind.TEXT:
                done["logprobs"] = part["logprobs"]
            yield done
            yield {"type": "response.content_part.done", **_at(block), "part": part}
        item = self._item(block, self._item_status(block))
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}

    def _item_status(self, block: Block) -> str:
        cut = self._finish is Finish.LENGTH and block is self._blocks.row[-1]
        return "incomplete" if cut else "completed"

    def _item(self, block: Block, status: str, *, empty: bool = False) -> Json:
        found: Json = {"id": _item_id(block), "status": status}
        if block.kind is Kind.CALL:
            arguments = "" if empty else block.text
            named = {"call_id": block.call_id, "name": block.name, "arguments": arguments}
            return found | {"type": "function_call"} | named
        content = [] if empty else [self._part(block)]
        if block.kind is Kind.THOUGHT:
            return found | {"type": "reasoning", "summary": [], "content": content}
        return found | {"type": "message", "role": "assistant", "content": content}

    def _part(self, block: Block, *, empty: bool = False) -> Json:
        text = "" if empty else block.text
        if block.kind is Kind.THOUGHT:
            return {"type": "reasoning_text", "text": text}
        part: Json = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return part if empty else part | {"logprobs": self._spoken()}

    def _spoken(self) -> list[Json]:
        """Log-probabilities of the text so far: the tokens behind the thought. Answers with calls
        have none, so there is one text."""
        return self._logprobs[self._parser.n_before :]

    def _response(self, status: str, usage: Usage | None) -> Json:
        body, over = self._body, status in ("completed", "incomplete")
        row = self._blocks.row
        items = [self._item(block, self._item_status(block)) for block in row] if over else []
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None},
            "service_tier": "default",
            "store": False,
            "temperature": self._params.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self._params.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else self._usage(usage),
        } | (self._given() if over else {})

    def _given(self) -> Json:
        """The values of step features, where they gave any."""
        found = {"extra": self._extra, "prompt_extra": self._prompt_extra}
        return {name: values for name, values in found.items() if values}

    def _usage(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": self._parser.n_reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }


def _item_id(block: Block) -> str:
    return _PREFIX[block.kind] + block.id


def _at(block: Block) -> dict[str, Any]:
    return {"item_id": _item_id(block), "output_index": block.index, "content_index": 0}
