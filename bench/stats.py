"""What a list of timed requests amounts to: percentiles, summaries, ratios of pairs.

It owns the definition of every number in the reports.

One request, seen from the client (times are seconds on one monotonic clock)::

    sent        text[0]      text[1]  text[2]            text[-1]   ended
     |-- TTFT ----|-- gap ------|-- gap -|------ ... --------|---------|
                  |------------------- decode ---------------|
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class Trace:
    """What the client saw of one request."""

    sent: float
    ended: float = 0.0
    text: list[float] = field(default_factory=list)
    """Arrival time of every chunk that carried text."""
    wanted: int = 0
    """``max_tokens`` of the request; end-of-sequence is ignored, so this many must come."""
    prompt_tokens: int = 0
    usage: int | None = None
    """``completion_tokens`` the server claims."""
    finish: str | None = None
    error: str | None = None
    late: bool = False
    """The request that arrives amid the others in S4."""

    @property
    def tokens(self) -> int:
        """Tokens believed: the server's count where the chunks allow it, else the chunks seen.

        A chunk may carry several tokens, but never less than one, and no more than ``wanted`` were
        asked for.
        """
        believable = self.usage is not None and len(self.text) <= self.usage <= self.wanted
        return self.usage or 0 if believable else len(self.text)

    @property
    def gaps(self) -> list[float]:
        """Seconds between one text chunk and the next."""
        return [b - a for a, b in itertools.pairwise(self.text)]

    @property
    def complaint(self) -> str | None:
        """Why this request does not count as served, or None."""
        if self.error:
            return self.error
        if not self.text:
            return "no text"
        if self.finish is None:
            return "no finish_reason"
        if self.usage is None:
            return "no usage"
        if self.usage != self.wanted:
            return f"usage {self.usage} of {self.wanted} tokens"
        if len(self.text) > self.usage:
            return f"{len(self.text)} chunks but usage {self.usage}"
        return None


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-th percentile (0..100), linear between the closest ranks.

    Raises:
        ValueError: no values, or ``q`` outside 0..100.
    """
    if not values or not 0 <= q <= 100:
        raise ValueError(f"percentile {q} of {len(values)} values")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """p50, p95, p99 and max in milliseconds; None for no values."""
    if not seconds:
        return None
    points = {f"p{q}": percentile(seconds, q) for q in (50, 95, 99)} | {"max": max(seconds)}
    return {name: round(value * 1e3, 3) for name, value in points.items()}


def summarise(traces: Sequence[Trace]) -> dict[str, Any]:
    """Latency, throughput and honesty of one workload; failed requests count only as errors."""
    served = [t for t in traces if not t.complaint]
    bad = [t.complaint for t in traces if t.complaint]
    out: dict[str, Any] = {
        "requests": len(traces),
        "errors": len(bad),
        "first_errors": list(dict.fromkeys(bad))[:3],
    }
    if not served:
        return out
    begin = min(t.sent for t in traces)
    wall = max(t.ended for t in served) - begin
    tokens = sum(t.tokens for t in served)
    chunks = sum(len(t.text) for t in served)
    return out | {
        "wall_s": round(wall, 4),
        "prompt_tokens": sum(t.prompt_tokens for t in served),
        "output_tokens": tokens,
        "tokens_per_chunk": round(tokens / chunks, 3),
        "output_tok_s": round(tokens / wall, 3),
        "decode_tok_s_p50": _decode_rate(served),
        "ttft_ms": spread([t.text[0] - t.sent for t in served]),
        "itl_ms": spread([g for t in served for g in t.gaps]),
        "latency_ms": spread([t.ended - t.sent for t in served]),
    }


def _decode_rate(served: Sequence[Trace]) -> float | None:
    """Median over requests of tokens per second after the first."""
    rates = [(t.tokens - 1) / (t.text[-1] - t.text[0]) for t in served if t.text[-1] > t.text[0]]
    return round(statistics.median(rates), 3) if rates else None


def waves(traces: Sequence[Trace], width: int) -> dict[str, float | None]:
    """Median TTFT (ms) of the first ``width`` requests, with nothing cached, and of the rest."""
    served = [t for t in sorted(traces, key=lambda t: t.sent) if not t.complaint]
    first, rest = served[:width], served[width:]
    return {
        "ttft_first_wave_ms": _median_ttft(first),
        "ttft_steady_ms": _median_ttft(rest),
    }


def _median_ttft(traces: Sequence[Trace]) -> float | None:
    if not traces:
        return None
    return round(statistics.median(t.text[0] - t.sent for t in traces) * 1e3, 3)


def intrusion(traces: Sequence[Trace]) -> dict[str, Any]:
    """What the late request of S4 did to the others while its prompt was read.

    A gap counts when it overlaps the time from the late request's sending to its first text.
    ``finished_early`` decoders had no text after that time, so they were not disturbed for all of
    it.
    """
    late = [t for t in traces if t.late and not t.complaint]
    others = [t for t in traces if not t.late and not t.complaint]
    if not late or not others:
        return {}
    begin, end = late[0].sent, late[0].text[0]
    during = [b - a for t in others for a, b in itertools.pairwise(t.text) if b > begin and a < end]
    return {
        "long_ttft_ms": round((end - begin) * 1e3, 3),
        "itl_during_ms": spread(during),
        "longest_gap_ms": round(max(during) * 1e3, 3) if during else None,
        "finished_early": sum(t.text[-1] < end for t in others),
    }


def pair_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float] | None:
    """Median, least and most of ours / theirs, round by round; None without a usable pair."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if a and b]
    if not ratios:
        return None
    return {
        "median": round(statistics.median(ratios), 4),
        "min": round(min(ratios), 4),
        "max": round(max(ratios), 4),
        "pairs": len(ratios),
    }
