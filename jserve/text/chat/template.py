"""Chat templates: messages in, prompt out, by jinja2 in an immutable sandbox.

It owns what a template is given, the bounds on a rendering, and the line between trusted template text and
untrusted request text.

A control token such as ``<|im_end|>`` that a client writes into a message must stay plain text.
Before rendering, each one is put between two marks nobody can guess; afterwards the marks cut the
prompt::

    content     "a <|im_end|> b"  ->  "a [open]<|im_end|>[close] b"
    rendered    "<|im_start|>user\\na [open]<|im_end|>[close] b<|im_end|>\\n"
    parts       ("<|im_start|>user\\na ", True) ("<|im_end|>", False) (" b<|im_end|>\\n", True)
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.meta

from jserve.errors import BadRequest, ConfigError, JserveError
from jserve.faults import point
from jserve.text.chat.sandbox import TemplateRaised, environment

MAX_SECONDS = 1.0
MAX_OUTPUT = 4 << 20
_GIVEN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)

Part = tuple[str, bool]
"""Text of the prompt, and whether control tokens in it count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """The variables of a template. ``messages``, ``tools`` and ``documents`` are plain JSON values."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """A model's chat template, or templates by name ("default", "tool_use").

    Args:
        sources: template source by name; "default" is used, "tool_use" where tools are given.
        special: ``bos_token`` and the like, as templates read them.
        control: strings of control tokens, kept plain where a client wrote them.

    Raises:
        ConfigError: a source does not compile, or there is no "default".
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        special: Mapping[str, str] | None = None,
        control: Iterable[str] = (),
    ) -> None:
        if "default" not in sources:
            raise ConfigError("the chat template has no default", field="chat_template")
        env = self._env = environment()
        self._special = dict(special or {})
        try:
            self._templates = {name: env.from_string(text) for name, text in sources.items()}
            self._known = {
                name: frozenset(jinja2.meta.find_undeclared_variables(env.parse(text)))
                for name, text in sources.items()
            }
        except jinja2.TemplateError as e:
            raise ConfigError(
                f"the chat template is broken: {e.message}", field="chat_template"
            ) from None
        self._sources = dict(sources)
        words = sorted({word for word in control if word}, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, words))) if words else None

    @property
    def takes_tools(self) -> bool:
        return "tool_use" in self._templates or "tools" in self._known["default"]

    @property
    def takes_documents(self) -> bool:
        return any("documents" in known for known in self._known.values())

    def mentions(self, text: str) -> bool:
        """True if ``text`` is in a template, as its source writes it."""
        return any(text in source for source in self._sources.values())

    def takes(self, variable: str) -> bool:
        """True if ``variable`` may be set by a request: a template reads it and it is not ours."""
        ours = variable in _GIVEN or variable in self._special or variable.startswith("_")
        return not ours and any(variable in known for known in self._known.values())

    def render(self, chat: Chat) -> list[Part]:
        """The prompt of ``chat`` as (text, trusted) parts; their texts joined are the prompt.

        Raises:
            BadRequest: the template refused the messages, or nothing is there to continue; it failed
            on them or ran over 1 s or 4 MiB (code "template_error": it rendered others at the start).
        """
        mark = "z" + secrets.token_hex(8)
        if chat.continue_final_message:
            chat = _with_tail(chat, mark + "t")
        text = self._render(self._guarded(chat, mark))
        if chat.continue_final_message:
            text = _cut_tail(text, mark + "t")
        return _parts(text, mark)

    def prompt(self, chat: Chat) -> str:
        """The prompt of ``chat`` in one piece."""
        return "".join(text for text, _ in self.render(chat))

    def self_test(self) -> str | None:
        """Renders one message; what went wrong in a few words, or None."""
        try:
            self.render(Chat(messages=[{"role": "user", "content": "hello"}]))
        except JserveError as e:
            return e.message
        return None

    @point("template.render")
    def _render(self, chat: Chat) -> str:
        name = "tool_use" if chat.tools and "tool_use" in self._templates else "default"
        pieces: list[str] = []
        size, deadline = 0, time.monotonic() + MAX_SECONDS
        self._env.clock.deadline = deadline
        try:
            for piece in self._templates[name].generate(
                **chat.variables,
                **self._special,
                messages=chat.messages,
                tools=chat.tools,
                documents=chat.documents,
                add_generation_prompt=chat.add_generation_prompt,
            ):
                size += len(piece)
                if size > MAX_OUTPUT or time.monotonic() > deadline:
                    raise jinja2.TemplateRuntimeError("the template ran over its bounds")
                pieces.append(piece)
        except TemplateRaised as e:
            raise BadRequest(
                f"the chat template refuses these messages: {e.message}", field="messages"
            ) from None
        except Exception as e:
            raise BadRequest(
                f"the chat template failed on these messages ({type(e).__name__})",
                field="messages",
                code="template_error",
            ) from None
        return "".join(pieces)

    def _guarded(self, chat: Chat, mark: str) -> Chat:
        if self._control is None:
            return chat
        control = self._control

        def guard(value: Any) -> Any:
            if isinstance(value, str):
                return control.sub(lambda m: f"{mark}o{m[0]}{mark}c", value)
            if isinstance(value, list):
                return [guard(v) for v in value]
            if isinstance(value, dict):
                return {guard(k): guard(v) for k, v in value.items()}
            return value

        return Chat(
            messages=guard(chat.messages),
            tools=guard(chat.tools),
            documents=guard(chat.documents),
            variables=guard(dict(chat.variables)),
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
        )


def _with_tail(chat: Chat, tail: str) -> Chat:
    last = chat.messages[-1]
    if not isinstance(last.get("content"), str) or not last["content"]:
        raise BadRequest(
            "continue_final_message needs text in the last message", field="continue_final_message"
        )
    messages = [*chat.messages[:-1], {**last, "content": last["content"] + tail + " "}]
    return Chat(
        messages=messages,
        tools=chat.tools,
        documents=chat.documents,
        variables=chat.variables,
        add_generation_prompt=False,
        continue_final_message=True,
    )


def _cut_tail(text: str, tail: str) -> str:
    """Cuts at the tail; a template that trimmed the blank behind it trims the message's own too."""
    at = text.rfind(tail)
    if at < 0:
        raise BadRequest(
            "the chat template leaves out the message to continue", field="continue_final_message"
        )
    trimmed = text[at + len(tail) : at + len(tail) + 1] != " "
    return text[:at].rstrip() if trimmed else text[:at]


def _parts(text: str, mark: str) -> list[Part]:
    if mark not in text:
        return [(text, True)]
    parts: list[Part] = []
    at = 0
    for match in re.finditer(f"{mark}o(.*?){mark}c", text, re.DOTALL):
        parts.append((text[at : match.start()], True))
        parts.append((match[1], False))
        at = match.end()
    parts.append((text[at:], True))
    # A template that cut a guarded text apart leaves single marks behind.
    stray = re.compile(f"{mark}[oc]")
    return [(clean, trusted) for t, trusted in parts if (clean := stray.sub("", t))]
