"""Chat templates: messages in, prompt out, by jinja2 in an immutable sandbox.

Owns loading (``chat_template.jinja``, or ``tokenizer_config.json`` with one template or several
named ones), the environment templates expect of Hugging Face, the bounds on a rendering, and the
line between trusted template text and untrusted request text. Must not know HTTP, request fields or
the tokenizer.

A control token such as ``<|im_end|>`` that a client writes into a message must stay plain text.
Before rendering, each one is put between two marks nobody can guess; afterwards the marks cut the
prompt::

    content     "a <|im_end|> b"  ->  "a [open]<|im_end|>[close] b"
    rendered    "<|im_start|>user\\na [open]<|im_end|>[close] b<|im_end|>\\n"
    parts       ("<|im_start|>user\\na ", True) ("<|im_end|>", False) (" b<|im_end|>\\n", True)
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jserve.errors import BadRequest, ConfigError, JserveError
from jserve.faults import point

MAX_SECONDS = 1.0
MAX_OUTPUT = 4 << 20
_GIVEN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)

Part = tuple[str, bool]
"""Text of the prompt, and whether control tokens in it count."""


class _TemplateRaised(jinja2.TemplateError):
    """The template called ``raise_exception``: the messages are at fault."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` blocks mark assistant text for training; here they only render."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's class attribute

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with a clock: every call a template makes looks at its thread's deadline."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.clock = threading.local()

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if time.monotonic() > getattr(self.clock, "deadline", float("inf")):
            raise jinja2.TemplateRuntimeError("the template took too long")
        return super().call(context, obj, *args, **kwargs)


def _raise(message: str) -> None:
    raise _TemplateRaised(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> _Sandbox:
    env = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What a template is given. ``messages``, ``tools`` and ``documents`` are plain JSON values."""

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
        env = self._env = _environment()
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

    def knows_role(self, role: str) -> bool:
        """Whether the templates mention a role by name."""
        return self.mentions(role)

    def mentions(self, text: str) -> bool:
        """Whether ``text`` stands in a template, as its source writes it."""
        return any(text in source for source in self._sources.values())

    def takes(self, variable: str) -> bool:
        """Whether ``variable`` may be set by a request: a template reads it and it is not ours."""
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
        except _TemplateRaised as e:
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


def load_chat_template(
    directory: str | Path, *, file: str = "", control: Iterable[str] = ()
) -> ChatTemplate | None:
    """The chat template of a model directory, or of ``file`` when given; None when there is none.

    Args:
        directory: holds ``chat_template.jinja`` or ``tokenizer_config.json``.
        file: a jinja2 file to use instead.
        control: strings of the tokenizer's control tokens.

    Raises:
        ConfigError: a template or ``tokenizer_config.json`` is unreadable or broken.
    """
    root = Path(directory)
    config = _json(root / "tokenizer_config.json")
    sources = _sources(root, config) if not file else {"default": _read(Path(file))}
    if not sources:
        return None
    return ChatTemplate(sources, special=_special(config), control=control)


def _sources(root: Path, config: dict[str, Any]) -> dict[str, str]:
    value: Any = config.get("chat_template") or _json(root / "chat_template.json").get(
        "chat_template"
    )
    if (root / "chat_template.jinja").is_file():
        value = _read(root / "chat_template.jinja")
    if isinstance(value, str):
        found = {"default": value}
    elif isinstance(value, list):
        found = {str(t["name"]): str(t["template"]) for t in value if isinstance(t, dict)}
    else:
        found = {}
    more = sorted((root / "additional_chat_templates").glob("*.jinja"))
    return found | {path.stem: _read(path) for path in more}


def _special(config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path))
    except ValueError as e:
        raise ConfigError(f"{path.name} is not valid JSON: {e}", field=path.name) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path.name} must hold a JSON object", field=path.name)
    return value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"{path.name} cannot be read: {e}", field=path.name) from None
