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
from jserve.text.chat.parsers.calls import CallParser
from jserve.text.chat.parsers.delta import ParsedDelta
from jserve.text.chat.parsers.harmony import HarmonyParser
from jserve.text.chat.parsers.marked import CohereCalls
from jserve.text.chat.parsers.reasoning import State, ThoughtParser
from jserve.text.chat.parsers.table import CALL_PARSERS
from jserve.text.chat.template import ChatTemplate
from jserve.text.tokenizer import TextTokenizer

TAIL = 24
"""Prompt tokens that decide whether it ends inside a thought."""
_TAGS = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "exaone_deep": ("<thought>", "</thought>"),
    "cohere_command": ("<|START_THINKING|>", "<|END_THINKING|>"),
}
_HARMONY = "openai_gptoss"
_SHOWN = {
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    "phi4_mini_json": ("<|tool_call|>", "<|/tool_call|>"),
    "glm4": ("<|assistant|>",),
    "cohere_command": ("<|START_ACTION|>", "<|START_RESPONSE|>"),
    "llama4_pythonic": ("<|python_start|>", "<|python_end|>"),
    "openai": ("<|channel|>", "<|message|>"),
}
"""Control tokens that a parser of calls has to see."""
_FRAMED = ("openai", "cohere_command")
"""Formats that put the answer, too, between control tokens."""
_SIGNS = (
    ("<|channel|>", "openai"),
    ("<|START_ACTION|>", "cohere_command"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<arg_key>", "none"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "llama4_pythonic"),
    ("functools", "phi4_mini_json"),
    ("<|tool_call|>", "phi4_mini_json"),
    ("<|tool|>", "phi4_mini_json"),
    ("<|observation|>", "glm4"),
)
"""Text of a chat template -> the parser of its calls; the first one that is there counts."""


class AnswerParser:
    """Text in, ``ParsedDelta`` out; any cut of a text gives the same pieces, concatenated.

    Args:
        thought: None where all text is the answer, or its parser finds thoughts itself.
        calls: reads the answer.
    """

    def __init__(self, thought: ThoughtParser | None, calls: CallParser) -> None:
        self._thought, self._calls = thought, calls

    @property
    def thinking(self) -> bool:
        """True while the text so far ends inside a thought."""
        if isinstance(self._calls, HarmonyParser):
            return self._calls.thinking
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
        parsed.reasoning = reasoning + parsed.reasoning
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
    channels: bool = False
    """Thoughts are messages of the harmony format, so they have no tags."""

    @property
    def thinks(self) -> bool:
        """True where thoughts are told from answers."""
        return self.tags is not None or self.channels

    @property
    def framed(self) -> bool:
        """True where control tokens are around every answer, which the text must then show."""
        return self.calls in _FRAMED

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
        return AnswerParser(thought, self._call_parser(calls=calls))

    def _call_parser(self, *, calls: bool) -> CallParser:
        if self.calls == "openai":
            return HarmonyParser(calls=calls, thoughts=self.channels)
        if self.calls == "cohere_command":
            return CohereCalls(calls=calls)
        return CALL_PARSERS[self.calls if calls else "none"]()


PLAIN = Speech()


def speech_of(
    options: ModelOptions, template: ChatTemplate | None, tokenizer: TextTokenizer
) -> Speech:
    """The formats that ``options`` name, or those that template and vocabulary show.

    Raises:
        ConfigError: the reasoning parser named needs tags that are no tokens of this model.
    """
    name, thoughts = options.tool_call_parser, options.reasoning_parser
    calls = _calls(template) if name == "auto" else name
    if thoughts == _HARMONY and calls != "openai":
        why = f"reasoning_parser {thoughts} goes with tool_call_parser openai only"
        raise ConfigError(why, field="reasoning_parser")
    tags = None if calls == "openai" else _tags(thoughts, tokenizer)
    return Speech(
        calls=calls,
        form=_form(calls, tokenizer),
        keeps_special=_keeps_special(calls, tags, tokenizer),
        tags=tags,
        thinking=None if tags is None else _thinking(tags, tokenizer),
        channels=calls == "openai" and thoughts in ("auto", _HARMONY),
    )


def _calls(template: ChatTemplate | None) -> str:
    if template is None:
        return "none"
    found = next((name for sign, name in _SIGNS if template.mentions(sign)), "")
    if found == "deepseek_v3" and not template.mentions("```json"):
        return "deepseek_v31"
    if found:
        return found
    if template.mentions("<start_of_turn>") and template.takes_tools:
        return "gemma3"
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
    ids = {tokenizer.token_id(mark) for mark in (*_SHOWN.get(calls, ()), *(tags or ()))}
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
    if calls == "deepseek_v3":
        sep, call = mark("<｜tool▁sep｜>"), mark("<｜tool▁call▁begin｜>")
        return CallForm(
            begin=(mark("<｜tool▁calls▁begin｜>"),),
            head=(call, "function", sep, f"{NAME}\n```json\n"),
            tail=("\n```", mark("<｜tool▁call▁end｜>")),
            between=("\n",),
            end=(mark("<｜tool▁calls▁end｜>"),),
        )
    if calls == "deepseek_v31":
        return CallForm(
            begin=(mark("<｜tool▁calls▁begin｜>"),),
            head=(mark("<｜tool▁call▁begin｜>"), NAME, mark("<｜tool▁sep｜>")),
            tail=(mark("<｜tool▁call▁end｜>"),),
            end=(mark("<｜tool▁calls▁end｜>"),),
        )
    if calls == "phi4_mini_json":
        begin = ("functools[",)
        return CallForm(begin=begin, head=(named,), tail=("}",), between=(", ",), end=("]",))
    if calls == "cohere_command":
        head = (f'{{"tool_call_id": "0", "tool_name": "{NAME}", "parameters": ',)
        begin, end = (mark("<|START_ACTION|>"), "["), ("]", mark("<|END_ACTION|>"))
        return CallForm(begin=begin, head=head, tail=("}",), between=(", ",), end=end)
    if calls in ("pythonic", "llama4_pythonic", "gemma3"):
        # A grammar of arguments is one of JSON, which these parsers read too.
        head = (named.replace("arguments", "parameters"),)
        return CallForm(head=head, tail=("}",), between=("; ",), bare=True)
    return None
