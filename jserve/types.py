"""Value types shared by the engine's parts: requests, sequences, plans, results, outputs.

``sampling`` says how a request wants its tokens drawn, ``request_options`` how it wants to be served.

A step, from plan to result (R rows, J drafts per row); no part of a plan changes once it is made::

    StepPlan(rows=(RowPlan, ...), loads=(SlotLoad, ...))  --runner-->  StepResult(tokens_RJ, n_ok_R, ...)

Three counters of a sequence that must never be mixed up::

    tokens   |<------ prompt ------>|<-- output, known on the host -->|
             0                      n_prompt                    len(tokens)
    KV       |<------------- scheduled: written or being written ------------->|
                                                      in_flight: emitting rows not yet committed
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from jserve.request_options import Lane, RequestOptions
from jserve.sampling import SamplingParams, Thinking

if TYPE_CHECKING:
    from jserve.kv.ledger import Lease
    from jserve.kv.swap import Swapped
    from jserve.ports import Guide


FIRST_WEIGHTS = "0"
"""The version of the weights that an engine starts with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(RequestOptions):
    """A client's request, tokenised. Frozen; checked against the model by ``admission.check.check``."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    eos_ids: tuple[int, ...] = ()
    """Ids that end generation unless ``params.ignore_eos``; from generation_config.json."""
    arrival: float = 0.0
    """Monotonic seconds."""
    batch: str = ""
    """Requests of one name were asked for together: the queue takes all of them or none. "": alone."""
    lane: Lane = Lane.STANDARD
    adapter: str | None = None
    """None: no server has any, so a name is refused."""
    thinking: Thinking | None = None
    """None where the model writes no thoughts, or the prompt closed the thought already."""
    attempt: int = 0
    """Its outputs carry this number, so that those of an attempt that was given up are known as such."""
    kv_name: str = ""
    """The scheduler's: names what its step features change of its KV; "": nothing. A front of several engines has a
    name of its own before (``fleet.asking``)."""
    is_long: bool = False
    """The scheduler's: it may outgrow ``RunnerLimits.short_context``, so longrope's long factors are in its KV. Where
    it is submitted so it stays so, as the prompt of another request is computed."""
    said: tuple[tuple[int, ...] | None, ...] = ()
    """For each choice the ids that earlier attempts told, behind which this one goes on; None: that choice
    is over. (): nothing came before this attempt."""
    exports_kv: bool = False
    """The pages of its prompt go to the disk tier as soon as they are computed, for another engine to read, and
    its end is told once they are there."""
    kv_source: str | None = None
    """The place where another engine wrote pages of its prompt: an address of its ``KVTransferServer``, or "" for the
    directory of the disk tier, which both share; None: nowhere."""

    @property
    def open_choices(self) -> Seq[int]:
        """Numbers of the choices to be generated."""
        if not self.said:
            return range(self.params.n)
        return [i for i, ids in enumerate(self.said) if ids is not None]

    @property
    def n_said(self) -> int:
        """Tokens that earlier attempts told, all choices together."""
        return sum(len(ids) for ids in self.said if ids is not None)

    @classmethod
    def of(cls, options: RequestOptions, **own: Any) -> Request:
        """A request with these options; ``own`` are its other fields."""
        return cls(**{f.name: getattr(options, f.name) for f in fields(RequestOptions)}, **own)


class HandleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A cache handle as clients see it."""

    name: str
    n_tokens: int
    n_pages: int
    """Pages it takes from the quota: the full ones of its tokens."""
    pinned: bool
    """False while it is computed for the first time, and after a fault until its next use."""
    expires_in_s: float
    n_uses: int = 0


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SeqState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Choice:
    """Choice ``index`` of ``request``: what never changes of one sequence. Compared by identity."""

    request: Request
    index: int
    seed: int

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt_ids)


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One generation of ours. Mutable, owned by the scheduler."""

    request: Request
    index: int
    seed: int
    choice: Choice = field(init=False)
    """The three above as one value, which rows carry."""
    tokens: list[int]
    """Prompt then committed output: the ids the host knows."""
    n_prompt: int
    max_len: int
    """len(tokens) never exceeds this: prompt + max_tokens, within the context."""
    stop_ids: frozenset[int] = frozenset()
    """EOS and stop ids: one of them ends the sequence at any position from ``min_len`` on."""
    min_len: int = 0
    order: tuple[int, int, int] = (0, 0, 0)
    """(rank of the lane, priority, number of submission): lower runs first and is preempted last."""
    arrived: float = 0.0
    """Scheduler seconds; deadlines and ageing count from here."""
    due: float = math.inf
    """The time at which the first token (or else the last one) is promised: earlier runs first."""
    charged: int | None = None
    """Output tokens its tenant and lane were charged for at first admission; None before it."""
    state: SeqState = SeqState.WAITING
    scheduled: int = 0
    """Tokens whose KV is written or is being written by a step in flight (upper bound under speculation)."""
    in_flight: int = 0
    """Upper bound on output tokens of steps not yet committed."""
    pending: int = 0
    """Rows of steps not yet committed, emitting or not."""
    given: int = 0
    """Tokens known at (re-)admission: rows below it carry ids, rows from it on read the slot."""
    slot: int = -1
    vocab_row: int = -1
    """Number of the vocab row that holds its counts and biases; -1: none, as most need none."""
    lease: Lease | None = None
    swapped: Swapped | None = None
    """Pages it has in host memory since it was preempted."""
    guide: Guide | None = None
    """Its constraint; None for most."""
    plain: bool = False
    """True: its request wants of a token no more than the id, and keeps no cache handle."""
    prompt_features: tuple[str, ...] = ()
    """Step features whose values of each prompt token its request wants."""
    old_weights: bool = False
    """It ends under the weights of before the last update (``sched.versions``)."""
    n_cached: int = 0
    """Prompt tokens that came from the prefix cache at first admission."""
    n_preempted: int = 0
    finish: Finish | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.choice = Choice(request=self.request, index=self.index, seed=self.seed)

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt


class RowPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row of a step: ``count`` tokens of one sequence starting at position ``start``.

    A decode or verify row has ``count == 1 + len(drafts)`` and ``from_slot`` True: its first token and its
    true start are read from the slot on the device, ``start`` is the host's upper bound. Any other row
    carries its token ids in ``tokens`` and an exact ``start``. A struct, for hundreds are made per step.
    """

    choice: Choice
    slot: int
    start: int
    count: int
    from_slot: bool
    tokens: Seq[int] = ()
    """``count`` ids for a prefill row, empty for a decode row."""
    emits: bool = True
    """True when the row's last token is the last known one, so a new token is drawn."""
    next_token: int = -1
    """The one after ``tokens`` for the device drafter, where the row does not emit it; else -1."""
    targets: Seq[int] = ()
    """The prompt tokens that follow each of ``tokens``, where their log-probabilities are wanted."""
    prompt_features: Seq[str] = ()
    """Step features that give their values of each of ``tokens``, which are its prompt's."""
    backfill: bool = False
    """True: the target's KV of these tokens exists already, and only the device drafter, which did not
    run when they were computed, writes its own. Such a row emits nothing, and its sequence may have
    another row in the step."""
    drafts: Seq[int] = ()
    """Ids that the host proposes; or ``(-1,) * k``: the first k drafts that the slot holds on the device,
    at most as many as ``StepPlan.n_draft`` of the sequence's last emitting row left there."""
    mask: np.ndarray | None = None
    """Allowed-token bits, int32[1 + len(drafts), ceil(V / 32)], or None."""
    redraw: Seq[int] = ()
    """Beside ``mask``, one id for each of its draws, or (): -1 draws under the mask. Any other id draws
    without the mask, and only what the mask forbids is drawn again, under the mask and never that id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLoad:
    """Fill the per-slot rows that sampling needs, before the step's rows run.

    Only for sequences whose parameters are ``loaded`` or that ask for a feature with an array in slots, or for all
    where the device copies drafts from their text. ``tokens`` is every token known at admission, when nothing of it is
    in flight.
    """

    slot: int
    tokens: Seq[int]
    n_prompt: int
    params: SamplingParams
    vocab_row: int = -1
    """As ``Sequence.vocab_row``."""


class PageMove(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Copy one page between the device and host memory, before the rows of its plan run."""

    page: int
    host: int
    """Number of the host page."""
    out: bool
    """True: device to host."""
    digest: bytes = b""
    """Name under which a page that goes out is also written to disk; empty: it is not."""


class PageFetch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Read one page from disk into host memory; answered with its ticket."""

    ticket: int
    digest: bytes
    host: int
    source: str = ""
    """As ``Request.kv_source``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The rows that run next. Host values only: no padding, no device arrays.

    Decode and verify rows come first, then prefill rows. Row r's token at position p has its KV in
    page ``page_table_RM[r, p // page_size]``.
    """

    id: int
    rows: tuple[RowPlan, ...]
    page_table_RM: np.ndarray
    """int32[R, m], a snapshot: m is the most pages that any row needs for its start + count tokens;
    entries past a row's own pages are 0 (scratch)."""
    loads: tuple[SlotLoad, ...] = ()
    moves: tuple[PageMove, ...] = ()
    """Pages to copy first, in this order: those that go out, then those that come in."""
    group_tables: tuple[np.ndarray, ...] = ()
    """The tables of groups of layers, where pages belong to those: int32[groups, R, m] of each reach, of which
    ``page_table_RM`` is the first group's. Position p lies in column ``p // page_size % m``; of all reaches but the
    first m is the same in every plan."""
    old_weights: bool = False
    """All rows are of sequences that end under the weights of before, which the runner still has."""
    n_draft: int = 0
    """Drafts that the device drafter leaves in the slot of each emitting row at the end of this step, in
    place of those it held; at most ``RunnerLimits.device_drafts``. 0: it does not run, sees nothing of
    this step, and slots hold none."""

    @property
    def n_tokens(self) -> int:
        return sum(row.count for row in self.rows)


NOTHING_LEFT = "leaves no token that may be drawn"
"""Said of a step feature that forbids all tokens, by itself or with what else the request asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The results of a plan, numpy only. Rows in plan order; J = drafts + 1 columns."""

    tokens_RJ: np.ndarray
    """int32; columns beyond ``n_ok`` are meaningless."""
    n_ok_R: np.ndarray
    """int32: tokens drawn by the row (0 for a row that does not emit)."""
    finite_R: np.ndarray
    """bool: False when the row's logits held a NaN or infinity, or nothing could be drawn from them."""
    logprob_RJ: np.ndarray
    """float32: log-probability of each drawn token under the model's raw logits (as vLLM: before biases,
    penalties, temperature and truncation); 0 when no row of the step asked for log-probabilities."""
    top_ids_RJL: np.ndarray | None = None
    """int32[R, J, MAX_LOGPROBS] most likely ids, or None when no row asked."""
    top_logprobs_RJL: np.ndarray | None = None
    rank_RJ: np.ndarray | None = None
    """int32: ranks of the drawn tokens among the raw logits, or None when no row asked or the programs
    do not count them; as ``picked_RJK``."""
    picked_RJK: np.ndarray | None = None
    """float32: log-probabilities of the ids in ``params.logprob_token_ids`` of each row, in that order;
    the rest of K is meaningless."""
    prompt: Mapping[int, PromptLogprobs] = field(default_factory=dict)
    """Row index -> log-probabilities of the row's own prompt tokens, for rows that asked."""
    extra: Mapping[str, Mapping[int, Seq[Any]]] = field(default_factory=dict)
    """Name of a registered step feature -> row index -> what it gives each token of the row."""
    prompt_extra: Mapping[str, Mapping[int, Seq[Any]]] = field(default_factory=dict)
    """Name of a registered step feature -> row index -> what it gives each of the row's own prompt tokens, for rows
    with ``RowPlan.prompt_features``."""
    faults: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Row index -> (the registered step feature, what it did), for rows that are not finite by its fault."""
    device_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of the tokens at positions ``start+1 .. start+n`` given what precedes them."""

    start: int
    logprob_n: np.ndarray
    rank_n: np.ndarray
    top_ids_nL: np.ndarray
    top_logprobs_nL: np.ndarray


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One drawn (or prompt) token's log-probability with the most likely alternatives, best first."""

    token: int
    logprob: float
    rank: int | None = None
    """1 for the most likely token; None where it was not counted."""
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    named: bool = False
    """True when ``top_ids`` are those that the request names (``logprob_token_ids``), in its order."""

    def ranked(self) -> list[tuple[int, float, int | None]]:
        """(id, log-probability, rank) of the alternatives and of the token, each id once. The rank of a
        named id is None unless it is the token's."""
        ranks = range(1, len(self.top_ids) + 1)
        rows: dict[int, tuple[int, float, int | None]] = {}
        for token, logprob, rank in zip(self.top_ids, self.top_logprobs, ranks, strict=True):
            own = self.rank if token == self.token else None
            rows[token] = (token, logprob, own if self.named else rank)
        rows.setdefault(self.token, (self.token, self.logprob, self.rank))
        return list(rows.values())


class Output(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """The tokens that one commit adds to one sequence. The last one of a sequence carries ``finish``."""

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Complete list, sent once, with the first token (first entry None)."""
    extra: dict[str, tuple[Any, ...]] | None = None
    """Name of a step feature that the request asks for -> one value for each of ``token_ids``."""
    prompt_extra: dict[str, tuple[Any, ...]] | None = None
    """Likewise, one value for each token of the prompt: complete, sent once, with the first token."""
    finish: Finish | None = None
    stop_reason: int | str | None = None
    """The stop token id, when one ended the sequence."""
    error: str | None = None
    error_code: str | None = None
    """``JserveError.code`` of what went wrong, with ``error``; ``errors.error_of`` gives its class."""
    error_field: str | None = None
    """The request field at fault, with ``error``."""
    retry_after: float | None = None
    """Seconds after which a refused request may be sent again."""
    n_cached: int = 0
    n_drafted: int = 0
    """Drafts that the row of ``token_ids`` tried."""
    n_accepted: int = 0
    """The number of them among ``token_ids``."""
    seed: int | None = None
    """The seed in use, on the first output."""
    attempt: int = 0
    """That of the request which it answers."""
    weights: str = FIRST_WEIGHTS
    """The version of the weights that drew ``token_ids``."""
