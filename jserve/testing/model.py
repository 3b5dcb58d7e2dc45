"""The toy model that ``FakeRunner`` computes, and its reference definition."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from jserve.kv_layout import Reach, Span
from jserve.sampling import MAX_LOGPROBS, SamplingParams
from jserve.types import Request

MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """A 64-bit hash of an integer (the splitmix64 finaliser)."""
    z = (value + _GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def mix_N(value_N: np.ndarray) -> np.ndarray:
    """``mix`` of a uint64 array."""
    z = value_N + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _place(value: int, position: int) -> int:
    """``value`` (a token or ctx) tied to its position."""
    return mix(value ^ mix(position))


def place_at(value_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
    """``_place`` of uint64 arrays."""
    return mix_N(value_N ^ mix_N(position_N.astype(np.uint64)))


def bias_digest(params: SamplingParams) -> int:
    """64 bits that stand for a slot's biases and bad words."""
    parts = (sorted(params.logit_bias.items()), params.bad_token_ids)
    digest = 0
    for i, byte in enumerate(repr(parts).encode()):
        digest = mix(digest ^ (byte << (i % 7)))
    return digest


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """The function that FakeRunner computes: from what is visible to the next token."""

    vocab_size: int
    eos_rate: int = 0
    """One draw in so many is the first stop id of the row; 0 leaves it to chance."""
    window: int = 0
    """Positions that each position sees, its own included; 0 for all."""
    sinks: int = 0
    """First positions that all later ones see beside the window."""
    reaches: tuple[Reach, ...] = ()
    """The groups of layers that see different positions; empty: one group, which sees the window and the sinks."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """Of each group."""
        if not self.reaches:
            return (Span(self.window),)
        return tuple(reach.span for reach in self.reaches for _ in range(reach.n_groups))

    def draw(
        self,
        seen: int,
        position: int,
        seed: int,
        params: SamplingParams,
        stops: Seq[int],
        lock: int,
        mask_W: np.ndarray | None = None,
        redraw: int = -1,
    ) -> int:
        """The token at ``position`` given the hash ``seen`` of all before it; -1: all is forbidden.

        Stop ids are banned below position ``lock``, as on the device; ``mask_W`` holds the bits of
        the allowed tokens, ``redraw`` is as in ``RowPlan``.
        """
        if redraw >= 0 and mask_W is not None:
            token = self.draw(seen, position, seed, params, stops, lock)
            if mask_W[token >> 5] >> (token & 31) & 1:
                return token
            seen, mask_W = mix(seen ^ 3), mask_W.copy()
            mask_W[redraw >> 5] &= ~np.uint32(1 << (redraw & 31)).astype(np.int32)
        if not params.greedy:
            seen = mix(seen ^ mix(seed & MASK) ^ mix(position))
        if mask_W is not None:
            return self._masked(seen, params, stops if position < lock else (), mask_W)
        pool = params.allowed_token_ids
        token = pool[seen % len(pool)] if pool else seen % self.vocab_size
        if self.eos_rate and stops and mix(seen ^ 1) % self.eos_rate == 0:
            token = stops[0]
        if position < lock and len(set(stops)) < self.vocab_size:
            while token in stops:
                token = (token + 1) % self.vocab_size
        return token

    def _masked(
        self, seen: int, params: SamplingParams, banned: Seq[int], mask_W: np.ndarray
    ) -> int:
        bits = np.unpackbits(mask_W.astype("<i4").view(np.uint8), bitorder="little")
        pool = np.flatnonzero(bits[: self.vocab_size])
        pool = pool[~np.isin(pool, banned)]
        if params.allowed_token_ids is not None:
            pool = pool[np.isin(pool, params.allowed_token_ids)]
        return int(pool[seen % len(pool)]) if len(pool) else -1


def stops_of(request: Request) -> tuple[int, ...]:
    """Ids that end its sequences."""
    eos = () if request.params.ignore_eos else request.eos_ids
    return (*eos, *request.params.stop_token_ids)


def sampling_hash(params: SamplingParams, history: int, bias: int) -> int:
    """A hash of counts and biases (``bias_digest``) that is added to a draw; 0 where nothing reads them."""
    biased = params.biased or params.bans_words
    return (mix(history) if params.penalised else 0) ^ (mix(bias) if biased else 0)


def logprob_of(seen: int) -> float:
    """The fake's log-probability of what was drawn: in (-4, 0]."""
    return -(seen % 4096) / 1024


def logprob_at(seen: int, token: int) -> float:
    """The fake's log-probability of ``token`` behind what ``seen`` stands for."""
    return logprob_of(seen ^ mix(token))


def rank_of(seen: int, token: int, vocab: int) -> int:
    """The fake's rank of ``token`` there."""
    return 1 + mix(seen ^ mix(token) ^ 3) % vocab


class Visible:
    """The view of the newest position: of each group of layers two sums, of placed tokens and of placed ctx. All
    before it is visible, or what lies in the group's span, and the sinks."""

    def __init__(self, model: FakeModel) -> None:
        self._groups = [_GroupView(span, model.sinks, i) for i, span in enumerate(model.spans)]

    @property
    def seen(self) -> int:
        return joined([group.seen for group in self._groups])

    def add(self, token: int) -> None:
        """One more token."""
        for group in self._groups:
            group.add(token)


class _GroupView:
    """``Visible`` of one group."""

    def __init__(self, span: Span, sinks: int, number: int) -> None:
        self.span, self.sinks, self.number = span, sinks, number
        self.total = self.seen = 0
        self._low = sinks
        self._placed: list[tuple[int, int]] = []

    def add(self, token: int) -> None:
        at = len(self._placed)
        lowest = int(self.span.lowest(np.int64(at)))
        for token_left, ctx_left in self._placed[self._low : max(self._low, lowest)]:
            self.total, self.seen = self.total - token_left, self.seen - ctx_left
        self._low = max(self._low, lowest)
        placed = _place(token, at)
        self.total = (self.total + placed) & MASK
        ctx = _place(mix(self.total ^ self.number), at)
        self.seen = (self.seen + ctx) & MASK
        self._placed.append((placed, ctx))


def joined(seen: Seq[int]) -> int:
    """One number for what each group of layers sees; of one group, what it sees."""
    *others, found = seen
    for other in reversed(others):
        found = (other + mix(found)) & MASK
    return found


def counted(token: int, drawn: bool) -> int:
    """The number that a token adds to a slot's history, drawn or of the prompt."""
    return mix(mix(token) ^ drawn)


def top_of(seen: int, vocab: int) -> tuple[list[int], list[float]]:
    """The fake's most likely ids and their log-probabilities, best first."""
    ids = [(seen + i) % vocab for i in range(MAX_LOGPROBS)]
    return ids, [logprob_of(seen) - i for i in range(MAX_LOGPROBS)]


def expected(model: FakeModel, request: Request, seed: int, most: int) -> list[int]:
    """The output tokens of ``request`` by the definition, up to ``most`` tokens with the prompt."""
    params, stops = request.params, stops_of(request)
    tokens, n_prompt = list(request.prompt_ids), len(request.prompt_ids)
    visible = Visible(model)
    for token in tokens:
        visible.add(token)
    history = sum(counted(t, False) for t in tokens) & MASK
    while len(tokens) < most:
        salt = sampling_hash(params, history, bias_digest(params))
        lock = n_prompt + params.min_tokens
        seen = mix(visible.seen) ^ salt
        token = model.draw(seen, len(tokens), seed, params, stops, lock)
        history = (history + counted(token, True)) & MASK
        visible.add(token)
        tokens.append(token)
        if token in stops and len(tokens) > lock:
            break
    return tokens[n_prompt:]
