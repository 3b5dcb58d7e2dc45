"""A tiny llama on the real ModelRunner, driven by hand-made plans.

What the runner tests build on. ``Rig`` plays the smallest possible scheduler: sequences with pages
and a slot of their own, a plan from whichever of them a random generator picks, results applied in
order. None of the real scheduler's policy is in it, so a fault it finds is the runner's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from jserve.config import EngineConfig
from jserve.model.arch import Arch
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.family import Family
from jserve.model.mesh import make_mesh
from jserve.model.param_spec import is_spec
from jserve.model.shard import ShardRules, shardings
from jserve.model.view import Bucket
from jserve.ports import InFlight
from jserve.runner.buckets import Ladder
from jserve.runner.program_files import ProgramFiles
from jserve.runner.runner import ModelRunner
from jserve.sampling import SamplingParams
from jserve.speculation.drafters.drafter import REPLICATED
from jserve.speculation.drafters.load import LoadedDrafter
from jserve.types import Request, RowPlan, Sequence, SlotLoad, StepPlan, StepResult
from tests import programs

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
ARCH = LLAMA.arch(CONFIG)
RULES = ShardRules()
MANY_PAGES = 4001
"""So that a copy of the KV would be most of a step's memory; of all runners, so that tests share programs."""
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
    "page_size": 8,
    "attention_backend": "xla",
    "n_pages": MANY_PAGES,
    "compile_cache": "",
}
SMALL = (Bucket(D=2, P=0, F=0), Bucket(D=6, P=48, F=4))


def tiny_params(
    mesh: Any, seed: int = 0, *, whole: bool = False, family: Family = LLAMA, arch: Arch = ARCH
) -> Any:
    """Seeded float32 weights, large enough that logits differ widely between contexts; ``whole`` on
    every device, or split."""
    rng = np.random.default_rng(seed)
    tp = 1 if whole else mesh.shape["tp"]
    host = jax.tree.map(lambda s: _draw(rng, s), family.specs(arch, 1), is_leaf=is_spec)
    specs = family.specs(arch, tp)
    host = jax.tree.map(lambda s, x: _repeat(s.shape, x), specs, host, is_leaf=is_spec)
    return jax.device_put(host, shardings(specs, mesh, REPLICATED if whole else RULES))


def _draw(rng: np.random.Generator, spec: Any) -> np.ndarray:
    return (rng.standard_normal(spec.shape) * 0.25 + spec.init_mean).astype(np.float32)


def _repeat(shape: tuple[int, ...], x: np.ndarray) -> np.ndarray:
    """qkv [K, G + 2, H, D] for more shards than kv heads: each takes part of the queries, all of k
    and v."""
    if x.shape == shape:
        return x
    times = shape[0] // x.shape[0]
    q = x[:, :-2].reshape(shape[0], shape[1] - 2, *shape[2:])
    return np.concatenate([q, np.repeat(x[:, -2:], times, axis=0)], axis=1)


def make_runner(
    buckets: Seq[Bucket] | None = SMALL,
    *,
    tp: int = 1,
    seed: int = 0,
    strict: bool = False,
    speculation: Callable[[Any], LoadedDrafter] | None = None,
    params: Any = None,
    files: ProgramFiles | None = None,
    family: Family = LLAMA,
    arch: Arch = ARCH,
    **options: Any,
) -> ModelRunner:
    """A runner of a tiny model; ``buckets`` None takes the default ladder; ``speculation`` is made
    on the mesh; ``params`` are by default those of ``seed``."""
    mesh = make_mesh(tp)
    return ModelRunner(
        family,
        arch,
        tiny_params(mesh, seed, family=family, arch=arch) if params is None else params,
        mesh,
        EngineConfig.of(**{**OPTIONS, **options}),
        rules=RULES,
        ladder=None if buckets is None else Ladder(buckets=tuple(buckets)),
        speculation=None if speculation is None else speculation(mesh),
        strict=strict,
        files=files or programs.kept(),
    )


@lru_cache(maxsize=8)
def shared(buckets: tuple[Bucket, ...] | None = SMALL, **options: Any) -> ModelRunner:
    """A runner that several tests use; they leave it as they found it."""
    return make_runner(buckets, **options)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One generation to run."""

    prompt: Seq[int]
    n: int = 8
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    seed: int = 0
    eos_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Live:
    """A job in progress."""

    job: Job
    seq: Sequence
    pages: np.ndarray
    given: int
    loaded: bool = False
    held: int = 0
    """Drafts that the device left in the slot."""
    rows: list[tuple[StepResult, int]] = field(default_factory=list)
    prompt_scores: list[Any] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.seq.n_output >= self.job.n


Drafter = Callable[[Sequence, int], Seq[int]]
"""(sequence, most drafts) -> drafts."""


class Rig:
    """Runs jobs to the end on a runner."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        seed: int = 0,
        chunk: int = 0,
        depth: int = 0,
        drafter: Drafter | None = None,
        device: str = "",
        pick: float = 1.0,
        bucket: Callable[[StepPlan], Bucket | None] = lambda plan: None,
    ) -> None:
        self.runner, self.depth, self.drafter, self.pick = runner, depth, drafter, pick
        self.chunk = chunk
        self.device = device
        """Drafts of the device: "all" of them in every step, "some" in some, "" none."""
        self.bucket = bucket
        self.rng = np.random.default_rng(seed)
        self.n_steps = 0
        self.accepted: list[int] = []
        self.tried: list[int] = []
        """Tokens of each decode row: what it could draw at most."""

    def run(self, jobs: Seq[Job]) -> list[list[int]]:
        """The output tokens of every job."""
        lives = self._admit(jobs)
        flight: deque[tuple[InFlight, list[Live]]] = deque()
        while not all(live.done for live in lives):
            plan, of_row = self._plan([live for live in lives if not live.done])
            flight.append((self.runner.launch(plan, self.bucket(plan)), of_row))
            while len(flight) > self.depth:
                self._apply(*flight.popleft())
        while flight:
            self._apply(*flight.popleft())
        self.lives = lives
        return [live.seq.tokens[live.seq.n_prompt :][: live.job.n] for live in lives]

    def _admit(self, jobs: Seq[Job]) -> list[Live]:
        limits = self.runner.limits
        per = (limits.n_pages - 1) // limits.n_slots
        pages = 1 + self.rng.permutation(limits.n_pages - 1)
        slots = self.rng.permutation(limits.n_slots)
        lives = []
        for i, job in enumerate(jobs):
            request = Request(
                id=str(i), prompt_ids=tuple(job.prompt), params=job.params, eos_ids=job.eos_ids
            )
            seq = Sequence(
                request=request,
                index=0,
                seed=job.seed,
                tokens=list(job.prompt),
                n_prompt=len(job.prompt),
                max_len=len(job.prompt) + job.n,
                slot=int(slots[i]),
            )
            lives.append(Live(job, seq, pages[i * per : (i + 1) * per], given=len(job.prompt)))
        return lives

    def _plan(self, lives: list[Live]) -> tuple[StepPlan, list[Live]]:
        n_draft = self._n_draft()
        picked = [live for live in lives if self.rng.random() < self.pick] or lives[:1]
        decode, prefill, loads = [], [], []
        room, limits = self.runner.limits.max_prefill_tokens, self.runner.limits
        for live in picked:
            seq = live.seq
            if seq.scheduled >= live.given:
                decode.append((self._decode_row(live), live))
            elif room and len(prefill) < min(limits.max_prefill_rows, 4):
                n = min(room, self._chunk(), live.given - seq.scheduled)
                room -= n
                prefill.append((self._prefill_row(live, n), live))
                if not live.loaded:
                    live.loaded = True
                    params = live.job.params
                    asks = [name in params.extra_args for name in limits.slot_features]
                    if params.loaded or any(asks):
                        loads.append(
                            SlotLoad(
                                slot=seq.slot,
                                tokens=list(seq.tokens),
                                n_prompt=seq.n_prompt,
                                params=params,
                                vocab_row=seq.slot if params.needs_vocab_row else -1,
                            )
                        )
        rows = [*decode, *prefill]
        plan = StepPlan(
            id=self.n_steps,
            rows=tuple(row for row, _ in rows),
            page_table_RM=self._table(rows, n_draft),
            loads=tuple(loads),
            n_draft=n_draft,
        )
        for row, live in rows:
            live.seq.scheduled += row.count
            live.held = n_draft if row.emits else 0
        self.n_steps += 1
        return plan, [live for _, live in rows]

    def _n_draft(self) -> int:
        if self.device == "all" or (self.device and self.rng.random() < 0.7):
            return self.runner.limits.device_drafts
        return 0

    def _chunk(self) -> int:
        return (
            self.chunk if self.chunk > 0 else int(self.rng.integers(1, 20)) if self.chunk else 10**6
        )

    def _prefill_row(self, live: Live, n: int) -> RowPlan:
        seq = live.seq
        at = seq.scheduled
        emits, scores = at + n == live.given, live.job.params.prompt_logprobs is not None
        return RowPlan(
            choice=seq.choice,
            slot=seq.slot,
            start=at,
            count=n,
            from_slot=False,
            tokens=seq.tokens[at : at + n],
            emits=emits,
            next_token=-1 if emits else seq.tokens[at + n],
            targets=seq.tokens[at + 1 : min(at + n + 1, seq.n_prompt)] if scores else (),
        )

    def _decode_row(self, live: Live) -> RowPlan:
        seq = live.seq
        drafts: Seq[int] = ()
        if self.drafter is not None:
            drafts = tuple(self.drafter(seq, self.runner.limits.max_drafts))
        elif self.device:
            n = live.held if self.device == "all" else int(self.rng.integers(0, live.held + 1))
            drafts = (-1,) * n
        return RowPlan(
            choice=seq.choice,
            slot=seq.slot,
            start=seq.scheduled,
            count=1 + len(drafts),
            from_slot=True,
            drafts=drafts,
        )

    def _table(self, rows: list[tuple[RowPlan, Live]], n_draft: int) -> np.ndarray:
        Z = self.runner.limits.page_size
        most = self.runner.limits.max_model_len // Z
        need = [min(-(-(row.start + row.count + n_draft) // Z), most) for row, _ in rows]
        table = np.zeros((len(rows), max(need)), np.int32)
        for r, (_, live) in enumerate(rows):
            table[r, : need[r]] = live.pages[: need[r]]
        return table

    def _apply(self, flight: InFlight, of_row: list[Live]) -> None:
        result = self.runner.collect(flight)
        assert np.all(result.finite_R)
        for r, (row, live) in enumerate(zip(flight.plan.rows, of_row, strict=True)):
            n_ok = int(result.n_ok_R[r])
            live.rows.append((result, r))
            if r in result.prompt:
                live.prompt_scores.append(result.prompt[r])
            if not row.emits:
                assert n_ok == 0
                continue
            if row.from_slot:
                live.seq.scheduled -= row.count - n_ok
                self.accepted.append(n_ok)
                self.tried.append(row.count)
            live.seq.tokens.extend(int(t) for t in result.tokens_RJ[r, :n_ok])


def prompts(n: int, seed: int = 0, low: int = 1, high: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, ARCH.V, int(rng.integers(low, high))).tolist() for _ in range(n)]


def jobs(n: int, seed: int = 0, **params: Any) -> list[Job]:
    """n jobs with prompts and seeds of their own."""
    return [
        Job(prompt=p, seed=100 * seed + i, params=SamplingParams(max_tokens=64, **params))
        for i, p in enumerate(prompts(n, seed))
    ]


def with_params(job: Job, **params: Any) -> Job:
    return replace(job, params=SamplingParams(max_tokens=64, **params))
