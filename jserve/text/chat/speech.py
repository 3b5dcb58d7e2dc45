"""The model's output formats, reasoning tags and tool call syntax, and the parser of an answer in them.

It owns the table of formats and how one is recognised, by the chat template and the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jserve.config import ModelOptions
from jserve.errors import ConfigError
from jserve.grammar.tools import NAME, CallForm, Piece
from jserve.sampling import Thinking
from jserve.text.chat.parsers.calls import CALL_PARSERS, CallParser
from jserve.text.chat.parsers.delta import ParsedDelta
from jserve.text.chat.parsers.reasoning import State, ThoughtParser
from jserve.text.chat.template import ChatTemplate
from jserve.text.tokenizer import TextTokenizer

TAIL = 24
"""Prompt tokens that decide whether it ends inside a thought."""
_TAGS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}


class AnswerParser:
    """Text in, ``ParsedDelta`` out; any cut of a text gives the same pieces, concatenated.

    Args:
        thought: None where all text is the answer.
        calls: reads the answer.
    """

    def __init__(self, thought: ThoughtParser | None, calls: CallParser) -> None:
        self._thought, self._calls = thought, calls

    @property
    def thinking(self) -> bool:
        """True while the text so far ends inside a thought."""
        return self._thought is not None and self._thought.state is State.THOUGHT

    def feed(self, text: str) -> ParsedDelta:
        if self._thought is None:
            return self._calls.feed(text)
        return self._both(*self._thought.feed(text))

    def close(self) -> ParsedDelta:
        """Parses the text that was held back, at the end."""
        parsed = self._both(*self._thought.close()) if self._thought is not None else ParsedDelta()
        parsed.add(self._calls.close())
        return parsed

    def _both(self, reasoning: str, answer: str) -> ParsedDelta:
        parsed = self._calls.feed(answer) if answer else ParsedDelta()
        parsed.reasoning = reasoning
        return parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """The formats of one model. The default is a model with plain text only."""

    calls: str = "none"
    """Name in ``CALL_PARSERS``."""
    form: CallForm | None = None
    """The format of calls; None with ``calls`` "none"."""
    keeps_special: bool = False
    """True where calls are marked by control tokens, which the text must then show."""
    tags: tuple[str, str] | None = None
    """The opening and the closing tag of a thought."""
    thinking: Thinking | None = None
    """Their ids, where ``tags`` are."""

    def state(self, prompt_ids: Sequence[int], tokenizer: TextTokenizer) -> State:
        """The parser state at which an answer to this prompt begins."""
        if self.tags is None:
            return State.ANSWER
        tail = tokenizer.decode(prompt_ids[-TAIL:], skip_special_tokens=False).rstrip()
        if tail.endswith(self.tags[1]):
            return State.ANSWER
        return State.THOUGHT if tail.endswith(self.tags[0]) else State.LEAD

    def thinking_after(
        self, prompt_ids: Sequence[int], tokenizer: TextTokenizer
    ) -> Thinking | None:
        """For the engine: the thought that may follow this prompt."""
        state = self.state(prompt_ids, tokenizer)
        if self.thinking is None or state is State.ANSWER:
            return None
        return replace(self.thinking, inside=state is State.THOUGHT)

    def parser(self, state: State, *, calls: bool) -> AnswerParser:
        """A fresh parser of one answer. ``calls``: look for tool calls."""
        thought = None
        if self.tags is not None and state is not State.ANSWER:
            thought = ThoughtParser(*self.tags, state)
        return AnswerParser(thought, CALL_PARSERS[self.calls if calls else "none"]())


PLAIN = Speech()


def speech_of(
    options: ModelOptions, template: ChatTemplate | None, tokenizer: TextTokenizer
) -> Speech:
    """The formats that ``options`` name, or those that template and vocabulary show.

    Raises:
        ConfigError: the reasoning parser named needs tags that are no tokens of this model.
    """
    name = options.tool_call_parser
    calls = _calls(template) if name == "auto" else name
    tags = _tags(options.reasoning_parser, tokenizer)
    return Speech(
        calls=calls,
        form=_form(calls, tokenizer),
        keeps_special=_keeps_special(calls, tags, tokenizer),
        tags=tags,
        thinking=None if tags is None else _thinking(tags, tokenizer),
    )


def _calls(template: ChatTemplate | None) -> str:
    if template is None:
        return "none"
    if template.mentions("<tool_call>"):
        return "hermes"
    if template.mentions("[TOOL_CALLS]"):
        return "mistral"
    return "llama3" if template.mentions('"parameters": ') else "none"


def _tags(name: str, tokenizer: TextTokenizer) -> tuple[str, str] | None:
    if name == "none":
        return None
    for kind in _TAGS if name == "auto" else (name,):
        if all(tokenizer.token_id(tag) is not None for tag in _TAGS[kind]):
            return _TAGS[kind]
    if name != "auto":
        words = " and ".join(_TAGS[name])
        raise ConfigError(
            f"reasoning_parser {name}: {words} are no tokens of this model",
            field="reasoning_parser",
        )
    return None


def _thinking(tags: tuple[str, str], tokenizer: TextTokenizer) -> Thinking:
    open_id, close_id = (tokenizer.token_id(tag) for tag in tags)
    assert open_id is not None
    assert close_id is not None
    lead = tokenizer.encode("\n", add_special_tokens=False)
    gap = tokenizer.encode("\n\n", add_special_tokens=False)
    return Thinking(
        open_id=open_id, close_id=close_id, end_ids=(*lead, close_id, *gap), gap_ids=tuple(gap)
    )


def _keeps_special(calls: str, tags: tuple[str, str] | None, tokenizer: TextTokenizer) -> bool:
    marks = {"llama3": ("<|python_tag|>",), "mistral": ("[TOOL_CALLS]", "[ARGS]")}.get(calls, ())
    ids = {tokenizer.token_id(mark) for mark in (*marks, *(tags or ()))}
    return not ids.isdisjoint(tokenizer.special_ids)


def _form(calls: str, tokenizer: TextTokenizer) -> CallForm | None:
    def mark(word: str) -> Piece:
        found = tokenizer.token_id(word)
        return found if found is not None and found in tokenizer.special_ids else word

    named = f'{{"name": "{NAME}", "arguments": '
    if calls == "hermes":
        head = (mark("<tool_call>"), f"\n{named}")
        tail = ("}\n", mark("</tool_call>"))
        return CallForm(head=head, tail=tail, between=("\n",))
    if calls == "llama3":
        head = (named.replace("arguments", "parameters"),)
        return CallForm(head=head, tail=("}",), between=("; ",), bare=True)
    if calls == "mistral" and tokenizer.token_id("[ARGS]") is not None:
        return CallForm(head=(mark("[TOOL_CALLS]"), NAME, mark("[ARGS]")))
    if calls == "mistral":
        begin = (mark("[TOOL_CALLS]"), "[")
        return CallForm(begin=begin, head=(named,), tail=("}",), between=(", ",), end=("]",))
    return None
