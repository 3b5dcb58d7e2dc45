"""The reply interface of all dialects, and ``gathered``: the pieces of a choice put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jserve.api.reply.generate import Counts, Json, TextPiece
from jserve.api.request.parsed import Usage
from jserve.errors import JserveError
from jserve.types import TokenLogprob


class Reply(Protocol):
    """A dialect's way to answer one HTTP request. ``usage`` counts so far; it costs a walk over
    the choices."""

    done: str | None
    """The data of the last event of a stream that ended well."""
    named: bool
    """True where its events have names: their ``type``."""

    def chunks(self, piece: TextPiece, usage: Counts) -> Iterator[Json]:
        """The events of one piece."""
        ...

    def last(self, usage: Usage) -> Iterator[Json]:
        """The events after all pieces."""
        ...

    def whole(self, pieces: Sequence[TextPiece], usage: Usage) -> Json:
        """The answer without a stream."""
        ...

    def failed(self, error: JserveError) -> Iterator[Json]:
        """The events of a stream that ends in error."""
        ...


@dataclass(slots=True, kw_only=True)
class Whole:
    """The pieces of one choice, put together."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    extra: dict[str, list[Any]] = field(default_factory=dict)
    prompt_extra: dict[str, tuple[Any, ...]] | None = None
    seed: int | None = None
    finish: str | None = None
    stop_reason: int | str | None = None
    prompt: int = 0
    weight_versions: list[Json] = field(default_factory=list)
    """The weights that drew ``token_ids``, one span after the other."""

    def add(self, piece: TextPiece) -> None:
        self.text.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs or ())
        for name, values in (piece.extra or {}).items():
            self.extra.setdefault(name, []).extend(values)
        self.prompt = piece.prompt
        for span in piece.weight_versions:
            if self.weight_versions and self.weight_versions[-1]["version"] == span["version"]:
                self.weight_versions[-1]["end"] = span["end"]
            else:
                self.weight_versions.append(span)
        if piece.first:
            self.seed, self.prompt_logprobs = piece.seed, piece.prompt_logprobs
            self.prompt_extra = piece.prompt_extra
        if piece.finish is not None:
            self.finish, self.stop_reason = piece.finish.value, piece.stop_reason


def gathered(pieces: Sequence[TextPiece]) -> list[tuple[int, Whole]]:
    """(choice number, everything it got), in order of number."""
    found: dict[int, Whole] = {}
    for piece in pieces:
        found.setdefault(piece.choice, Whole()).add(piece)
    return sorted(found.items())
