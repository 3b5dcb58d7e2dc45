"""The sandboxed jinja2 environment of Hugging Face chat templates, with a time limit.

It owns the extensions, filters and functions a template may use, and what stops one that does not end.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRaised(jinja2.TemplateError):
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


class Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with a clock: every call a template makes looks at its thread's deadline."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.clock = threading.local()

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if time.monotonic() > getattr(self.clock, "deadline", float("inf")):
            raise jinja2.TemplateRuntimeError("the template took too long")
        return super().call(context, obj, *args, **kwargs)


def _raise(message: str) -> None:
    raise TemplateRaised(str(message))


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


def environment() -> Sandbox:
    env = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env
