"""ModelRunner: takes plans, runs them on the device in order, gives numpy back.

Owns the parameters, the device state and the programs, and is the only caller of a compiled step.
Must not know a scheduler. One packed buffer goes down per step and one comes up; ``launch`` returns
while the device works and ``collect`` waits for that step alone::

    launch k+1:  pack | slot loads | step(params, state, buf)      device: step k | step k+1
    collect k:   wait for out k, slice its rows                            ^ still running
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.faults import point
from jserve.model.attention import backend as find_backend
from jserve.model.family import Arch, Family
from jserve.model.shard import ShardRules
from jserve.model.sinks import with_sinks
from jserve.model.slots import load_buffers
from jserve.model.step import DeviceState, StepModel, StepOut
from jserve.model.view import LOGPROBS, Bucket
from jserve.ports import InFlight, RunnerLimits, StepTime
from jserve.runner.batch import Packer, StepBatch, score_targets
from jserve.runner.buckets import Ladder
from jserve.runner.disk import DiskStore
from jserve.runner.drafts import Speculation
from jserve.runner.memory import DeviceMemory, MemoryPlan, plan_memory
from jserve.runner.moves import Leaving, PageMover, host_pages, identity
from jserve.runner.programs import Programs, Progress, starting
from jserve.runner.sizes import (
    draft_page_bytes,
    drafting_limits,
    kv_dtype,
    ladder_of,
    longest_pages,
    runner_limits,
    step_dims,
    stored_kv,
    window_of,
)
from jserve.runner.spill import Spill
from jserve.runner.state import state_maker
from jserve.runner.warmup import WarmUp
from jserve.types import PageFetch, PromptLogprobs, StepPlan, StepResult


@dataclass(slots=True, kw_only=True)
class _Launched:
    """A step on the device and how its rows were laid out."""

    batch: StepBatch
    out: StepOut
    wants_top: bool
    leaving: list[Leaving]
    """Pages on their way to host memory."""


class ModelRunner:
    """Runs steps of one model on one mesh. Implements ``ports.Runner``.

    Args:
        family: the model family.
        arch: its dimensions.
        params: the tree of ``family.specs(arch, tp)``, placed on ``mesh`` by ``rules``.
        mesh: Auto axes; one device is a mesh too.
        config: options of the cache, the scheduler and the device are read.
        rules: logical axis to mesh axis.
        ladder: buckets; by default those of the options.
        speculation: what drafts on the device; by default nothing does.
        strict: a compile after start raises instead of warning.
        progress: called with (stage, done, total) while starting.
        clock: monotonic seconds.

    Raises:
        ConfigError: an option the device side cannot honour; ``field`` is its name.
    """

    @starting()
    def __init__(
        self,
        family: Family,
        arch: Arch,
        params: Any,
        mesh: Mesh,
        config: EngineConfig,
        *,
        rules: ShardRules | None = None,
        ladder: Ladder | None = None,
        speculation: Speculation | None = None,
        strict: bool = False,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        rules = rules or ShardRules()
        self.params = params
        self._clock = clock
        self._dtype = jax.tree.leaves(params)[0].dtype
        platform = mesh.devices.flat[0].platform
        attention = find_backend(config.device.attention_backend, platform)
        arch = with_sinks(arch, attention, config.device.attention_sinks)
        self._kv_dtype = kv_dtype(config, self._dtype)
        stored = stored_kv(config, attention, self._dtype, arch, speculation)
        self.speculation = speculation
        dims = step_dims(arch, config, 0 if speculation is None else speculation.n_draft)
        tp = 1 if rules.kv_heads is None else mesh.shape.get(rules.kv_heads, 1)
        window = window_of(arch, speculation)
        self.memory: MemoryPlan = plan_memory(
            arch=arch,
            backend=attention,
            dims=dims,
            itemsize=stored.itemsize,
            tp=tp,
            weight_bytes=sum(
                x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(self._all_params())
            ),
            options=config.cache,
            memory=DeviceMemory.of(mesh.devices.flat[0]),
            draft_page_bytes=draft_page_bytes(speculation, attention, dims, stored.itemsize, tp),
            longest=longest_pages(arch, config, dims, window),
        )
        self.model = StepModel(
            family=family,
            arch=arch,
            backend=attention,
            dims=dims,
            mesh=mesh,
            rules=rules,
            n_pages=self.memory.n_pages,
            kv_dtype=stored,
            dtype=self._dtype,
            drafter=None if speculation is None else speculation.drafter,
        )
        n_host = host_pages(config.cache.host_memory_gb, self.memory.page_bytes * tp)
        limits = runner_limits(arch, config, dims, self.memory.n_pages, n_host, window)
        self.limits: RunnerLimits = drafting_limits(limits, config, speculation, platform)
        tree = () if speculation is None else speculation.tree
        synthetic = config.speculative.method == "synthetic"
        self.ladder = ladder or ladder_of(self.limits, tree, masks_drafts=synthetic)
        self.programs = Programs(
            self.model,
            self.ladder.buckets,
            threads=config.device.compile_threads,
            strict=strict,
            progress=progress,
        )
        self._packer = Packer(
            dims=dims,
            n_pages=self.memory.n_pages,
            ladder=self.ladder,
            fields_of=self.model.fields,
            plan_attention=attention.plan,
        )
        self._mover = PageMover(self.model, n_host) if n_host else None
        self._spill = self._open_disk(config)
        self._new_state = state_maker(self.model)
        self.state: DeviceState = self._new_state()
        self._busy_until = 0.0
        times = self._warm_up(progress or (lambda *_: None))
        self.limits = dataclasses.replace(
            self.limits, step_times=times, page_move_s=self._time_moves()
        )
        self.programs.seal()

    @property
    def plain_buckets(self) -> list[Bucket]:
        """Those whose times say how long a step takes: no drafts, scores or masks."""
        return [b for b in self.ladder.buckets if b.J == 1 and not (b.score or b.mask)]

    @point("runner.launch")
    def launch(self, plan: StepPlan, bucket: Bucket | None = None) -> InFlight:
        """Start a step and return. ``bucket`` overrides the choice (tests, benchmarks).

        Raises:
            ValueError: the plan is outside the limits; nothing was started.
        """
        now = self._clock()
        self.programs.check()
        batch = self._packer.pack(plan, bucket)
        leaving = self._move(plan)
        for item in plan.loads:
            for buf in load_buffers(item, self.model.dims.V):
                slots = self.programs.load(self.state.slots, buf)
                self.state = DeviceState(kv=self.state.kv, slots=slots)
        out = self._run(batch)
        wants_top = bool(batch.flags & LOGPROBS)
        for array in _fetched(out, wants_top):
            array.copy_to_host_async()
        return InFlight(
            plan=plan,
            launched=now,
            handle=_Launched(batch=batch, out=out, wants_top=wants_top, leaving=leaving),
        )

    @point("runner.collect")
    def collect(self, flight: InFlight) -> StepResult:
        """Wait for a launched step and give its rows in plan order."""
        launched: _Launched = flight.handle
        bucket, out = launched.batch.bucket, launched.out
        packed_RX = np.asarray(out.packed_RX)
        if self._mover is not None:
            self._mover.land(launched.leaving)
        now = self._clock()
        began = max(flight.launched, self._busy_until)
        self._busy_until = now
        rows = _plan_rows(bucket, launched.batch.n_decode, len(flight.plan.rows))
        picked_RX, J = packed_RX[rows], bucket.J
        top = (out.top_ids_RJL, out.top_logprobs_RJL) if launched.wants_top else (None, None)
        return StepResult(
            n_ok_R=picked_RX[:, 0],
            finite_R=picked_RX[:, 1] > 0,
            tokens_RJ=picked_RX[:, 2 : 2 + J],
            logprob_RJ=np.ascontiguousarray(picked_RX[:, 2 + J :]).view(np.float32),
            top_ids_RJL=None if top[0] is None else np.asarray(top[0])[rows],
            top_logprobs_RJL=None if top[1] is None else np.asarray(top[1])[rows],
            prompt={} if out.scores is None else _prompt_logprobs(flight.plan, launched),
            device_us=(now - began) * 1e6,
        )

    def update_params(self, params: Any) -> None:
        """Serve other weights from the next launch on: same shapes, types and shardings, so nothing
        compiles.

        KV written with the old weights stays; the caller empties the prefix cache.

        Raises:
            ConfigError: a parameter differs in shape, type or sharding; ``field`` is its path.
        """
        _check_like(params, self.params)
        self.params = params

    @point("runner.reset")
    def reset(self) -> None:
        """A new zeroed device state, after a step failed and took the donated one with it, and a step
        of padding to see that the device works.

        Raises:
            Exception: it does not; whatever JAX says.
        """
        for leaf in jax.tree.leaves(self.state):
            if not leaf.is_deleted():
                leaf.delete()  # there is no room for two pools
        self.state = self._new_state()
        self._packer.forget()
        self._run_to_its_end(self.ladder.buckets[0])

    def report(self) -> dict[str, Any]:
        """What the start banner says of the device side."""
        device = self.model.mesh.devices.flat[0]
        return {
            "device": f"{self.model.mesh.devices.size} x {device.device_kind}",
            "backend": self.model.backend.name,
            "dtype": str(self._dtype),
            "kv_dtype": str(self._kv_dtype),
            "programs": len(self.programs),
            **self.memory.report(),
        }

    def counters(self) -> dict[str, float]:
        """What /metrics shows of the device side."""
        disk = {} if self._spill is None else self._spill.counters()
        return {"compiles_after_ready_total": float(self.programs.late_compiles)} | disk

    def stored(self) -> list[bytes] | None:
        """Digests of the pages on disk, None when there is no disk tier."""
        return None if self._spill is None else self._spill.store.digests()

    def fetch(self, asked: list[PageFetch]) -> None:
        """Begin to read pages from disk into host memory."""
        if self._mover is not None:
            self._mover.fetch(asked)

    def take_fetched(self) -> list[tuple[int, bool]]:
        """(ticket, found) of the reads that are over."""
        return [] if self._mover is None else self._mover.take_fetched()

    def farewell(self, pages: list[tuple[int, bytes]]) -> None:
        """The last call: write device pages (page, digest) to disk."""
        if self._mover is not None:
            self._mover.farewell(self.state.kv, pages)

    def _open_disk(self, config: EngineConfig) -> Spill | None:
        options = config.cache
        if not options.disk_dir:
            return None
        if self._mover is None:
            raise ConfigError(
                "disk_dir needs host_memory_gb, through which pages go", field="disk_dir"
            )
        try:
            store = DiskStore(
                Path(options.disk_dir),
                identity(self.model, self._all_params()),
                page_bytes=self._mover.page_nbytes,
                max_bytes=int(options.disk_gb * 2**30),
            )
        except OSError as error:
            raise ConfigError(
                f"disk_dir {error.filename}: {error.strerror}", field="disk_dir"
            ) from None
        self._mover.spill = Spill(store)
        return self._mover.spill

    def _move(self, plan: StepPlan) -> list[Leaving]:
        """Copy pages between device and host memory, as far as the plan asks for it."""
        if not plan.moves:
            return []
        if self._mover is None:
            raise ValueError("the plan moves pages and there is no host memory for them")
        pages = [move.page for move in plan.moves]
        if min(pages) < 1 or max(pages) >= self.limits.n_pages:
            raise ValueError(f"page out of range [1, {self.limits.n_pages - 1}] in a move")
        kv, leaving = self._mover.launch(self.state.kv, plan.moves)
        self.state = DeviceState(kv=kv, slots=self.state.slots)
        return leaving

    def _run(self, batch: StepBatch) -> StepOut:
        step = self.programs.step(batch.bucket)
        self.state, out = step(self._all_params(), self.state, batch.buf)
        return out

    def _all_params(self) -> Any:
        """As the steps take them."""
        if self.speculation is None:
            return self.params
        return {"target": self.params, "drafter": self.speculation.params}

    def _run_to_its_end(self, bucket: Bucket) -> None:
        """A step of padding."""
        jax.block_until_ready(self._run(self._packer.pack(_NOTHING, bucket)).packed_RX)

    def _warm_up(self, progress: Progress) -> tuple[StepTime, ...]:
        warm_up = WarmUp(run=self._run_to_its_end, clock=self._clock, progress=progress)
        return warm_up.times(
            self.ladder.buckets,
            cpu=self.model.mesh.devices.flat[0].platform == "cpu",
            drafts=self.limits.max_drafts > 0,
        )

    def _time_moves(self) -> float:
        if self._mover is None:
            return 0.0
        kv, seconds = self._mover.seconds_per_page(self.state.kv, self._clock)
        self.state = DeviceState(kv=kv, slots=self.state.slots)
        return seconds


_NOTHING = StepPlan(id=-1, rows=(), page_table_RM=np.zeros((0, 0), np.int32))


def _fetched(out: StepOut, wants_top: bool) -> list[jax.Array]:
    top = [out.top_ids_RJL, out.top_logprobs_RJL] if wants_top else []
    return [out.packed_RX, *top, *jax.tree.leaves(out.scores)]


def _plan_rows(bucket: Bucket, n_decode: int, n: int) -> np.ndarray:
    """Where the plan's rows are in the bucket."""
    rows = np.arange(n)
    rows[n_decode:] += bucket.D - n_decode
    return rows


def _prompt_logprobs(plan: StepPlan, launched: _Launched) -> dict[int, PromptLogprobs]:
    scores = jax.tree.map(np.asarray, launched.out.scores)
    found, at = {}, 0
    for i, row in enumerate(plan.rows[launched.batch.n_decode :], launched.batch.n_decode):
        part = slice(at, at + len(score_targets(row)) if row.score else at)
        at += row.count
        if row.score:
            found[i] = PromptLogprobs(
                start=row.start,
                logprob_n=scores.logprob_P[part],
                rank_n=scores.rank_P[part],
                top_ids_nL=scores.top_ids_PL[part],
                top_logprobs_nL=scores.top_logprobs_PL[part],
            )
    return found


def _check_like(params: Any, old: Any) -> None:
    if jax.tree.structure(params) != jax.tree.structure(old):
        raise ConfigError("the parameter trees differ", field="params")
    for (path, new), was in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(old), strict=True
    ):
        name = jax.tree_util.keystr(path)
        if new.shape != was.shape or new.dtype != was.dtype:
            raise ConfigError(
                f"{name} is {new.dtype}{list(new.shape)}, not {was.dtype}{list(was.shape)}",
                field=name,
            )
        if not new.sharding.is_equivalent_to(was.sharding, new.ndim):
            raise ConfigError(f"{name} has another sharding than the weights in use", field=name)
