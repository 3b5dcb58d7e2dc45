"""The texts and questions that a model is judged on, and those that calibrate it.

It owns the files: one JSON object a line, or plain text. What ships comes from the recipe of the shipped model
(``checkpoints/recipe/texts.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jserve.build import TextSide
from jserve.config import ModelOptions
from jserve.errors import BadRequest, ConfigError
from jserve.prompts import Prompts
from jserve.text.chat.speech import speech_of

PIECE = 512
"""Tokens of a piece of plain text."""
LARGEST_FILE = 1 << 28
KEYS = ("text", "prompt", "messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt and the one right answer; ``answer`` empty: any JSON object will do."""

    kind: str
    """needle, json, or the name of a skill."""
    prompt_ids: tuple[int, ...]
    answer: str = ""


@dataclass(slots=True)
class Texts:
    """Token ids of the texts that are scored, and the questions."""

    name: str
    scored: list[tuple[int, ...]] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)


def shipped(name: str) -> Path:
    """A file that comes with jserve. Raises ConfigError: this installation has none."""
    root = Path(__file__).parents[1]
    for directory in (root / "shipped/texts", root.parent / "checkpoints/texts"):
        if (directory / name).is_file():
            return directory / name
    raise ConfigError(f"this installation has no {name}; name a file", field="text")


def held_out(side: TextSide, file: Path | None, *, questions: bool) -> Texts:
    """All that a model is judged on: the texts of ``file`` (None: those that ship), and the shipped questions that the
    model's tokenizer and chat template can put."""
    own = shipped("held_out.jsonl")
    found = Texts(name=(file or own).name)
    found.scored = token_texts(side, file or own)
    if questions:
        found.questions = [q for line in _objects(own) if (q := _question(side, line))]
    return found


def token_texts(side: TextSide, file: Path) -> list[tuple[int, ...]]:
    """Token ids of the texts of a file: lines with ``text``, ``prompt`` or ``messages``, or pieces of plain text.

    Raises:
        ConfigError: it cannot be read, or a line is none of these; ``field`` is the file.
    """
    if file.suffix != ".jsonl":
        ids = side.tokenizer.encode(_read(file), add_special_tokens=False)
        found = [tuple(ids[i : i + PIECE]) for i in range(0, len(ids), PIECE)]
    else:
        lines = (line for line in _objects(file) if line.get("kind", "text") == "text")
        found = [_ids(side, file, line) for line in lines]
    found = [ids for ids in found if len(ids) > 1]
    if not found:
        raise ConfigError(f"{file}: has no text", field=str(file))
    return found


def _ids(side: TextSide, file: Path, line: Mapping[str, Any]) -> tuple[int, ...]:
    for key in ("text", "prompt"):
        if isinstance(line.get(key), str):
            return tuple(side.tokenizer.encode(line[key], add_special_tokens=False))
    if isinstance(line.get("messages"), list):
        return _dialogue(side, line["messages"])
    raise ConfigError(f"{file}: a line has none of {', '.join(KEYS)}", field=str(file))


def _dialogue(side: TextSide, messages: list[Any]) -> tuple[int, ...]:
    """Token ids up to the next answer. Raises ConfigError: the template does not take the messages."""
    speech = speech_of(ModelOptions(), side.chat, side.tokenizer)
    prompts = Prompts(side.tokenizer, side.chat, side.eos_ids, speech)
    try:
        found: Any = prompts.dialogue(messages, {})
        return tuple(found["prompt_token_ids"])
    except BadRequest as error:
        raise ConfigError(error.message, field=error.field) from None


def _question(side: TextSide, line: Mapping[str, Any]) -> Question | None:
    if line.get("kind") == "skill":
        ids = side.tokenizer.encode(line["prompt"], add_special_tokens=False)
        return Question(kind=line["skill"], prompt_ids=tuple(ids), answer=line["answer"])
    if line.get("kind") in ("needle", "json") and side.chat is not None:
        ids = _dialogue(side, line["messages"])
        return Question(kind=line["kind"], prompt_ids=ids, answer=line.get("answer", ""))
    return None


def _objects(file: Path) -> Iterator[dict[str, Any]]:
    for i, text in enumerate(_read(file).splitlines(), 1):
        try:
            line = json.loads(text) if text.strip() else None
        except (ValueError, RecursionError):
            line = 0
        if line is not None and not isinstance(line, dict):
            raise ConfigError(f"{file}: line {i} is no JSON object", field=str(file))
        if line is not None:
            yield line


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > LARGEST_FILE:
            raise ConfigError(f"{file}: is too large", field=str(file))
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}", field=str(file)) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: is not UTF-8", field=str(file)) from None
