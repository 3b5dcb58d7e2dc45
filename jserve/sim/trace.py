"""Traces as JSON lines: requests with prompts as pieces of numbered token streams.

A stream is an endless text that nobody else says: token 0 and 1 spell its number, the rest is noise.
Two prompts share a prefix exactly as far as their pieces are the same, and a next turn contains the
last answer by naming its stream, so a request is a hundred bytes however long its prompt is::

    {"format": "jserve-trace-1", "about": "..."}
    {"id": "a", "at": 0.5, "prompt": [[7, 0, 400], [9, 0, 60]], "outputs": [[[10, 0, 85]]]}
    {"id": "b", "at": 4.0, "after": "a", "prompt": [[7, 0, 400], [9, 0, 60], [10, 0, 84], [11, 0, 30]], ...}
                                          '-- stream, first token, tokens

The last token of an answer is never computed, hence the 84.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from jserve.errors import ConfigError
from jserve.request_options import Lane, Retention
from jserve.sampling import SamplingParams
from jserve.types import Request

FORMAT = "jserve-trace-1"
VOCAB = 1 << 17
EOS = VOCAB - 1
STREAM_TOKENS = 1 << 17
"""Tokens that one stream has."""
OVERRUN = 4
"""Tokens after the end that rows planned too early may still draw."""
_OFFSETS = 1 << 16
_ODD = 0x9E3779B1

PromptPiece = tuple[int, int, int]
"""(stream, first token, tokens)."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    about: str = ""


class TraceItem(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One request of a trace."""

    id: str
    at: float
    """Seconds on the trace's own clock; with ``after``, since that request's end."""
    prompt: tuple[PromptPiece, ...]
    outputs: tuple[tuple[PromptPiece, ...], ...]
    """Pieces of each choice: what the model will say, unless ``max_tokens`` cuts it."""
    max_tokens: int | None = None
    """The ``max_tokens`` of the client; None: it gives none. Below a choice's tokens it cuts the choice."""
    after: str = ""
    """Id of the request whose answer this one follows; never sent if that one fails."""
    cancels: tuple[tuple[float, int | None], ...] = ()
    """(seconds after its arrival, choice or None for all) at which the client hangs up."""
    lane: Lane = Lane.STANDARD
    tenant: str = ""
    priority: int = 0
    ttft_deadline_ms: float | None = None
    tpot_deadline_ms: float | None = None
    deadline_ms: float | None = None
    cache_salt: str = ""
    session: str | None = None
    retain: tuple[Retention, ...] = ()
    skip_prefix_cache: bool = False
    scored: bool = False
    """The prompt's log-probabilities are wanted, so nothing of it comes from the cache."""
    loaded: bool = False
    """The parameters need a ``SlotLoad``."""
    vocab_row: bool = False
    """They need a vocab row, too."""

    @property
    def n_prompt(self) -> int:
        return sum(piece[2] for piece in self.prompt)


class Streams:
    """Token ids of streams."""

    def __init__(self) -> None:
        rng = np.random.default_rng(20)
        self._noise: list[int] = rng.integers(0, EOS, _OFFSETS + STREAM_TOKENS).tolist()

    def tokens(self, stream: int, start: int, count: int) -> list[int]:
        """Tokens ``start .. start + count`` of a stream: a slice of the noise behind its number."""
        at = (stream * _ODD) % _OFFSETS + start
        found = self._noise[at : at + count]
        for i, digit in enumerate((stream % EOS, stream // EOS)):
            if start <= i < start + count:
                found[i - start] = digit
        return found

    def text(self, pieces: tuple[PromptPiece, ...]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            ids += self.tokens(*piece)
        return ids

    def answer(self, item: TraceItem, index: int) -> list[int]:
        """The tokens that choice ``index`` draws, EOS at its end (and after it) where ``max_tokens`` allows."""
        ids = self.text(item.outputs[index])
        if item.max_tokens is None or len(ids) < item.max_tokens:
            ids[-1] = EOS
        return ids + [EOS] * OVERRUN


def request_of(item: TraceItem, streams: Streams, arrival: float) -> Request:
    """The request as the scheduler sees it."""
    return Request(
        id=item.id,
        prompt_ids=tuple(streams.text(item.prompt)),
        params=_params(item),
        eos_ids=(EOS,),
        arrival=arrival,
        priority=item.priority,
        lane=item.lane,
        tenant=item.tenant,
        ttft_deadline_ms=item.ttft_deadline_ms,
        tpot_deadline_ms=item.tpot_deadline_ms,
        deadline_ms=item.deadline_ms,
        cache_salt=item.cache_salt,
        session=item.session,
        retain=item.retain,
        skip_prefix_cache=item.skip_prefix_cache,
    )


def _params(item: TraceItem) -> SamplingParams:
    kind = item.scored, item.loaded, item.vocab_row
    return _params_of(item.max_tokens, len(item.outputs), *kind)


@lru_cache(maxsize=4096)
def _params_of(
    max_tokens: int | None, n: int, scored: bool, loaded: bool, vocab_row: bool
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        n=n,
        temperature=0.0,
        prompt_logprobs=0 if scored else None,
        logit_bias={0: 1.0} if vocab_row else {},
        bad_token_ids=((0, 0),) if loaded and not vocab_row else (),
    )


def write(path: Path, items: Iterable[TraceItem], about: str = "") -> int:
    """Write a trace; gives how many requests it holds.

    Raises:
        ConfigError: the file cannot be written.
    """
    encode, n = msgspec.json.Encoder().encode, 0
    try:
        with path.open("wb") as file:
            file.write(encode(Header(FORMAT, about)) + b"\n")
            for item in items:
                file.write(encode(item) + b"\n")
                n += 1
    except OSError as e:
        raise ConfigError(f"trace {path}: {e.strerror}", field="trace") from None
    return n


def read(path: Path) -> list[TraceItem]:
    """The requests of a trace file, checked.

    Raises:
        ConfigError: the file cannot be read or a line is no request; names the line.
    """
    try:
        with path.open("rb") as file:
            items = list(_lines(path, file))
    except OSError as e:
        raise ConfigError(f"trace {path}: {e.strerror}", field="trace") from None
    check(items, str(path))
    return items


def _lines(path: Path, file: Iterable[bytes]) -> Iterator[TraceItem]:
    header, item = msgspec.json.Decoder(Header), msgspec.json.Decoder(TraceItem)
    for number, line in enumerate(file, 1):
        try:
            if number > 1:
                yield item.decode(line)
            elif header.decode(line).format != FORMAT:
                raise ConfigError(f"trace {path}: not of format {FORMAT}", field="trace")
        except msgspec.DecodeError as e:
            raise ConfigError(f"trace {path} line {number}: {e}", field="trace") from None


def check(items: list[TraceItem], name: str) -> None:
    """Checks what the types of the fields cannot express.

    Raises:
        ConfigError: names the first request that makes no sense, and why.
    """
    seen: set[str] = set()
    for item in items:
        fault = _fault(item, seen)
        if fault:
            raise ConfigError(f"trace {name}: request {item.id[:64]!r} {fault}", field="trace")
        seen.add(item.id)


def _fault(item: TraceItem, seen: set[str]) -> str | None:
    spans = [*item.prompt, *(piece for output in item.outputs for piece in output)]
    if item.id in seen:
        return "comes twice"
    if item.after and item.after not in seen:
        return f"follows {item.after[:64]!r}, which does not come before it"
    if not item.prompt or not item.outputs or not all(item.outputs):
        return "has no prompt or no output"
    if any(s < 0 or at < 0 or n < 1 or at + n > STREAM_TOKENS for s, at, n in spans):
        return f"has a piece outside a stream's {STREAM_TOKENS} tokens"
    if item.at < 0 or any(seconds < 0 for seconds, _ in item.cancels):
        return "has a negative time"
    return None
