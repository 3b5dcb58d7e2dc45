"""``ParsedRequest``: a validated request of any dialect, before tokenisation.

It owns the hand-over from a dialect (``openai``, ``responses``, ``anthropic``) to ``prepare``, and the facts about
the served model both need.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jserve.api.request.formats import FREE, AnswerFormat
from jserve.api.request.naming import E, renamed
from jserve.errors import JserveError
from jserve.request_options import RequestOptions
from jserve.sampling import SamplingParams
from jserve.text.chat.speech import PLAIN, Speech
from jserve.text.chat.template import Chat, ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The facts of the served model that the HTTP side needs."""

    name: str
    max_model_len: int
    """Tokens of prompt and output together."""
    vocab_size: int
    eos_ids: tuple[int, ...] = ()
    aliases: tuple[str, ...] = ()
    """More names a request may use."""
    defaults: Mapping[str, float | int] = field(default_factory=dict)
    """Sampling values of generation_config.json, used where a request sets none."""
    version: str = ""
    fingerprint: str = ""
    """Hash of model and config, sent as ``system_fingerprint``."""
    scores_prompts: bool = True
    """True where the engine can give log-probabilities of prompt tokens."""
    taps: tuple[str, ...] = ()
    """Names of step features that give activations, which this server keeps to itself."""
    masks: bool = True
    """True where the engine can enforce a structure."""
    speech: Speech = PLAIN
    """The model's formats of thoughts and tool calls."""
    created: int = field(default_factory=lambda: int(time.time()))

    def knows(self, name: str) -> bool:
        return name == self.name or name in self.aliases


THOUGHT_NAMES = ("reasoning", "reasoning_content")
"""The names that clients read: the first is vLLM's, the second DeepSeek's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model and server facts that a dialect reads a request against."""

    card: ModelCard
    template: ChatTemplate | None = None
    """None: the model takes no chats."""
    strict: bool = False
    """True where fields that have no effect are refused."""
    thought_names: tuple[str, ...] = THOUGHT_NAMES
    """Names of a thought in a chat completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request as its dialect read it: ``chat`` or ``prompts`` (each text or token ids), and how to answer.

    ``holder`` names the request field that held them, for errors found later.
    """

    body: Any
    """The dialect's own fields, for its answer."""
    params: SamplingParams
    stream: bool = False
    ignored: tuple[str, ...] = ()
    """Names of the fields that had no effect."""
    chat: Chat | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    holder: str = "prompt"
    length_field: str = "max_tokens"
    add_special_tokens: bool = True
    truncate: int | None = None
    """Keep this many prompt tokens; -1 keeps what fits the context."""
    truncate_left: bool = True
    options: RequestOptions = field(default_factory=RequestOptions)
    """The tenant is filled in by the route."""
    shape: AnswerFormat = FREE
    """The answer's structure, with the request field that asked for it."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The client's names of other fields, where it has its own."""

    def of(self, tenant: str) -> ParsedRequest:
        """The same, asked by ``tenant`` (the digest of its key)."""
        return replace(self, options=replace(self.options, tenant=tenant))

    def named(self, error: E) -> E:
        """``error`` of whoever works on this ask further down, in the client's words."""
        holds = {"prompt": self.holder, "messages": self.holder, "max_tokens": self.length_field}
        custom = getattr(self.body, "custom_params", None) or {}
        xargs = {
            f"extra_args.{name}": f"{'custom_params' if name in custom else 'vllm_xargs'}.{name}"
            for name in self.params.extra_args
        }
        return renamed(error, {**holds, **xargs, **self.shape.names, **self.names})

    @contextlib.contextmanager
    def words(self) -> Iterator[None]:
        """An error that leaves this block does so in the client's words."""
        try:
            yield
        except JserveError as e:
            raise self.named(e) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one HTTP request: prompts once, outputs of all choices."""

    prompt: int
    completion: int
    cached: int
    reasoning: int | None = None
    """Output tokens of thoughts; None where the model has none."""
    drafted: int = 0
    """Drafts that were tried, of whatever became of them."""
    accepted: int = 0
    """Of these, drafts that are part of the output."""
