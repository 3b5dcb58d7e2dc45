"""The traffic of the benchmarks: seeded lists of token-id requests, the same for every engine.

It owns what is sent and when. Token ids rather than text, so that no tokenizer stands between two engines that are
compared.

============  ==============================================================  =============
name          what                                                            how sent
============  ==============================================================  =============
S1            4 requests, 128 in / 128 out: batch-1 latency                   1 at a time
S2            48 requests, log-normal, mean 256 in / 64 out: chat mix         16 at a time
S3            32 requests: one 1500-token prefix + 60 own tokens, 64 out      8 at a time
S4            8 decoders, 64 in / 384 out; a 4096-token prompt arrives        all at once
              when each of them has 8 tokens                                  + 1 late
S5@R          24 requests, log-normal, mean 128 in / 32 out                   Poisson, R/s
chat@C        3 C requests (8 or more) of the chat mix: one point of a sweep  C at a time
IN/OUT@C      2 C requests (C or more) of IN tokens in, OUT out: 1000/1000@64 C at a time
============  ==============================================================  =============

Counts are those of ``scale`` 1; a smaller scale sends fewer requests of the same kind. Lengths
never scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

LOW_ID, HIGH_ID = 259, 32000
"""Half-open range of ids drawn for prompts: the words of the dummy models' tokenizer."""
STREAMS = {"S1": 1, "S2": 2, "S3": 3, "S4": 4, "S5": 5, "chat": 6, "warmup": 7, "fixed": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One request: ``max_tokens`` greedy tokens after ``prompt``, end-of-sequence ignored."""

    prompt: tuple[int, ...]
    max_tokens: int
    at: float = 0.0
    """Seconds after the start at which it is sent, for an open loop."""
    after_tokens: int = 0
    """Send only when every item without this mark has received that many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Items in sending order. ``concurrency`` 0 is an open loop: each item at its own time."""

    name: str
    items: tuple[Item, ...]
    concurrency: int

    @property
    def prompt_tokens(self) -> int:
        return sum(len(item.prompt) for item in self.items)

    @property
    def output_tokens(self) -> int:
        return sum(item.max_tokens for item in self.items)


def make(
    name: str,
    *,
    seed: int = 0,
    scale: float = 1.0,
    low: int = LOW_ID,
    high: int = HIGH_ID,
) -> Workload:
    """The workload called ``name`` (S1 .. S4, ``S5@RATE``, ``chat@CONCURRENCY``,
    ``IN/OUT@CONCURRENCY``, ``warmup``).

    The same arguments give the same items on every machine. Two workloads of one seed share no
    prompt, so one cannot warm the prefix cache for another.

    Raises:
        ValueError: an unknown name, or a bad number after ``@``.
    """
    kind, _, number = name.partition("@")
    lengths = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", kind)
    kind = "fixed" if lengths else kind
    known = kind in STREAMS and (kind != "fixed" or lengths)
    if not known or (kind in {"S5", "chat", "fixed"}) != bool(number):
        names = "S1 S2 S3 S4 S5@RATE chat@CONCURRENCY IN/OUT@CONCURRENCY"
        raise ValueError(f"unknown workload {name!r}; one of {names}")
    try:
        rate = float(number or 0)
    except ValueError:
        raise ValueError(f"workload {name!r}: {number!r} is not a number") from None
    if not math.isfinite(rate) or (number and rate <= 0):
        raise ValueError(f"workload {name!r}: {number} must be above 0")
    milli = round(rate * 1000)
    own = tuple(map(int, lengths.groups())) if lengths else ()
    draw = Draw(np.random.default_rng((seed, STREAMS[kind], milli, *own)), low, high)
    return Workload(name=name, **_BUILDERS[kind](draw, scale, rate, *own))


class Draw:
    """Seeded prompts and lengths."""

    def __init__(self, rng: np.random.Generator, low: int, high: int) -> None:
        if not 0 <= low < high:
            raise ValueError(f"token ids: [{low}, {high}) is empty")
        self.rng, self.low, self.high = rng, low, high

    def prompt(self, n: int) -> tuple[int, ...]:
        """``n`` ids, uniform over the range."""
        return tuple(self.rng.integers(self.low, self.high, n).tolist())

    def length(self, mean: float, sigma: float, low: int, high: int) -> int:
        """A log-normal length with this mean before it is clipped to [low, high]."""
        value = self.rng.lognormal(math.log(mean) - sigma**2 / 2, sigma)
        return int(min(max(round(value), low), high))

    def chat(self, mean_in: float = 256, mean_out: float = 64) -> Item:
        n = self.length(mean_in, 0.7, 16, 2048)
        return Item(prompt=self.prompt(n), max_tokens=self.length(mean_out, 0.5, 8, 256))

    def poisson(self, rate: float, n: int) -> Iterator[float]:
        """Arrival times of ``n`` requests at ``rate`` per second; the first at 0."""
        yield 0.0
        yield from np.cumsum(self.rng.exponential(1 / rate, n - 1)).tolist()


def _count(n: int, scale: float, least: int = 1) -> int:
    return max(least, round(n * scale))


def _latency(draw: Draw, scale: float, _: float) -> dict:
    items = [Item(prompt=draw.prompt(128), max_tokens=128) for _ in range(_count(4, scale))]
    return {"items": tuple(items), "concurrency": 1}


def _chat(draw: Draw, scale: float, _: float) -> dict:
    return {"items": tuple(draw.chat() for _ in range(_count(48, scale, 16))), "concurrency": 16}


def _prefix(draw: Draw, scale: float, _: float) -> dict:
    shared = draw.prompt(1500)
    n = _count(32, scale, 16)
    items = [Item(prompt=shared + draw.prompt(60), max_tokens=64) for _ in range(n)]
    return {"items": tuple(items), "concurrency": 8}


def _intruder(draw: Draw, _: float, __: float) -> dict:
    items = [Item(prompt=draw.prompt(64), max_tokens=384) for _ in range(8)]
    items.append(Item(prompt=draw.prompt(4096), max_tokens=16, after_tokens=8))
    return {"items": tuple(items), "concurrency": 0}


def _poisson(draw: Draw, scale: float, rate: float) -> dict:
    items = []
    for at in draw.poisson(rate, _count(24, scale, 8)):
        n_in, n_out = draw.length(128, 0.7, 16, 1024), draw.length(32, 0.5, 4, 128)
        items.append(Item(prompt=draw.prompt(n_in), max_tokens=n_out, at=at))
    return {"items": tuple(items), "concurrency": 0}


def _sweep(draw: Draw, scale: float, concurrency: float) -> dict:
    width = max(1, int(concurrency))
    n = max(_count(3 * width, scale), width, 8)
    return {"items": tuple(draw.chat() for _ in range(n)), "concurrency": width}


def _fixed(draw: Draw, scale: float, concurrency: float, n_in: int, n_out: int) -> dict:
    width = max(1, int(concurrency))
    n = _count(2 * width, scale, width)
    items = tuple(Item(prompt=draw.prompt(n_in), max_tokens=n_out) for _ in range(n))
    return {"items": items, "concurrency": width}


def _warmup(draw: Draw, _: float, __: float) -> dict:
    items = [Item(prompt=draw.prompt(n), max_tokens=8) for n in (32, 700, 200, 100, 50, 25)]
    return {"items": tuple(items), "concurrency": 4}


_BUILDERS: dict[str, Callable[..., dict]] = {
    "S1": _latency,
    "S2": _chat,
    "S3": _prefix,
    "S4": _intruder,
    "S5": _poisson,
    "chat": _sweep,
    "warmup": _warmup,
    "fixed": _fixed,
}
