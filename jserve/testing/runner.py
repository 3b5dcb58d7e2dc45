"""A runner without a model whose tokens reveal every wrong page.

It owns ``FakeRunner``: ``ports.Runner`` in numpy.

It keeps its own memory of what each page holds and knows a row's past only through the
plan's page table, as a device would. Per position it stores the token and a hash of all that was
visible when it was computed (as KV depends on the whole prefix)::

    sum_p = sum over i <= p of  mix(token_i, i)       read from the tokens that the table points at
    ctx_p = mix(sum_p)                                stored beside the token
    draw  = mix(sum over i <= p of  mix(ctx_i, i))    read from the ctx that the table points at

(with a window: over the i that p sees; of several groups of layers each has a ctx of its own, and a draw reads all).
So a page that is stale, shared too early, freed too early,
or off by one changes the next token. Reading a position that was never written (scratch among them),
writing scratch, or two rows writing one position raises
``AssertionError``. ``FakeRunner.expected`` computes the same function from a plain list of tokens,
without pages or batches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from jserve.faults import point
from jserve.ports import InFlight, RunnerLimits
from jserve.sampling import MAX_LOGPROBS
from jserve.testing.group_rows import GroupRow, group_rows
from jserve.testing.model import (
    MASK,
    FakeModel,
    bias_digest,
    counted,
    expected,
    joined,
    logprob_at,
    logprob_of,
    mix,
    place_at,
    rank_of,
    sampling_hash,
    stops_of,
    top_of,
)
from jserve.testing.plans import check_plan
from jserve.types import (
    PromptLogprobs,
    Request,
    RowPlan,
    SlotLoad,
    StepPlan,
    StepResult,
)

HostCopy = tuple[np.ndarray, ...]

RESTORED = -2
"""In the place of a step: a committed one wrote the page before it went to host memory."""


@dataclass(slots=True)
class _VocabRow:
    """The device state of a sequence with penalties or biases."""

    history: int = 0
    """Sum of hashes of the tokens seen, prompt and output apart: stands for the counts."""
    bias: int = 0


@dataclass(slots=True)
class _Slot:
    """The device state of a slot."""

    length: int = 0
    last: int = -1
    vocab: _VocabRow = field(default_factory=_VocabRow)
    """The row it was given; one of its own for bad words, which need none."""
    drafts: tuple[int, ...] = ()
    """The drafts that the device drafter left."""
    picks: tuple[int, ...] = ()
    """The ids whose log-probabilities its sequence names."""
    text: list[int] = field(default_factory=list)
    """All tokens, where the device copies drafts from it."""


class FakeRunner:
    """``ports.Runner`` in numpy. A program runs at its launch; ``collect`` hands out its result.

    ``nan`` names (request id, index) pairs whose next row computes KV that is not finite, and so
    does all that reads it; ``fail_next`` makes the next ``collect`` raise; ``step_s`` is how long a
    step takes from its launch. Where ``limits.device_drafts`` says so there is a device drafter, whose
    drafts are each right with chance ``acceptance`` (a function of seed and position); where
    ``limits.drafts_from_kv``, only while it was shown every token before them. Where
    ``limits.drafts_from_text`` it copies them from the slot's text.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        *,
        eos_rate: int = 0,
        step_s: float = 0.0,
        acceptance: float = 0.7,
    ) -> None:
        self.model = FakeModel(
            vocab_size=limits.vocab_size,
            eos_rate=eos_rate,
            window=limits.window,
            sinks=limits.sinks,
            reaches=limits.reaches,
        )
        assert not (limits.reaches and limits.device_drafts and not limits.drafts_from_text), (
            "a drafter keeps its KV in the pages of all layers"
        )
        self.step_s = step_s
        self.acceptance = acceptance
        self.nan: set[tuple[str, int]] = set()
        self.fail_next: Exception | None = None
        self.n_launched = self.n_collected = 0
        self._limits = limits
        self.reset()

    @point("runner.reset")
    def reset(self) -> None:
        """Forget all pages and slots, and the steps in flight."""
        P, Z = self._limits.n_pages, self._limits.page_size
        self.n_collected = self.n_launched
        self.token_PZ = np.full((P, Z), -1, np.int64)
        self.ctx_PZ = np.zeros((P, Z), np.uint64)
        self.poison_PZ = np.zeros((P, Z), bool)
        self.shown_PZ = np.zeros((P, Z), bool)
        """The positions that the device drafter saw."""
        self.step_P = np.full(P, -1, np.int64)
        """The step that wrote each page last, or ``RESTORED`` where it came from host memory."""
        self._slots = [_Slot() for _ in range(self._limits.n_slots)]
        n_rows = min(self._limits.n_vocab_rows, self._limits.n_slots)
        self._vocab_rows = [_VocabRow() for _ in range(n_rows)]
        self.host: dict[int, HostCopy] = {}
        """The contents of each host page, in the order of ``_page_arrays``."""

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    @point("runner.launch")
    def launch(self, plan: StepPlan) -> InFlight:
        check_plan(plan, self._limits)
        saved = self._move(plan)
        for load in plan.loads:
            self._load(load)
        result = self._run(plan)
        self.n_launched += 1
        return InFlight(
            plan=plan, launched=time.monotonic(), handle=(self.n_launched, result, saved)
        )

    @point("runner.collect")
    def collect(self, flight: InFlight) -> StepResult:
        number, result, saved = flight.handle
        assert number == self.n_collected + 1, "steps must be collected in launch order"
        self.n_collected = number
        if self.step_s:
            time.sleep(max(0.0, flight.launched + self.step_s - time.monotonic()))
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.host |= saved
        return result

    def is_done(self, flight: InFlight) -> bool:
        return time.monotonic() >= flight.launched + self.step_s

    def expected(self, request: Request, index: int = 0, seed: int | None = None) -> list[int]:
        """The output tokens of choice ``index`` by the definition (``testing.model.expected``).

        ``seed`` is needed when the request has none and samples (``Output.seed`` tells it).
        """
        wanted, limits = request.params.max_tokens, self._limits
        most = limits.max_model_len if wanted is None else len(request.prompt_ids) + wanted
        if not (
            limits.window or limits.reaches
        ):  # with one, pages go round: a long output passes through a small pool
            most = min(most, (limits.n_pages - 1) * limits.page_size + 1)
        if seed is None:
            seed = (request.params.seed or 0) + index
        return expected(self.model, request, seed, most)

    def _move(self, plan: StepPlan) -> dict[int, HostCopy]:
        """Copy pages in the order of ``plan.moves``; gives what goes out, there once collected."""
        saved: dict[int, HostCopy] = {}
        kinds = [move.out for move in plan.moves]
        assert kinds == sorted(kinds, reverse=True), "pages that go out must come first"
        for move in plan.moves:
            assert 0 < move.page < self._limits.n_pages, f"page {move.page} is moved"
            assert 0 <= move.host < self._limits.n_host_pages, f"host page {move.host} is moved"
            arrays = self._page_arrays()
            if move.out:
                saved[move.host] = tuple(array[move.page].copy() for array in arrays)
                continue
            assert move.host in self.host, "a host page is loaded before its save was collected"
            for array, kept in zip(arrays, self.host[move.host], strict=True):
                array[move.page] = kept
            self.step_P[move.page] = RESTORED
        return saved

    def _page_arrays(self) -> tuple[np.ndarray, ...]:
        """[P, Z] each: what a page holds, wherever it is moved."""
        return self.token_PZ, self.ctx_PZ, self.poison_PZ, self.shown_PZ

    def _load(self, load: SlotLoad) -> None:
        slot = self._slots[load.slot]
        slot.vocab = self._vocab_rows[load.vocab_row] if load.vocab_row >= 0 else _VocabRow()
        seen = [counted(t, i >= load.n_prompt) for i, t in enumerate(load.tokens)]
        slot.vocab.history, slot.vocab.bias = sum(seen) & MASK, bias_digest(load.params)
        slot.picks = load.params.logprob_token_ids or ()
        slot.text = list(load.tokens)

    def _run(self, plan: StepPlan) -> StepResult:
        wants_top = any(row.choice.request.params.shows_logprobs for row in plan.rows)
        J = 1 + max(len(row.drafts) for row in plan.rows)
        out = _blank(len(plan.rows), J, top=wants_top, picks=self._limits.picks)
        scores: dict[int, PromptLogprobs] = {}
        written: set[tuple[int, int]] = set()
        pages_R = [self._groups(plan, r) for r in range(len(plan.rows))]
        for row, pages in zip(plan.rows, pages_R, strict=True):
            if row.backfill:  # before anybody drafts
                self._show(row, pages[0])
        for r, row in enumerate(plan.rows):
            pages = pages_R[r]
            if row.backfill:
                continue
            tokens, start = self._inputs(row)
            drafts = tokens[1:] if row.from_slot else ()
            self._write(row, pages, start, tokens, written, plan.id)
            self.shown_PZ[pages[0].cells(np.arange(start, start + row.count))] = plan.n_draft > 0
            if row.targets:
                scores[r] = self._score(row, pages, start)
            if row.emits:
                self._draw(row, pages, start, drafts, out, r)
                self._slots[row.slot].drafts = self._draft(row, pages[0], plan.n_draft)
            else:
                self._slots[row.slot].length = start + row.count
                self._slots[row.slot].drafts = ()
            for group in pages:
                cells = group.cells(group.visible(start, start + row.count))
                out.finite_R[r] &= not self.poison_PZ[cells].any()
        return replace(
            out, prompt=scores, extra=self._extra(plan, out), prompt_extra=_prompt_extra(plan)
        )

    def _extra(self, plan: StepPlan, out: StepResult) -> dict[str, dict[int, list[int]]]:
        """Every step feature says each drawn token again."""
        asked = [row.choice.request.params.extra_args for row in plan.rows]
        return {
            name: {r: out.tokens_RJ[r].tolist() for r, names in enumerate(asked) if name in names}
            for name in self._limits.features
        }

    def _show(self, row: RowPlan, pages: GroupRow) -> None:
        """Of tokens that were computed; the one after them is known too."""
        cells = pages.cells(np.arange(row.start, row.start + row.count))
        assert self.token_PZ[cells].tolist() == list(row.tokens), (
            "other tokens are shown than were computed"
        )
        end, slot = row.start + row.count, self._slots[row.slot]
        after = slot.last if end == slot.length else self.token_PZ[pages.cells(np.array(end))]
        assert row.next_token == after, "the token after them is another"
        assert not row.emits, "a row that shows tokens draws one"
        self.shown_PZ[cells] = True

    def _inputs(self, row: RowPlan) -> tuple[list[int], int]:
        """The row's tokens and true start: device truth for a row that reads its slot."""
        if not row.from_slot:
            return list(row.tokens), row.start
        slot = self._slots[row.slot]
        assert slot.length <= row.start, f"slot at {slot.length}, the plan's bound is {row.start}"
        return [slot.last, *self._drafts_of(row)], slot.length

    def _drafts_of(self, row: RowPlan) -> Seq[int]:
        """The row's drafts: the host's ids, or as many of the slot's."""
        if not row.drafts or row.drafts[0] >= 0:
            return row.drafts
        held, wanted = self._slots[row.slot].drafts, len(row.drafts)
        assert wanted <= len(held), f"{wanted} drafts wanted, the slot holds {len(held)}"
        return held[:wanted]

    def _groups(self, plan: StepPlan, r: int) -> list[GroupRow]:
        """Row ``r`` of ``plan`` in each group of layers."""
        limits = self._limits
        return group_rows(
            plan, r, limits.reaches, limits.page_size, self.model.window, limits.sinks
        )

    def _write(
        self,
        row: RowPlan,
        pages: list[GroupRow],
        start: int,
        tokens: list[int],
        written: set[tuple[int, int]],
        step: int,
    ) -> None:
        key = (row.choice.request.id, row.choice.index)
        is_bad = key in self.nan
        self.nan.discard(key)
        for group in pages:
            is_bad |= self._write_group(group, start, tokens, written, step)
        for group in pages:  # what one group computes the next ones read
            new = group.cells(np.arange(start, start + len(tokens)))
            self.poison_PZ[new] = is_bad

    def _write_group(
        self,
        group: GroupRow,
        start: int,
        tokens: list[int],
        written: set[tuple[int, int]],
        step: int,
    ) -> bool:
        """Write the row's KV of one group; True if something that it reads is not finite."""
        at_S = group.visible(start, start + len(tokens))
        page_S, off_S = group.cells(at_S)
        n_old = len(at_S) - len(tokens)
        new = (page_S[n_old:], off_S[n_old:])
        assert new[0].min() > 0, "a token is written to the scratch page"
        cells = set(zip(new[0].tolist(), new[1].tolist(), strict=True))
        assert not cells & written, "two rows or groups write one position"
        written |= cells
        self.token_PZ[new] = tokens
        token_S = self.token_PZ[page_S, off_S]
        assert token_S.min() >= 0, "a position is read that was never written"
        self.ctx_PZ[new] = group.ctx(token_S, at_S, start)
        self.step_P[new[0]] = step
        return bool(self.poison_PZ[page_S[:n_old], off_S[:n_old]].any())

    def _seen_N(self, pages: list[GroupRow], start: int, n: int) -> list[int]:
        """[n - start]: hash of everything visible up to each position from ``start`` on."""
        sums = []
        for group in pages:
            at_S = group.visible(start, n)
            sums.append(group.sums(self.ctx_PZ[group.cells(at_S)], at_S, start).tolist())
        return [mix(joined(seen)) for seen in zip(*sums, strict=True)]

    def _draw(
        self,
        row: RowPlan,
        pages: list[GroupRow],
        start: int,
        drafts: Seq[int],
        out: StepResult,
        r: int,
    ) -> None:
        """Draw at the row's last token, or at each draft while drafts are what would be drawn."""
        choice, slot = row.choice, self._slots[row.slot]
        params, stops = choice.request.params, stops_of(choice.request)
        seen_N = self._seen_N(pages, start, start + row.count)
        first = start + row.count - len(drafts) - 1
        lock = choice.n_prompt + params.min_tokens
        for j in range(1 + len(drafts)):
            salt = sampling_hash(params, slot.vocab.history, slot.vocab.bias)
            seen = seen_N[first - start + j] ^ salt
            mask_W = None if row.mask is None else row.mask[j]
            redraw = row.redraw[j] if row.redraw else -1
            asked = (seen, first + j + 1, choice.seed, params, stops, lock)
            token = self.model.draw(*asked, mask_W, redraw)
            if token < 0:
                out.finite_R[r], out.n_ok_R[r] = False, j + 1
                break
            if params.penalised:
                slot.vocab.history = (slot.vocab.history + counted(token, True)) & MASK
            slot.last, slot.length = token, first + j + 1
            slot.text.append(token)
            _put(out, r, j, token, seen, self._limits.vocab_size)
            if out.picked_RJK is not None:
                found = [logprob_at(seen, t) for t in slot.picks]
                out.picked_RJK[r, j, : len(found)] = found
            if j < len(drafts) and token != drafts[j]:
                break

    def _draft(self, row: RowPlan, pages: GroupRow, n: int) -> tuple[int, ...]:
        """``n`` drafts of what the row's sequence will draw next, some of them wrong. No mask holds."""
        if self._limits.drafts_from_text:
            return self._copied(row, n)
        choice, slot, vocab = row.choice, self._slots[row.slot], self._limits.vocab_size
        params, stops = choice.request.params, stops_of(choice.request)
        first, history = slot.length, slot.vocab.history
        sees = self.shown_PZ[pages.cells(np.arange(first))].all()
        sure = self.acceptance if sees or not self._limits.drafts_from_kv else 0.0
        tokens, ctxs, drafts = [slot.last], [], []
        for at in range(first, first + n):
            at_S = np.append(pages.visible(at, at), at)
            cells, new = pages.cells(at_S[at_S < first]), at_S[at_S >= first] - first
            token_S = [*self.token_PZ[cells].tolist(), *(tokens[i] for i in new)]
            ctxs.append(mix(_sum_of(token_S, at_S)))
            ctx_S = [*self.ctx_PZ[cells].tolist(), *(ctxs[i] for i in new)]
            seen = mix(_sum_of(ctx_S, at_S)) ^ sampling_hash(params, history, slot.vocab.bias)
            lock = choice.n_prompt + params.min_tokens
            tokens.append(self.model.draw(seen, at + 1, choice.seed, params, stops, lock))
            history = (history + counted(tokens[-1], True)) & MASK
            right = mix(seen ^ 2) % 1024 < sure * 1024
            drafts.append(tokens[-1] if right else (tokens[-1] + 1) % vocab)
        return tuple(drafts)

    def _copied(self, row: RowPlan, n: int) -> tuple[int, ...]:
        """``n`` tokens that followed where the last two stood before."""
        slot, prompt = self._slots[row.slot], row.choice.request.prompt_ids
        own, held = list(row.tokens), slot.text[row.start : row.start + len(row.tokens)]
        same = slot.text[: len(prompt)] == list(prompt) and held == own
        assert same, "the slot holds another text than its sequence"
        assert len(slot.text) == slot.length + 1, "the slot's text has gaps"
        ends = [e for e in range(2, len(slot.text)) if slot.text[e - 2 : e] == slot.text[-2:]]
        period = len(slot.text) - ends[-1] if ends else 1
        return tuple(slot.text[i % period - period] for i in range(n))

    def _score(self, row: RowPlan, pages: list[GroupRow], start: int) -> PromptLogprobs:
        tokens, n = row.targets, len(row.targets)
        assert n == min(row.count, row.choice.n_prompt - 1 - start), "targets of another row"
        seen = self._seen_N(pages, start, start + n)
        top = [top_of(s, self._limits.vocab_size) for s in seen]
        return PromptLogprobs(
            start=start,
            logprob_n=np.array(
                [logprob_at(s, t) for s, t in zip(seen, tokens, strict=True)], np.float32
            ),
            rank_n=np.array(
                [rank_of(s, t, self._limits.vocab_size) for s, t in zip(seen, tokens, strict=True)],
                np.int32,
            ),
            top_ids_nL=np.array([ids for ids, _ in top], np.int32).reshape(n, MAX_LOGPROBS),
            top_logprobs_nL=np.array([p for _, p in top], np.float32).reshape(n, MAX_LOGPROBS),
        )


def _blank(R: int, J: int, *, top: bool, picks: int) -> StepResult:
    """A result to be filled: nothing drawn, every row finite."""
    counts = top and picks > 0
    return StepResult(
        tokens_RJ=np.zeros((R, J), np.int32),
        n_ok_R=np.zeros(R, np.int32),
        finite_R=np.ones(R, bool),
        logprob_RJ=np.zeros((R, J), np.float32),
        top_ids_RJL=np.zeros((R, J, MAX_LOGPROBS), np.int32) if top else None,
        top_logprobs_RJL=np.zeros((R, J, MAX_LOGPROBS), np.float32) if top else None,
        rank_RJ=np.zeros((R, J), np.int32) if counts else None,
        picked_RJK=np.zeros((R, J, picks), np.float32) if counts else None,
    )


def _prompt_extra(plan: StepPlan) -> dict[str, dict[int, list[int]]]:
    """Every step feature that is asked for them says the tokens of a prompt again."""
    found: dict[str, dict[int, list[int]]] = {}
    for r, row in enumerate(plan.rows):
        for name in row.prompt_features:
            found.setdefault(name, {})[r] = list(row.tokens)
    return found


def _sum_of(value_S: Seq[int], at_S: np.ndarray) -> int:
    """The sum of values placed at positions."""
    return int(np.sum(place_at(np.array(value_S, np.uint64), at_S)))


def _put(out: StepResult, r: int, j: int, token: int, seen: int, vocab: int) -> None:
    out.tokens_RJ[r, j] = token
    out.n_ok_R[r] = j + 1
    out.logprob_RJ[r, j] = logprob_of(seen)
    if out.top_ids_RJL is not None and out.top_logprobs_RJL is not None:
        out.top_ids_RJL[r, j], out.top_logprobs_RJL[r, j] = top_of(seen, vocab)
    if out.rank_RJ is not None:
        out.rank_RJ[r, j] = rank_of(seen, token, vocab)
