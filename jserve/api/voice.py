"""One choice's answer as OpenAI shows it: content, reasoning and tool calls, whole or in deltas.

Owns the JSON of messages and deltas, ids of calls and the count of reasoning tokens. Must not know
formats (``speech``) or HTTP.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from typing import Any

from jserve.api.speech import Speech
from jserve.text.parsers.reasoning import State
from jserve.text.parsers.said import CallPiece, Said

Json = dict[str, Any]
_LETTERS = string.ascii_letters + string.digits


class Voice:
    """What one choice says. Feed it either ``delta`` after ``delta``, or one ``message``.

    Args:
        speech: the model's formats.
        state: where the prompt left the thought.
        calls: look for tool calls.
        shows_reasoning: False leaves thoughts out.
    """

    def __init__(
        self, speech: Speech, state: State, *, calls: bool, shows_reasoning: bool = True
    ) -> None:
        self.n_reasoning = 0
        self.n_calls = 0
        self._speech = speech
        self._parser = speech.parser(state, calls=calls)
        self._shows_reasoning = shows_reasoning
        self._counting = state

    def delta(self, text: str, token_ids: Sequence[int], *, last: bool) -> Json:
        """What a stream's next piece adds; {} while nothing is to be seen."""
        said = self._said(text, token_ids, last=last)
        found: Json = {"content": said.content} if said.content else {}
        if said.calls:
            found["tool_calls"] = [self._call_delta(piece) for piece in said.calls]
        return found | self._reasoning(said)

    def message(self, text: str, token_ids: Sequence[int]) -> Json:
        """The whole answer."""
        said = self._said(text, token_ids, last=True)
        calls: list[Json] = []
        for piece in said.calls:
            if piece.name is not None:
                calls.append(self._call(piece.name))
            calls[piece.index]["function"]["arguments"] += piece.arguments
        found: Json = {"role": "assistant", "content": said.content, "refusal": None}
        if calls:
            found |= {"content": said.content or None, "tool_calls": calls}
        return found | self._reasoning(said)

    def finish(self, reason: str | None) -> str | None:
        """OpenAI's word for the end: calls that were complete are named."""
        return "tool_calls" if self.n_calls and reason == "stop" else reason

    def _said(self, text: str, token_ids: Sequence[int], *, last: bool) -> Said:
        said = self._parser.feed(text)
        if last:
            said.add(self._parser.close())
        self.n_calls += sum(piece.name is not None for piece in said.calls)
        self._count(token_ids)
        return said

    def _count(self, token_ids: Sequence[int]) -> None:
        """Tokens of the thought, its tags included."""
        thinking = self._speech.thinking
        if thinking is None:
            return
        for token in token_ids:
            if self._counting is State.LEAD:
                opens = token == thinking.open_id
                self._counting = State.THOUGHT if opens else State.ANSWER
            if self._counting is State.ANSWER:
                return
            self.n_reasoning += 1
            if token == thinking.close_id:
                self._counting = State.ANSWER

    def _reasoning(self, said: Said) -> Json:
        if not said.reasoning or not self._shows_reasoning:
            return {}
        return {"reasoning": said.reasoning, "reasoning_content": said.reasoning}

    def _call_delta(self, piece: CallPiece) -> Json:
        if piece.name is None:
            return {"index": piece.index, "function": {"arguments": piece.arguments}}
        call = self._call(piece.name)
        call["function"]["arguments"] = piece.arguments
        return {"index": piece.index} | call

    def _call(self, name: str) -> Json:
        return {
            "id": self._call_id(),
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }

    def _call_id(self) -> str:
        if self._speech.calls == "mistral":  # its templates take nine letters and digits only
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"
