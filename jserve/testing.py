"""Fakes that keep the contract: a runner whose tokens betray every wrong page, a byte tokenizer.

Owns ``FakeRunner`` and ``ByteTokenizer``, for our tests and for users who test without a model.
Must not import jax.

``FakeRunner`` keeps its own memory of what each page holds and knows a row's past only through the
plan's page table, as a device would. Per position it stores the token and a hash of all that was
visible when it was computed (as KV depends on the whole prefix)::

    sum_p = sum over i <= p of  mix(token_i, i)       read from the tokens that the table points at
    ctx_p = mix(sum_p)                                stored beside the token
    draw  = mix(sum over i <= p of  mix(ctx_i, i))    read from the ctx that the table points at

so a page that is stale, shared too early, freed too early, or off by one changes the next token.
Reading a position that was never written, writing scratch, or two rows writing one position raises
``AssertionError``. ``FakeRunner.expected`` computes the same function from a plain list of tokens,
without pages or batches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from jserve.errors import BadRequest
from jserve.ports import InFlight, RunnerLimits
from jserve.types import (
    MAX_LOGPROBS,
    PromptLogprobs,
    Request,
    RowPlan,
    SamplingParams,
    SlotLoad,
    StepPlan,
    StepResult,
)

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """A 64-bit hash of an integer (the splitmix64 finaliser)."""
    z = (value + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _mix_N(value_N: np.ndarray) -> np.ndarray:
    """``mix`` of a uint64 array."""
    z = value_N + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _place(value: int, position: int) -> int:
    """``value`` (a token or ctx) tied to its position."""
    return mix(value ^ mix(position))


def _place_N(value_N: np.ndarray, start: int = 0) -> np.ndarray:
    index_N = np.arange(start, start + len(value_N), dtype=np.uint64)
    return _mix_N(value_N ^ _mix_N(index_N))


def _bias_digest(params: SamplingParams) -> int:
    parts = (sorted(params.logit_bias.items()), params.bad_token_ids)
    digest = 0
    for i, byte in enumerate(repr(parts).encode()):
        digest = mix(digest ^ (byte << (i % 7)))
    return digest


@dataclass(slots=True)
class _Slot:
    """What the device keeps per slot."""

    length: int = 0
    last: int = -1
    history: int = 0
    """Sum of hashes of the tokens seen, prompt and output apart: stands for the penalty counts."""
    bias: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """The function that FakeRunner computes: from what is visible to the next token."""

    vocab_size: int
    eos_rate: int = 0
    """One draw in so many is the first stop id of the row; 0 leaves it to chance."""

    def draw(
        self,
        seen: int,
        position: int,
        seed: int,
        params: SamplingParams,
        stops: Seq[int],
        lock: int,
    ) -> int:
        """The token at ``position`` given the hash ``seen`` of all before it.

        Stop ids are banned below position ``lock``, as on the device.
        """
        if not params.greedy:
            seen = mix(seen ^ mix(seed & _MASK) ^ mix(position))
        pool = params.allowed_token_ids
        token = pool[seen % len(pool)] if pool else seen % self.vocab_size
        if self.eos_rate and stops and mix(seen ^ 1) % self.eos_rate == 0:
            token = stops[0]
        if position < lock and len(set(stops)) < self.vocab_size:
            while token in stops:
                token = (token + 1) % self.vocab_size
        return token


def _stops(request: Request) -> tuple[int, ...]:
    eos = () if request.params.ignore_eos else request.eos_ids
    return (*eos, *request.params.stop_token_ids)


def _sampling_hash(params: SamplingParams, history: int, bias: int) -> int:
    return (mix(history) if params.penalised else 0) ^ (mix(bias) if params.biased else 0)


def _logprob(seen: int) -> float:
    return -(seen % 4096) / 1024


class FakeRunner:
    """``ports.Runner`` in numpy. A program runs at its launch; ``collect`` hands out its result.

    ``nan`` names (request id, index) pairs whose next emitting row gives logits that are not
    finite; ``fail_next`` makes the next ``collect`` raise; ``step_s`` is how long a step takes from
    its launch.
    """

    def __init__(self, limits: RunnerLimits, *, eos_rate: int = 0, step_s: float = 0.0) -> None:
        self.model = FakeModel(vocab_size=limits.vocab_size, eos_rate=eos_rate)
        self.step_s = step_s
        self.nan: set[tuple[str, int]] = set()
        self.fail_next: Exception | None = None
        self.n_launched = self.n_collected = 0
        self._limits = limits
        P, Z = limits.n_pages, limits.page_size
        self.token_PZ = np.full((P, Z), -1, np.int64)
        self.ctx_PZ = np.zeros((P, Z), np.uint64)
        self.step_P = np.full(P, -1, np.int64)
        """The step that wrote each page last."""
        self._slots = [_Slot() for _ in range(limits.n_slots)]

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    def launch(self, plan: StepPlan) -> InFlight:
        self._check(plan)
        for load in plan.loads:
            self._load(load)
        result = self._run(plan)
        self.n_launched += 1
        return InFlight(plan=plan, launched=time.monotonic(), handle=(self.n_launched, result))

    def collect(self, flight: InFlight) -> StepResult:
        number, result = flight.handle
        assert number == self.n_collected + 1, "steps must be collected in launch order"
        self.n_collected = number
        if self.step_s:
            time.sleep(max(0.0, flight.launched + self.step_s - time.monotonic()))
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        return result

    def expected(self, request: Request, index: int = 0, seed: int | None = None) -> list[int]:
        """The output tokens of choice ``index`` by the definition: no pages, rows, slots or steps.

        ``seed`` is needed when the request has none and samples (``Output.seed`` tells it).
        """
        params, stops = request.params, _stops(request)
        tokens, n_prompt = list(request.prompt_ids), len(request.prompt_ids)
        most = (
            self._limits.max_model_len
            if params.max_tokens is None
            else n_prompt + params.max_tokens
        )
        most = min(most, (self._limits.n_pages - 1) * self._limits.page_size + 1)
        if seed is None:
            seed = (params.seed or 0) + index
        total = seen = 0
        for i, token in enumerate(tokens):
            total, seen = _fold(total, seen, token, i)
        history = sum(_counted(t, False) for t in tokens) & _MASK
        while len(tokens) < most:
            salt = _sampling_hash(params, history, _bias_digest(params))
            lock = n_prompt + params.min_tokens
            token = self.model.draw(mix(seen) ^ salt, len(tokens), seed, params, stops, lock)
            history = (history + _counted(token, True)) & _MASK
            total, seen = _fold(total, seen, token, len(tokens))
            tokens.append(token)
            if token in stops and len(tokens) > lock:
                break
        return tokens[n_prompt:]

    def _check(self, plan: StepPlan) -> None:
        """What the real runner would have to assume of any plan."""
        limits, rows = self._limits, plan.rows
        decode = [row for row in rows if row.from_slot]
        prefill = rows[len(decode) :]
        assert rows, "an empty plan"
        assert all(row.from_slot for row in rows[: len(decode)]), "decode rows must come first"
        assert len(decode) <= limits.max_decode_rows, f"{len(decode)} decode rows"
        assert len(rows) <= limits.max_rows, f"{len(rows)} rows"
        assert len(prefill) <= limits.max_prefill_rows, f"{len(prefill)} prefill rows"
        n_prefill = sum(row.count for row in prefill)
        assert n_prefill <= limits.max_prefill_tokens, f"{n_prefill} prefill tokens"
        assert len({row.slot for row in rows}) == len(rows), "two rows share a slot"
        assert {load.slot for load in plan.loads} <= {row.slot for row in rows}, (
            "a load without a row"
        )
        assert len(plan.page_table_RM) == len(rows), "the page table has other rows than the plan"
        for row in rows:
            n_given = 1 + len(row.drafts) if row.from_slot else len(row.tokens)
            assert row.count == n_given > 0, f"count {row.count}, {n_given} tokens"
            assert len(row.drafts) <= limits.max_drafts, f"{len(row.drafts)} drafts"
            assert row.start + row.count <= limits.max_model_len, "a row leaves the context"

    def _load(self, load: SlotLoad) -> None:
        slot = self._slots[load.slot]
        slot.history = (
            sum(_counted(t, i >= load.n_prompt) for i, t in enumerate(load.tokens)) & _MASK
        )
        slot.bias = _bias_digest(load.params)

    def _run(self, plan: StepPlan) -> StepResult:
        R, J = len(plan.rows), 1 + max(len(row.drafts) for row in plan.rows)
        out = _Out(R, J, top=any(row.seq.request.params.logprobs is not None for row in plan.rows))
        written: set[tuple[int, int]] = set()
        for r, row in enumerate(plan.rows):
            pages = plan.page_table_RM[r]
            tokens, start = self._inputs(row)
            self._write(pages, start, tokens, written, plan.id)
            if row.score:
                out.prompt[r] = self._score(row, pages, start)
            key = (row.seq.request.id, row.seq.index)
            if row.emits and key in self.nan:
                self.nan.discard(key)
                out.finite_R[r] = False
            if row.emits:
                self._draw(row, pages, start, out, r)
            else:
                self._slots[row.slot].length = start + row.count
        return out.result()

    def _inputs(self, row: RowPlan) -> tuple[list[int], int]:
        """The row's tokens and true start: device truth for a row that reads its slot."""
        if not row.from_slot:
            return list(row.tokens), row.start
        slot = self._slots[row.slot]
        assert slot.length <= row.start, f"slot at {slot.length}, the plan's bound is {row.start}"
        return [slot.last, *row.drafts], slot.length

    def _cells(self, pages: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """(page, offset) of positions 0 .. n-1."""
        position_N = np.arange(n)
        return pages[position_N // self._limits.page_size], position_N % self._limits.page_size

    def _write(
        self,
        pages: np.ndarray,
        start: int,
        tokens: list[int],
        written: set[tuple[int, int]],
        step: int,
    ) -> None:
        page_N, off_N = self._cells(pages, start + len(tokens))
        new = slice(start, None)
        assert page_N[new].min() > 0, "a token is written to the scratch page"
        cells = set(zip(page_N[new].tolist(), off_N[new].tolist(), strict=True))
        assert not cells & written, "two rows write one position"
        written |= cells
        self.token_PZ[page_N[new], off_N[new]] = tokens
        token_N = self.token_PZ[page_N, off_N]
        assert token_N.min() >= 0, "a position is read that was never written"
        total_N = np.cumsum(_place_N(token_N.astype(np.uint64)))
        self.ctx_PZ[page_N[new], off_N[new]] = _mix_N(total_N)[new]
        self.step_P[page_N[new]] = step

    def _seen_N(self, pages: np.ndarray, n: int) -> np.ndarray:
        """uint64[n]: hash of everything visible up to each position."""
        page_N, off_N = self._cells(pages, n)
        return _mix_N(np.cumsum(_place_N(self.ctx_PZ[page_N, off_N])))

    def _draw(self, row: RowPlan, pages: np.ndarray, start: int, out: _Out, r: int) -> None:
        """Draw at the row's last token, or at each draft while drafts are what would be drawn."""
        seq, slot = row.seq, self._slots[row.slot]
        params, stops = seq.request.params, _stops(seq.request)
        seen_N = self._seen_N(pages, start + row.count)
        first = start + row.count - len(row.drafts) - 1
        lock = seq.n_prompt + params.min_tokens
        for j in range(1 + len(row.drafts)):
            salt = _sampling_hash(params, slot.history, slot.bias)
            seen = int(seen_N[first + j]) ^ salt
            token = self.model.draw(seen, first + j + 1, seq.seed, params, stops, lock)
            slot.history = (slot.history + _counted(token, True)) & _MASK
            slot.last, slot.length = token, first + j + 1
            out.put(r, j, token, seen, self._limits.vocab_size)
            if j < len(row.drafts) and token != row.drafts[j]:
                break

    def _score(self, row: RowPlan, pages: np.ndarray, start: int) -> PromptLogprobs:
        n = min(start + row.count, row.seq.n_prompt - 1) - start
        seen = [int(s) for s in self._seen_N(pages, start + n)[start:]]
        tokens = row.seq.tokens[start + 1 : start + n + 1]
        top = [top_of(s, self._limits.vocab_size) for s in seen]
        return PromptLogprobs(
            start=start,
            logprob_n=np.array(
                [_logprob(s ^ mix(t)) for s, t in zip(seen, tokens, strict=True)], np.float32
            ),
            rank_n=np.ones(n, np.int32),
            top_ids_nL=np.array([ids for ids, _ in top], np.int32).reshape(n, MAX_LOGPROBS),
            top_logprobs_nL=np.array([p for _, p in top], np.float32).reshape(n, MAX_LOGPROBS),
        )


def _fold(total: int, seen: int, token: int, position: int) -> tuple[int, int]:
    """One more token: (sum of placed tokens, sum of placed ctx)."""
    total = (total + _place(token, position)) & _MASK
    return total, (seen + _place(mix(total), position)) & _MASK


def _counted(token: int, drawn: bool) -> int:
    return mix(mix(token) ^ drawn)


def top_of(seen: int, vocab: int) -> tuple[list[int], list[float]]:
    """The fake's most likely ids and their log-probabilities, best first."""
    ids = [(seen + i) % vocab for i in range(MAX_LOGPROBS)]
    return ids, [_logprob(seen) - i for i in range(MAX_LOGPROBS)]


@dataclass(slots=True)
class _Out:
    """A result being filled."""

    R: int
    J: int
    top: bool
    token_RJ: np.ndarray = field(init=False)
    n_ok_R: np.ndarray = field(init=False)
    finite_R: np.ndarray = field(init=False)
    logprob_RJ: np.ndarray = field(init=False)
    ids_RJL: np.ndarray = field(init=False)
    top_RJL: np.ndarray = field(init=False)
    prompt: dict[int, PromptLogprobs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.token_RJ = np.zeros((self.R, self.J), np.int32)
        self.n_ok_R = np.zeros(self.R, np.int32)
        self.finite_R = np.ones(self.R, bool)
        self.logprob_RJ = np.zeros((self.R, self.J), np.float32)
        self.ids_RJL = np.zeros((self.R, self.J, MAX_LOGPROBS), np.int32)
        self.top_RJL = np.zeros((self.R, self.J, MAX_LOGPROBS), np.float32)

    def put(self, r: int, j: int, token: int, seen: int, vocab: int) -> None:
        self.token_RJ[r, j] = token
        self.n_ok_R[r] = j + 1
        self.logprob_RJ[r, j] = _logprob(seen)
        if self.top:
            self.ids_RJL[r, j], self.top_RJL[r, j] = top_of(seen, vocab)

    def result(self) -> StepResult:
        return StepResult(
            tokens_RJ=self.token_RJ,
            n_ok_R=self.n_ok_R,
            finite_R=self.finite_R,
            logprob_RJ=self.logprob_RJ,
            top_ids_RJL=self.ids_RJL if self.top else None,
            top_logprobs_RJL=self.top_RJL if self.top else None,
            prompt=self.prompt,
        )


class ByteTokenizer:
    """``ports.Tokenizer``: UTF-8 bytes are ids 0 .. n_bytes-1, special tokens follow.

    ``n_bytes`` below 256 makes a small vocabulary (128: ASCII only); other text is refused.
    Special tokens never come from text: their names are encoded byte by byte.
    """

    def __init__(
        self,
        *,
        n_bytes: int = 256,
        specials: Seq[str] = ("<|bos|>", "<|eos|>", "<|pad|>"),
        add_bos: bool = False,
    ) -> None:
        if not 1 <= n_bytes <= 256:
            raise ValueError(f"n_bytes must be in [1, 256], not {n_bytes}")
        self.n_bytes = n_bytes
        self.specials = {name: n_bytes + i for i, name in enumerate(specials)}
        self.add_bos = add_bos

    @property
    def vocab_size(self) -> int:
        return self.n_bytes + len(self.specials)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        eos = self.specials.get("<|eos|>")
        return () if eos is None else (eos,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises BadRequest for text outside UTF-8 or outside a small vocabulary."""
        try:
            ids = list(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise BadRequest("text is not valid Unicode", field="prompt") from error
        if ids and max(ids) >= self.n_bytes:
            raise BadRequest(
                f"text has bytes outside the {self.n_bytes} known ones", field="prompt"
            )
        bos = [self.specials["<|bos|>"]] if self.add_bos and add_special_tokens else []
        return bos + ids

    def decode(self, ids: Seq[int], *, skip_special_tokens: bool = True) -> str:
        """Invalid UTF-8 becomes U+FFFD, one per maximal bad part."""
        names = {i: name.encode() for name, i in self.specials.items()}
        parts = [
            bytes([i]) if i < self.n_bytes else b"" if skip_special_tokens else names[i]
            for i in ids
        ]
        return b"".join(parts).decode("utf-8", errors="replace")
