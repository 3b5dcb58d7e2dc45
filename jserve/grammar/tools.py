"""Builds the grammar of tool calls that a model must or may write.

::

    required   begin call (between call)* end
    auto       text | text, then calls as soon as the trigger is written
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from jserve.grammar.spec import embedded
from jserve.sampling import StructuredOutputs

Piece = str | int
"""Text, or the id of a control token."""
NAME = "\0"
"""Stands for the tool's name in a ``CallForm``."""
_STYLE = StructuredOutputs(json_object=True, disable_additional_properties=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """A model's format of calls: pieces around the name (in ``head``) and around the arguments."""

    begin: tuple[Piece, ...] = ()
    head: tuple[Piece, ...]
    tail: tuple[Piece, ...] = ()
    between: tuple[Piece, ...] = ()
    end: tuple[Piece, ...] = ()
    bare: bool = False
    """True where calls begin with ``{`` and nothing announces them."""


def calls_grammar(
    form: CallForm,
    tools: Seq[tuple[str, dict[str, Any]]],
    *,
    many: bool,
    required: bool,
    answer: dict[str, Any] | None = None,
) -> str:
    """Lark for calls of ``tools`` (name and schema of the arguments).

    Args:
        many: more than one call may be made.
        required: there must be a call; else free text may come instead, or before it.
        answer: without ``required``, the schema of an answer instead of free text; not for a
            ``bare`` form, whose calls begin as JSON does.
    """
    first, *rest = (*form.begin, *form.head)
    names = " | ".join(f"call_{i}" for i in range(len(tools)))
    again = f"({_items(form.between)} call)*" if many else ""
    lines = [f"calls: {_items(form.begin)} call {again} {_items(form.end)}", f"call: {names}"]
    for i, (name, schema) in enumerate(tools):
        body = f"args_{i} {_items(form.tail)}"
        lines.append(f"call_{i}: {_items(_named(form.head, name))} {body}")
        lines.append(f"args_{i}: {embedded(schema, _STYLE)}")
    if required:
        lines.append("start: calls")
    elif answer is not None:
        lines += ["start: calls | answer", f"answer: {embedded(answer)}"]
    elif form.bare:
        lines += ["start: calls | TEXT", r"TEXT: /([^{](.|\n)*)?/"]
    else:
        lines += _announced(form, tools, first, rest, again)
    return "\n".join(lines) + "\n"


def _announced(
    form: CallForm,
    tools: Seq[tuple[str, dict[str, Any]]],
    first: Piece,
    rest: list[Piece],
    again: str,
) -> list[str]:
    """Free text until the first piece of a call, which the rest of the call then has to follow."""
    tails = [
        f"({_items(_named(tuple(rest), name))} args_{i} {_items(form.tail)})"
        for i, (name, _) in enumerate(tools)
    ]
    # A control token is no text, so it needs no lazy reading to be found.
    lazy = "" if isinstance(first, int) else "[lazy]"
    return [
        f"start: TEXT | lead ({' | '.join(tails)}) {again} {_items(form.end)}",
        f"lead{lazy}: TEXT {_items((first,))}",
        r"TEXT: /(.|\n)*/",
    ]


def _named(pieces: tuple[Piece, ...], name: str) -> tuple[Piece, ...]:
    quoted = json.dumps(name, ensure_ascii=False)[1:-1]
    return tuple(p.replace(NAME, quoted) if isinstance(p, str) else p for p in pieces)


def _items(pieces: tuple[Piece, ...]) -> str:
    return " ".join(
        f"<[{p}]>" if isinstance(p, int) else json.dumps(p, ensure_ascii=False)
        for p in pieces
        if p != ""
    )
