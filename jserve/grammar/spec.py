"""Translates a client's structure (schema, regex, choice, grammar, tags) into one llguidance grammar.

It owns the bounds on what is looked at at all and the style in which JSON is written.

JSON is written as ``json.dumps`` writes it, with one blank after commas and colons and none
elsewhere: the style models saw, and no white space without end.
"""

from __future__ import annotations

import json
from typing import Any

import orjson
from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from jserve.errors import BadRequest, InvalidSchema
from jserve.sampling import StructuredOutputs

MAX_BYTES = 64 << 10
MAX_DEPTH = 64
MAX_NODES = 20_000
MAX_CHOICES = 4096
MAX_TAGS = 128
FIELD = "structured_outputs"


def lowered(spec: StructuredOutputs) -> str:
    """The llguidance grammar of ``spec``.

    Raises:
        BadRequest: too large (code "grammar_too_large") or not readable; ``field`` names the part.
    """
    (kind,) = spec.given
    value = getattr(spec, kind)
    match kind:
        case "json":
            return _json(parsed(value, "json"), spec)
        case "json_object":
            return _json({"type": "object"}, spec)
        case "regex":
            return LLMatcher.grammar_from_regex(unanchored(_text(value, "regex")))
        case "choice":
            return LLMatcher.grammar_from_lark(_choice(value))
        case "grammar":
            return LLMatcher.grammar_from_lark(lark_of(_text(value, "grammar")))
        case _:
            return _tags(parsed(value, "structural_tag"), spec)


def bounded(spec: StructuredOutputs) -> None:
    """Look at size and depth only, in time linear in the bounds. BadRequest as ``lowered``."""
    for name in ("json", "structural_tag"):
        if getattr(spec, name) is not None:
            parsed(getattr(spec, name), name)
    for name in ("regex", "grammar", "whitespace_pattern"):
        if getattr(spec, name) is not None:
            _text(getattr(spec, name), name)
    if spec.choice is not None:
        _choice(spec.choice)


def parsed(value: Any, name: str) -> dict[str, Any]:
    """A JSON object that may come as text, inside the bounds.

    Raises:
        BadRequest: not JSON, no object, or too large.
    """
    if isinstance(value, str):
        try:
            value = orjson.loads(_text(value, name))
        except orjson.JSONDecodeError:
            raise bad(name, "is not valid JSON") from None
    if not isinstance(value, dict):
        raise bad(name, "must be an object")
    _bounded(value, name)
    if len(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)) > MAX_BYTES:
        raise _too_large(name, f"is longer than {MAX_BYTES} bytes")
    return value


def json_options(spec: StructuredOutputs) -> dict[str, Any]:
    """llguidance's options for writing JSON as ``spec`` wants it.

    They go over those in a schema's own ``x-guidance``, which could ask not to be enforced.
    """
    strict = {"lenient": False, "coerce_one_of": False}
    if spec.whitespace_pattern is not None:
        pattern = _text(spec.whitespace_pattern, "whitespace_pattern")
        if LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern)):
            raise bad("whitespace_pattern", "is no regular expression that can be followed")
        return {**strict, "whitespace_flexible": True, "whitespace_pattern": pattern}
    gap = "" if spec.disable_any_whitespace else " "
    return {
        **strict,
        "whitespace_flexible": False,
        "item_separator": f",{gap}",
        "key_separator": f":{gap}",
    }


def embedded(schema: dict[str, Any], spec: StructuredOutputs | None = None) -> str:
    """``%json`` and the schema, as an item of a Lark rule."""
    spec = spec or StructuredOutputs(json_object=True)
    if spec.disable_additional_properties:
        schema = _closed(schema)
    return "%json " + json.dumps({**schema, "x-guidance": json_options(spec)})


def _json(schema: dict[str, Any], spec: StructuredOutputs) -> str:
    if spec.disable_additional_properties:
        schema = _closed(schema)
    text = orjson.dumps(schema).decode()
    return LLMatcher.grammar_from_json_schema(text, overrides=json_options(spec))  # type: ignore[arg-type]


def _closed(value: Any) -> Any:
    """The schema with every object of named properties closed to others."""
    if isinstance(value, list):
        return [_closed(v) for v in value]
    if not isinstance(value, dict):
        return value
    found = {k: v if k in ("enum", "const") else _closed(v) for k, v in value.items()}
    if isinstance(found.get("properties"), dict) and "additionalProperties" not in found:
        found["additionalProperties"] = False
    return found


def unanchored(regex: str) -> str:
    """``regex`` without ``^`` and ``$`` around it: it is matched as a whole anyway."""
    ends = regex.endswith("$") and not regex.endswith("\\$")
    return regex.removeprefix("^")[: -1 if ends else None]


def _choice(words: tuple[str, ...]) -> str:
    if len(words) > MAX_CHOICES or sum(map(len, words)) > MAX_BYTES:
        raise _too_large("choice", f"holds more than {MAX_CHOICES} texts or {MAX_BYTES} characters")
    return "start: " + " | ".join(json.dumps(word, ensure_ascii=False) for word in words)


def lark_of(text: str) -> str:
    """Lark for a grammar in Lark or GBNF. Raises BadRequest where it is neither."""
    try:
        return any_to_lark(text)
    except RecursionError:
        raise _too_large("grammar", "is nested too deep") from None
    except Exception as error:  # the converter's own errors, and whatever a broken text makes of it
        raise bad("grammar", f"is no GBNF: {str(error)[:120]}") from None


def _tags(value: dict[str, Any], spec: StructuredOutputs) -> str:
    if "format" in value:
        from jserve.grammar.tags import format_grammar

        return LLMatcher.grammar_from_lark(format_grammar(value, spec))
    structures, triggers = value.get("structures"), value.get("triggers")
    if structures is None:
        raise bad("structural_tag", "needs format, or structures and triggers")
    if not isinstance(structures, list) or not 0 < len(structures) <= MAX_TAGS:
        raise bad("structural_tag", f"needs structures, a list of 1 to {MAX_TAGS}")
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise bad("structural_tag", "needs triggers, a list of non-empty strings")
    tags = [_tag(item, triggers, spec) for item in structures]
    return StructTag.to_grammar(tags, assume_special=False)


def _tag(item: Any, triggers: list[str], spec: StructuredOutputs) -> StructTag:
    if not isinstance(item, dict) or not isinstance(item.get("begin"), str):
        raise bad("structural_tag", "structures must be objects with begin, schema and end")
    begin, end, schema = item["begin"], item.get("end", ""), item.get("schema", {})
    schema = _closed(schema) if spec.disable_additional_properties else schema
    if not isinstance(end, str) or not isinstance(schema, dict):
        raise bad("structural_tag", "structures need a schema object and an end text")
    trigger = next((t for t in triggers if begin.startswith(t)), None)
    if trigger is None:
        raise bad("structural_tag", "every begin must start with one of the triggers")
    grammar = {**schema, "x-guidance": json_options(spec)}
    return StructTag(trigger=trigger, begin=begin, grammar=grammar, end=end)


def _text(value: str, name: str) -> str:
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise bad(name, "is not valid Unicode text") from None
    if size > MAX_BYTES:
        raise _too_large(name, f"is longer than {MAX_BYTES} bytes")
    return value


def _bounded(value: Any, name: str) -> None:
    """Depth and size of a JSON value, without recursion."""
    n_nodes, level, depth = 0, [value], 0
    while level:
        depth += 1
        n_nodes += len(level)
        if depth > MAX_DEPTH:
            raise _too_large(name, f"is nested deeper than {MAX_DEPTH}")
        if n_nodes > MAX_NODES:
            raise _too_large(name, f"has more than {MAX_NODES} values")
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, list):
                below += item
        level = below


def bad(name: str, what: str) -> BadRequest:
    """The error that the member ``name`` of a structure is wrong."""
    return InvalidSchema(f"{FIELD}.{name} {what}", field=f"{FIELD}.{name}")


def _too_large(name: str, what: str) -> BadRequest:
    return BadRequest(f"{FIELD}.{name} {what}", field=f"{FIELD}.{name}", code="grammar_too_large")
