"""The Protocols between the engine and its parts. Nothing concrete is defined here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jserve.kv_layout import Reach
from jserve.sampling import MAX_LOGPROBS
from jserve.types import PageFetch, Request, Sequence, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of one bucket's program, measured before the engine was ready (or a roofline's guess)."""

    n_decode: int
    """Rows that decode or verify."""
    n_prefill: int
    """Tokens of prefill rows."""
    n_context: int
    """KV tokens that each row may read."""
    seconds: float
    width: int = 1
    """Tokens of a row that decodes or verifies: one and its drafts."""
    n_draft: int = 0
    """Drafts that the device leaves for the next step; their making is in ``seconds``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """The limits of the device side; the scheduler plans within them."""

    n_slots: int
    max_rows: int
    """Rows of one step, but for those that only show a drafter what it missed; at most ``n_slots``."""
    max_decode_rows: int
    max_prefill_tokens: int
    """Prefill tokens of one step, all rows together."""
    max_prefill_rows: int
    max_drafts: int
    """Drafts that a row may carry, whoever made them."""
    n_pages: int
    """Pages of the pool, page 0 included (page 0 is scratch and never owned)."""
    page_size: int
    max_model_len: int
    vocab_size: int
    short_context: int = 0
    """Tokens up to which texts have longrope's short factors; 0: all texts have the same."""
    masks: bool = True
    """False refuses structured output (no program takes a mask)."""
    scores_prompts: bool = True
    """False refuses ``prompt_logprobs`` (the scoring program is not compiled)."""
    max_prompt_logprobs: int = MAX_LOGPROBS
    """Most likely tokens that the scoring program finds beside each prompt token."""
    features: Mapping[str, Callable[[Any], None]] = field(default_factory=dict)
    """Registered step features that programs have: what ``extra_args`` may name, each with the check of
    what it is asked, which raises ValueError."""
    slot_features: tuple[str, ...] = ()
    """Of those, the ones for which slots hold an array: sequences that ask need a ``SlotLoad``."""
    kv_names: Mapping[str, Callable[[Any, int], str]] = field(default_factory=dict)
    """Of those that change KV, the text that names what is asked, of a prompt of so many tokens, in the KV's key."""
    prompt_features: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    """Of those that give values of prompt tokens too, whether what is asked wants them."""
    picks: int = 0
    """Most ids of ``logprob_token_ids``; 0 refuses it (programs cannot look at named ids)."""
    n_vocab_rows: int = 1 << 30
    """Sequences that can have penalties or biases at once, never more than ``n_slots``; 0 refuses those."""
    n_host_pages: int = 0
    """Pages of host memory that pages may be moved to; 0: there is no such tier."""
    page_move_s: float = 0.0
    """Measured seconds to move one page one way between device and host; 0: unknown."""
    window: int = 0
    """Tokens that any layer reads at most, where all layers have a window; 0: some read all."""
    sinks: int = 0
    """First tokens of a sequence that are read beside the window."""
    reaches: tuple[Reach, ...] = ()
    """The groups of layers that pages belong to, by how far they look back, the widest first. Empty: a page holds its
    tokens for all layers."""
    group_columns: tuple[int, ...] = ()
    """Columns of the page tables of each reach; empty: as many as its pages take."""
    device_drafts: int = 0
    """Most drafts that the device drafter leaves in a slot; 0: there is no device drafter."""
    draft_rows: int = 0
    """Most decode rows of a step in which the device drafts; 0: as many as decode."""
    prefill_width: int = 0
    """Most tokens of a row beside prefill in a step that drafts, one of ``policy.draft_count.widths``; 0: any."""
    drafts_from_kv: bool = False
    """True when the drafter reads KV of its own, which holds only what it was shown."""
    drafts_from_text: bool = False
    """True when the device copies drafts from the text: every sequence needs a ``SlotLoad`` to start with."""
    draft_depths: tuple[int, ...] = ()
    """Of a tree of drafts, the depth of each in order; (): they are chains. With a tree there are no
    programs for drafts of the host."""
    step_times: tuple[StepTime, ...] = ()
    """Step times measured before the first step; empty when nothing was measured."""


class StepCosts(Protocol):
    """Predicts a step's time from its size, so that admission can promise and chunks can be chosen."""

    def seconds(self, n_decode: int, n_prefill: int, n_context: int) -> float: ...


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A launched step: its plan and whatever the runner needs to collect it."""

    plan: StepPlan
    launched: float
    handle: Any


@runtime_checkable
class Runner(Protocol):
    """Runs plans in order. ``launch`` returns at once; ``collect`` waits for that step only."""

    @property
    def limits(self) -> RunnerLimits: ...

    def launch(self, plan: StepPlan) -> InFlight: ...

    def collect(self, flight: InFlight) -> StepResult: ...


@runtime_checkable
class PolledRunner(Protocol):
    """The further interface of a runner beside which others are driven by the same thread."""

    def is_done(self, flight: InFlight) -> bool:
        """True: ``collect`` of ``flight``, the oldest step, would not wait."""
        ...


@runtime_checkable
class DiskTier(Protocol):
    """The further interface of a runner that keeps pages on disk."""

    def stored(self) -> list[bytes] | None:
        """Digests of the pages at hand; None when it keeps none."""
        ...

    def fetch(self, asked: list[PageFetch]) -> None:
        """Begin to read; returns at once."""
        ...

    def take_fetched(self) -> list[tuple[int, bool]]:
        """(ticket, found) of reads that are over; what was found is in its host page."""
        ...

    def export(self, pages: list[tuple[int, bytes]]) -> int:
        """Begin to write (device page, digest) before any later step changes them; returns at once, with what
        ``exported`` gives at least once they are written."""
        ...

    def exported(self) -> int:
        """A number that grows as exports are over, in their order, written or dropped."""
        ...

    def page_s(self) -> float:
        """Seconds that pages took of late, each, to be written or read; 0 before the first."""
        ...

    def flush(self, pages: list[tuple[int, bytes]]) -> None:
        """Write (device page, digest) and everything that waits, then stop."""
        ...


@runtime_checkable
class LiveWeights(Protocol):
    """The further interface of a runner whose weights and memory an operator may change. Nothing is in flight."""

    def update_weights(
        self, source: Any, *, partial: bool, donate: bool, alias: bool, beside: bool = False
    ) -> str:
        """Copy other weights over those in use, or with ``alias`` use the caller's arrays. A name that no other
        weights have, "" where there is none. With ``beside`` the old ones stay for plans with ``old_weights``, until
        ``end_beside``. Raises WeightsError or, where there is no such directory, ConfigError; the old ones stay
        then."""
        ...

    def end_beside(self) -> None:
        """No plan with ``old_weights`` comes any more, nor is one in flight."""
        ...

    def weights_fault(self) -> str:
        """The reason that there are no weights any more, "" where there are: a caller has deleted arrays it shares."""
        ...

    def sleep(self, parts: Seq[str]) -> None:
        """Give the device memory of ``parts`` back."""
        ...

    def wake(self, parts: Seq[str]) -> None:
        """Take it again: KV empty, the weights as they were."""
        ...


class Profiler(Protocol):
    """Records what the device does, into a place of its own."""

    def start(self) -> None:
        """Raises BadRequest when it records already."""
        ...

    def stop(self) -> None:
        """Writes what it recorded; raises BadRequest when it records nothing."""
        ...


class Clock(Protocol):
    """Monotonic seconds; injected so that tests and the simulator own time."""

    def __call__(self) -> float: ...


class Proposer(Protocol):
    """Speculation on the host: guesses what a sequence says next. A function of its tokens alone,
    unless ``blind``."""

    @property
    def name(self) -> str:
        """The label in metrics."""
        ...

    @property
    def blind(self) -> bool:
        """True: needs no token, so it may be asked while steps of the sequence are in flight."""
        ...

    @property
    def seconds(self) -> float:
        """Time spent so far; for metrics, no decision rests on it."""
        ...

    def check(self, request: Request) -> None:
        """Raises BadRequest where it cannot draft for ``request``; ``field`` says why."""
        ...

    def read(self, seq: Sequence, most: int) -> int:
        """Take in up to ``most`` tokens of ``seq`` that were not read yet; gives how many."""
        ...

    def propose(self, seq: Sequence, most: int) -> Seq[int]:
        """Up to ``most`` ids that may follow the tokens known; none if it has not read them all."""
        ...

    def mask(self, seq: Sequence, drafts: Seq[int]) -> np.ndarray | None:
        """Allowed-token bits int32[1 + len(drafts), ceil(V / 32)] that the row of ``drafts`` needs;
        None: the tokens drawn are the model's own."""
        ...

    def forget(self, seq: Sequence) -> None:
        """``seq`` is over."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A guide's verdict on sampled tokens."""

    forced: tuple[int, ...] = ()
    """Ids that must follow and need no model step."""
    ended: bool = False
    """Nothing may follow the tokens drawn and forced."""
    free: bool = False
    """The guide is done: the sequence continues without it."""
    error: str | None = None
    """The sequence ends with this error."""
    code: str | None = None
    """That of a ``JserveError``; None: the guide itself failed."""
    field: str | None = None
    """The request field at fault."""


class Guide(Protocol):
    """One sequence's constraint. Its state is that of the committed tokens."""

    @property
    def fault(self) -> Verdict | None:
        """The reason why its mask forbids everything; None where that has another cause."""
        ...

    @property
    def forced(self) -> Seq[int]:
        """Ids that must come next and were not put in by ``take``: drafts that are always accepted."""
        ...

    def room(self, in_flight: int) -> int:
        """Tokens that may be planned now, with so many in flight; 0: wait for them, or for a
        mask."""
        ...

    def trim(self, drafts: Seq[int]) -> Seq[int]:
        """The first of ``drafts`` that may follow."""
        ...

    def mask(self, drafts: Seq[int]) -> np.ndarray | None:
        """Allowed-token bits int32[1 + len(drafts), ceil(V / 32)] after each of the trimmed
        ``drafts``; None: all are allowed everywhere."""
        ...

    def redraw(self, drafts: Seq[int]) -> Seq[int]:
        """``RowPlan.redraw`` beside ``mask(drafts)``."""
        ...

    def take(self, drawn: Seq[int]) -> Verdict:
        """The sequence got these tokens; moves the state past them and past what they force."""
        ...

    def resume(self, said: Seq[int]) -> Verdict:
        """The sequence starts behind these tokens, which an earlier attempt told; moves the state past
        them and puts nothing in."""
        ...


class Guides(Protocol):
    """Makes guides, and computes their masks beside the device step."""

    def compile(self, request: Request) -> Future[None] | None:
        """Compile the constraint of ``request``; None when it is compiled already. The future raises
        BadRequest for a structure that cannot be enforced."""
        ...

    def guide(self, request: Request, most: int) -> Guide | None:
        """A guide for one choice of a compiled request, which has ``most`` output tokens at most; None
        when it needs none."""
        ...

    def start_masks(self) -> None:
        """Start computing bitmasks of advanced guides in another thread; called after each commit."""
        ...

    def wait_masks(self, timeout_s: float | None) -> None:
        """Wait for all started bitmasks, for ``timeout_s`` at most."""
        ...


class Tokenizer(Protocol):
    """The tokenizer interface that the host side needs."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Seq[int], *, skip_special_tokens: bool = True) -> str: ...


class Journal(Protocol):
    """Receives every input of the scheduler, so that a replay gives the same decisions."""

    def arrival(self, request: Request, now: float) -> None: ...

    def cancel(self, request_id: str, now: float, index: int | None) -> None: ...

    def create(self, request: Request, ttl_s: float, now: float) -> None: ...

    def renew(self, tenant: str, name: str, ttl_s: float, now: float) -> None: ...

    def drop(self, tenant: str, name: str, now: float) -> None: ...

    def stored(self, digests: Seq[bytes], now: float) -> None: ...

    def fetched(self, answers: Seq[tuple[int, bool]], now: float) -> None: ...

    def plan(self, now: float, plan: StepPlan | None, *, waited: bool = False) -> None: ...

    def commit(self, now: float, plan: StepPlan, result: StepResult) -> None: ...

    def expire(self, now: float) -> None: ...

    def guided(self, request_id: str, index: int, verdict: Verdict) -> None: ...

    def recover(self, now: float, error: str) -> None: ...

    def weights(
        self, now: float, version: str, name: str, keep: bool, beside: bool, directory: str
    ) -> None:
        """``directory``: of the files that have all of them; "": of none."""
        ...

    def operated(self, now: float, action: str, running: str, parts: Seq[str]) -> None:
        """A pause, its end, sleep or wake. What it did to requests has events of its own."""
        ...
