"""Parses one choice's text into reasoning, content and tool calls, and counts its tokens.

It owns the parser of each choice, ids of calls, the count of reasoning tokens and what calls make of the end.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from jserve.api.request.parsed import ParsedRequest, Served
from jserve.text.chat.parsers.delta import ParsedDelta
from jserve.text.chat.parsers.reasoning import State
from jserve.text.chat.speech import Speech
from jserve.text.tokenizer import TextTokenizer
from jserve.types import Request

_LETTERS = string.ascii_letters + string.digits


class ChoiceParser:
    """Parses one choice incrementally. Any split of its text into pieces gives the same result.

    Args:
        speech: the model's formats.
        tokenizer: the model's.
        state: where the prompt left the thought.
        calls: look for tool calls.
    """

    def __init__(
        self, speech: Speech, tokenizer: TextTokenizer, state: State, *, calls: bool
    ) -> None:
        self.n_reasoning = 0
        """Tokens between the tags of the thought."""
        self.n_before = 0
        """Tokens in front of the answer: the thought, its tags, white space before it."""
        self.n_calls = 0
        self._speech = speech
        self._parser = speech.parser(state, calls=calls)
        self._tokenizer = tokenizer
        self._counting, self._n_lead = state, 0

    def feed(self, text: str, token_ids: Sequence[int], *, last: bool) -> ParsedDelta:
        """Parse the next piece; after the ``last`` one there is none."""
        parsed = self._parser.feed(text)
        if last:
            parsed.add(self._parser.close())
        self.n_calls += sum(piece.name is not None for piece in parsed.calls)
        self._count(token_ids)
        return parsed

    def finish(self, reason: str | None) -> str | None:
        """OpenAI's finish reason: ``tool_calls`` where complete calls were parsed."""
        return "tool_calls" if self.n_calls and reason == "stop" else reason

    def call_id(self) -> str:
        """A fresh id of a call, as the model's templates take it back."""
        if self._speech.calls == "mistral":  # nine letters and digits only
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def _count(self, token_ids: Sequence[int]) -> None:
        """Count the tokens of the thought, and those in front of the answer."""
        thinking = self._speech.thinking
        if thinking is None:
            return
        for token in token_ids:
            if self._counting is State.LEAD:
                self._look(token, thinking.open_id)
                continue
            if self._counting is State.ANSWER:
                return
            self.n_before += 1
            if token == thinking.close_id:
                self._counting = State.ANSWER
            else:
                self.n_reasoning += 1

    def _look(self, token: int, open_id: int) -> None:
        """The thought begins with its tag; until then there may be white space."""
        self._n_lead += 1
        if token == open_id:
            self._counting, self.n_before = State.THOUGHT, self._n_lead
        elif not self._tokenizer.token_text(token).isspace():
            self._counting = State.ANSWER


def choice_parsers(
    ask: ParsedRequest, served: Served, tokenizer: TextTokenizer, requests: Sequence[Request]
) -> list[ChoiceParser]:
    """One for every choice of every request."""
    speech, calls = served.card.speech, ask.shape.calls
    return [
        ChoiceParser(speech, tokenizer, speech.state(request.prompt_ids, tokenizer), calls=calls)
        for request in requests
        for _ in range(request.params.n)
    ]
