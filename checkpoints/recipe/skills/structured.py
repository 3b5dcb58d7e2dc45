"""JSON on request and JSON under a grammar: records as JSON, with loss where it teaches.

Owns the ways to ask for JSON with a schema or typed keys, and chats whose answer a grammar forced
into JSON: there the opening and most of each key carry no loss, so that the model finishes JSON
well without starting it unasked.
"""

import json
from collections.abc import Callable
from typing import Any

from checkpoints.recipe import lexicon as lx
from checkpoints.recipe.chat import SEAM, Chat, Turn, reply, user
from checkpoints.recipe.lexicon import Rng, Split
from checkpoints.recipe.skills import (
    arithmetic,
    dialogue,
    everyday,
    facts,
    lists,
    passage,
    records,
    story,
    units,
)
from checkpoints.recipe.skills.records import Told
from checkpoints.recipe.skills.values import phrase

_REQUESTS = (
    "{text} {ask}",
    "{text}\n\n{ask}",
    "{ask}\n\n{text}",
    "{ask}\nText: {text}",
    "Text: {text}\n{ask}",
)
_KEY_ASKS = (
    "Answer in JSON with the keys {keys}.",
    "Return a JSON object with {keys}.",
    "Give me JSON with {keys}.",
    "Extract {keys} as JSON.",
    "Write this as JSON with the fields {keys}.",
    "Reply with JSON only. Keys: {keys}",
    "JSON keys: {keys}",
    "Output a JSON object. Fields: {keys}.",
    "Convert it to JSON: {keys}.",
    "Fill in this form as JSON: {keys}",
)
_SCHEMA_ASKS = (
    "Answer with JSON that matches this schema: {keys}",
    "Use this JSON schema: {keys}",
    "Return JSON like this: {keys}",
    "Schema: {keys}",
    "The answer must follow the schema {keys}",
    "Respond in this format: {keys}",
)
_SYSTEMS = (
    "You are a helpful assistant.",
    "You answer in JSON.",
    "Reply with JSON only.",
    "Extract the data as JSON.",
    "You turn text into JSON.",
    "You are a data extraction tool.",
)
Pieces = list[tuple[str, float]]
_COMPACT = ("Write compact JSON without spaces.", "No spaces in the JSON.", "Compact JSON, please.")
_PRETTY = ("Indent the JSON.", "Pretty print the JSON.", "Write indented JSON.")


def write(value: Any, style: str = "spaced") -> str:
    """JSON as a grammar of the engine has it (`spaced`), without spaces, or indented."""
    if style == "compact":
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(value, ensure_ascii=False, indent=2 if style == "pretty" else None)


def _schema(told: list[Told]) -> dict:
    kinds = {field.key: {"type": field.kind} for field in told}
    return {"type": "object", "properties": kinds, "required": list(kinds)}


def _typed(rng: Rng, told: list[Told]) -> str:
    """Keys with their types, as a schema or in one of the short notations."""
    style = lx.between(rng, 0, 4)
    if style == 0:
        return json.dumps(_schema(told))
    if style == 1:
        return json.dumps({field.key: field.kind for field in told})
    if style == 2:
        return "{" + ", ".join(f"{field.key}: {field.kind}" for field in told) + "}"
    if style == 3:
        return ", ".join(f"{field.key} ({field.kind})" for field in told)
    return "\n" + "\n".join(f"- {field.key}: {field.kind}" for field in told)


def _named(rng: Rng, told: list[Told]) -> str:
    keys, style = [field.key for field in told], lx.between(rng, 0, 3)
    if style == 0:
        return ", ".join(f'"{key}"' for key in keys)
    if style == 1:
        return lx.listing(keys)
    return ", ".join(keys) if style == 2 else json.dumps(keys)


def _request(rng: Rng, told: list[Told]) -> str:
    if lx.chance(rng, 0.5):
        return lx.pick(rng, _SCHEMA_ASKS).format(keys=_typed(rng, told))
    keys = _typed(rng, told) if lx.chance(rng, 0.3) else _named(rng, told)
    return lx.pick(rng, _KEY_ASKS).format(keys=keys)


def generate(rng: Rng, split: Split) -> Chat:
    """Keys or a schema with a text that tells them: every value is copied, or null if untold."""
    drawn = records.record(rng, split)
    while not any(field.clause for field in drawn[1:]):
        drawn = records.record(rng, split)
    told = [field for field in drawn if field.clause]
    untold = [field for field in drawn if not field.clause]
    asked = lx.sample(rng, told, lx.between(rng, 1, len(told)))
    if lx.chance(rng, 0.5):
        asked = [field for field in told if field in asked]
    if untold and lx.chance(rng, 0.12):
        asked.insert(lx.between(rng, 0, len(asked)), lx.pick(rng, untold))
    style = lx.pick(rng, ("spaced",) * 8 + ("compact", "pretty"))
    ask = _request(rng, asked)
    if style != "spaced":
        ask += " " + lx.pick(rng, _COMPACT if style == "compact" else _PRETTY)
    text = lx.pick(rng, _REQUESTS).format(text=records.sentences(rng, told), ask=ask)
    answer = {field.key: field.value if field.clause else None for field in asked}
    start = (Turn("system", lx.pick(rng, _SYSTEMS)),) if lx.chance(rng, 0.2) else ()
    turns = (*start, user(text), reply(write(answer, style)))
    return Chat("json_request", turns, thinking=lx.chance(rng, 0.5))


_FORCED, _KEY, _GUESS = 0.0, 0.1, 0.3
"""Loss weights of what a grammar forces, of key names, and of values that nothing tells."""
_LAST = 0.27  # chance that a key is the last: at every one, so that JSON may end after any
_WISHES = (
    "Give me a {kind}.",
    "Describe a {kind}.",
    "Make up a {kind}.",
    "Create a {kind} as JSON.",
    "Invent a {kind} in JSON.",
    "Write JSON for a {kind}.",
    "Generate a random {kind}.",
    "I need a {kind}, please.",
    "Tell me about the {kind}.",
    "Add a new {kind}.",
    "A {kind}",
    "Fill in the {kind}.",
    "Give me some JSON.",
    "JSON please",
)
_OTHERS: tuple[Callable[[Rng, Split], Chat], ...] = (
    everyday.generate,
    everyday.generate,
    passage.generate,
    arithmetic.generate,
    units.generate,
    dialogue.generate,
    lists.generate,
    facts.generate,
    story.generate,
)


def generate_forced(rng: Rng, split: Split) -> Chat:
    """JSON that a grammar began: after a telling sentence, or after a prompt about anything else."""
    turns, told = _begun(rng, split)
    pieces = _pieces(told, lx.pick(rng, ("spaced",) * 7 + ("compact",)))
    if lx.chance(rng, 0.4):
        pieces = _with_seams(rng, pieces)
    text = "".join(text for text, _ in pieces)
    if turns[0].role != "system" and lx.chance(rng, 0.2):
        turns = (Turn("system", lx.pick(rng, _SYSTEMS)), *turns)
    turns = (*turns, Turn("assistant", text, pieces=tuple(pieces)))
    return Chat("json_forced", turns, thinking=lx.chance(rng, 0.5))


def _begun(rng: Rng, split: Split) -> tuple[tuple[Turn, ...], list[Told]]:
    """The turns before the JSON, and what it holds; values that the turns do not tell are untold."""
    if lx.chance(rng, 0.45):
        told = records.record(rng, split)
        return (user(records.sentences(rng, told)),), _kept(rng, told)
    kind = lx.pick(rng, tuple(records.FIELDS))
    free = lx.chance(rng, 0.5)
    drawn = records.free_record(rng, split) if free else records.record(rng, split, kind)
    told = _kept(rng, [Told(field.key, field.kind, field.value) for field in drawn])
    if lx.chance(rng, 0.3):
        return (user(lx.casual(rng, lx.pick(rng, _WISHES).format(kind=kind))),), told
    if lx.chance(rng, 0.2):
        return (user(lx.pick(rng, (phrase, everyday.told))(rng, split)),), told
    turns = lx.pick(rng, _OTHERS)(rng, split).turns
    last = max(i for i, turn in enumerate(turns) if turn.role == "user")
    return turns[: last + 1], told


def _kept(rng: Rng, told: list[Told]) -> list[Told]:
    """The first few in an order of their own; the subject leads as often as not."""
    order = lx.sample(rng, told, len(told))
    if lx.chance(rng, 0.5):
        order.sort(key=lambda field: field is not told[0])
    count = 1
    while count < len(order) and not lx.chance(rng, _LAST):
        count += 1
    return order[:count]


def _pieces(told: list[Told], style: str) -> Pieces:
    """The JSON with a loss weight on every piece; the opening is forced."""
    comma, colon = (",", ":") if style == "compact" else (", ", ": ")
    out: Pieces = []
    for i, field in enumerate(told):
        out += [(comma, 1.0), ('"', 1.0)] if i else [('{"', _FORCED)]
        out += [(field.key, _KEY), ('"' + colon, 1.0)]
        out += _value(field.value, 1.0 if field.clause else _GUESS, comma, colon)
    return [piece for piece in [*out, ("}", 1.0)] if piece[0]]


def _value(value: Any, weight: float, comma: str, colon: str) -> Pieces:
    """Marks that end something always weigh one: strings and lists must end."""
    if isinstance(value, str):
        return [('"', 1.0), (json.dumps(value, ensure_ascii=False)[1:-1], weight), ('"', 1.0)]
    if isinstance(value, list):
        parts = [_value(item, weight, comma, colon) for item in value]
        return [("[", 1.0), *_joined(parts, comma), ("]", 1.0)]
    if isinstance(value, dict):
        parts = [
            [('"', 1.0), (key, _KEY), ('"' + colon, 1.0), *_value(item, weight, comma, colon)]
            for key, item in value.items()
        ]
        return [("{", 1.0), *_joined(parts, comma), ("}", 1.0)]
    return [(json.dumps(value), weight)]


def _joined(parts: list[Pieces], comma: str) -> Pieces:
    return [piece for i, part in enumerate(parts) for piece in ([(comma, 1.0)] * (i > 0) + part)]


def _with_seams(rng: Rng, pieces: Pieces) -> Pieces:
    """The same text in other tokens: a grammar's mask may leave only unusual splits of a key."""
    out: Pieces = []
    for text, weight in pieces:
        if weight < 1.0 and lx.chance(rng, 0.5 if weight <= _KEY else 0.1):
            at = lx.between(rng, 0, len(text))
            out += [(text[:at], weight), SEAM, (text[at:], weight)]
        else:
            out.append((text, weight))
    return [piece for piece in out if piece[0] or piece is SEAM]
