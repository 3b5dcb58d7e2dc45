"""Reads a batch file as the requests that an engine would get of it, where no server runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jserve.api.batch.lines import Line, read_lines
from jserve.api.openai.caches import HandleBook
from jserve.api.openai.fields import parse_chat, parse_completion
from jserve.api.request.parsed import ModelCard, Served
from jserve.api.request.prepare import Preparer
from jserve.errors import ConfigError, JserveError
from jserve.text.chat.template import ChatTemplate
from jserve.text.tokenizer import TextTokenizer
from jserve.types import Request

PARSERS = {"/v1/chat/completions": parse_chat, "/v1/completions": parse_completion}


async def requests_of(
    path: Path, tokenizer: TextTokenizer, chat: ChatTemplate | None, card: ModelCard
) -> list[Request]:
    """The requests of all lines, in order, known by the names of these; whatever model they ask for.

    Raises:
        ConfigError: the file cannot be read, or a line cannot be asked of this model; ``field`` is ``trace``.
    """
    preparer = Preparer(tokenizer, chat, card, HandleBook())
    served = Served(card=card, template=chat)
    try:
        found: list[Request] = []
        for line in read_lines(path):
            try:
                found += await _of_line(line, preparer, served)
            except JserveError as error:
                why = f"{path} line {line.number}: {error.message}"
                raise ConfigError(why, field="trace") from None
        return found
    finally:
        preparer.close()


async def _of_line(line: Line, preparer: Preparer, served: Served) -> list[Request]:
    """One request for each prompt of a line."""
    if line.error is not None:
        raise line.error
    if line.url not in PARSERS:
        raise ConfigError(f"url must be one of {', '.join(PARSERS)}, not {line.url}", field="url")
    asked = PARSERS[line.url]({**(line.body or {}), "model": served.card.name}, served)
    made = await preparer.requests(asked)
    names = [f"{line.name}-{i}" if len(made) > 1 else str(line.name) for i in range(len(made))]
    return [dataclasses.replace(r, id=n) for r, n in zip(made, names, strict=True)]
