"""Finds and reads a model's chat templates.

It owns the files: ``chat_template.jinja``, ``tokenizer_config.json`` with one template or several named ones,
``chat_template.json``, ``additional_chat_templates``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jserve.errors import ConfigError
from jserve.gguf.header import is_gguf
from jserve.gguf.tokenizer import files as gguf_files
from jserve.text.chat.template import ChatTemplate


def load_chat_template(
    directory: str | Path, *, file: str = "", control: Iterable[str] = ()
) -> ChatTemplate | None:
    """The chat template of a model directory, or of ``file`` when given; None when there is none.

    Args:
        directory: holds ``chat_template.jinja`` or ``tokenizer_config.json``; or a GGUF file.
        file: a jinja2 file to use instead.
        control: strings of the tokenizer's control tokens.

    Raises:
        ConfigError: a template or ``tokenizer_config.json`` is unreadable or broken.
    """
    root = Path(directory)
    at = "tokenizer_config.json"
    config = dict(gguf_files(root)[at]) if is_gguf(root) else _json(root / at)
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
