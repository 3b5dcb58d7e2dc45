"""The model runner: launches plans on the device in order and collects numpy results.

It owns the parameters, the device state and the programs, and is the only caller of a compiled step. One packed
buffer goes down per step and one comes up; ``launch`` returns while the device works and ``collect`` waits for that
step alone::

    launch k+1:  pack | slot loads | step(params, state, buf)      device: step k | step k+1
    collect k:   wait for out k, slice its rows                            ^ still running
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jserve import heap
from jserve.config import CacheOptions, EngineConfig
from jserve.errors import ConfigError, WeightsError
from jserve.faults import point
from jserve.model import decoder, feature_states
from jserve.model.arch import Arch
from jserve.model.dot import forms_for_hopper, paths
from jserve.model.family import Family
from jserve.model.native import chosen
from jserve.model.param_spec import dtype_of
from jserve.model.shard import ShardRules
from jserve.model.slots import SlotState, load_buffers, picks_buffer, text_buffers
from jserve.model.step import DeviceState, StepOut
from jserve.model.view import Bucket, numpy_views
from jserve.ports import InFlight
from jserve.runner import results
from jserve.runner.batch import Packer, StepBatch
from jserve.runner.buckets import Ladder, Needs
from jserve.runner.compiler import Compiler
from jserve.runner.experts import ExpertBalancer, check_experts
from jserve.runner.memory import GIB, DeviceMemory
from jserve.runner.moves import Leaving, PageMover, identity
from jserve.runner.program_files import ProgramFiles
from jserve.runner.programs import Programs, Progress, compile_options, starting, step_name
from jserve.runner.rehearsal import GREEDY, rehearsal
from jserve.runner.sizes import sizes_of, step_model
from jserve.runner.spill import Spill, open_spill
from jserve.runner.state import state_maker
from jserve.runner.warmup import WarmUp
from jserve.runner.weights import Leaf, WeightUpdate, delete_leaves, own_copy, to_devices, to_host
from jserve.sampling import SamplingParams
from jserve.speculation.drafters.load import LoadedDrafter
from jserve.types import PageFetch, SlotLoad, StepPlan, StepResult
from jserve.weights.adapters import AdapterDelta
from jserve.weights.place import tp_size
from jserve.weights.source import resolve
from jserve.working import working_on


@dataclass(slots=True, kw_only=True)
class _Launched:
    """A step on the device and how its rows were laid out."""

    batch: StepBatch
    out: StepOut
    leaving: list[Leaving]
    """Pages on their way to host memory."""


class ModelRunner:
    """Runs steps of one model on one mesh. Implements ``ports.Runner``.

    Args:
        family: the model family.
        arch: its dimensions.
        params: the tree of ``StepModel.specs``, placed on ``mesh`` by ``rules``. The runner owns these
            arrays: ``update_weights`` overwrites them.
        mesh: Auto axes; one device is a mesh too.
        config: options of the cache, the scheduler and the device are read.
        rules: logical axis to mesh axis.
        ladder: buckets; by default those of the options.
        speculation: what drafts on the device; by default nothing does.
        penalises: as in ``sizes_of``.
        strict: a compile after start raises instead of warning.
        progress: called with (stage, done, total) while starting.
        files: compiled programs of earlier starts; those of this one are added.
        trained: layouts of the arrays that ``params`` are a copy of, by parameter: updates from such compile nothing.
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
        speculation: LoadedDrafter | None = None,
        penalises: bool = False,
        strict: bool = False,
        progress: Progress | None = None,
        files: ProgramFiles | None = None,
        trained: Mapping[str, Leaf] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        rules = rules or ShardRules()
        self.params, self.speculation = params, speculation
        self._asleep: Any = None
        """The weights in host memory while they are on no device."""
        self._shared: dict[str, jax.Array] = {}
        """A caller's arrays that are the weights, by name; {}: the weights are the engine's own."""
        self._before: tuple[Any, dict[str, jax.Array]] | None = None
        """The weights of before the last update and those of them that are shared, while plans need them."""
        self._clock = clock
        device, tp = mesh.devices.flat[0], tp_size(mesh, rules)
        check_experts(config.device, family, arch, rules)
        dtype = dtype_of(params, family.specs(arch, tp))
        capability = getattr(device, "compute_capability", "")
        kernels, self._no_kernels = chosen(
            config.device.kernels,
            device.platform,
            dtype,
            capability,
            quantised=bool(forms_for_hopper(params)),
        )
        self.sizes = sizes_of(
            arch,
            config,
            dtype=dtype,
            platform=device.platform,
            capability=capability,
            tp=tp,
            weight_bytes=_bytes_of_one_device(self._all_params()),
            memory=DeviceMemory.of(device),
            speculation=speculation,
            penalises=penalises,
            kernels=kernels,
            shared_pass=family.forward is decoder.forward,
        )
        self.memory, self.limits = self.sizes.memory, self.sizes.limits
        self.ladder = ladder or self.sizes.ladder
        self.model = step_model(self.sizes, family, mesh, rules, speculation)
        options = compile_options(device.platform, config.device.cuda_graphs)
        compiler = Compiler(self.model, files)
        self.programs = Programs(
            self.model,
            self.ladder.buckets,
            threads=config.device.compile_threads,
            strict=strict,
            progress=progress,
            options=options,
            compiler=compiler,
        )
        self._overwrite = WeightUpdate(self.model, options, compiler, trained=trained)
        self._experts = (
            ExpertBalancer(self.model, config.device, compiler) if self.model.experts else None
        )
        self._packer = Packer(
            dims=self.sizes.dims,
            n_pages=self.limits.n_pages,
            ladder=self.ladder,
            fields_of=self.model.fields,
            plan_attention=self.sizes.attention.plan,
        )
        n_host = self.limits.n_host_pages
        self._mover = PageMover(self.model, n_host, compiler) if n_host else None
        self._spill = self._open_disk(config.cache)
        self._new_state = state_maker(self.model, compiler)
        self.state: DeviceState = self._fresh_state()
        self._busy_until = 0.0
        self._get_ready(progress or (lambda *_: None))

    @property
    def plain_buckets(self) -> list[Bucket]:
        """Those whose times say how long a step takes: no drafts, and nothing that a row asks for."""
        return [b for b in self.ladder.plain if b.J == 1]

    @point("runner.launch")
    def launch(self, plan: StepPlan, bucket: Bucket | None = None) -> InFlight:
        """Start a step and return. ``bucket`` overrides the choice (tests, benchmarks).

        Raises:
            ValueError: the plan is outside the limits; nothing was started.
        """
        self.programs.check()
        batch = self._packer.pack(plan, bucket)
        leaving = self._move(plan)
        for item in plan.loads:
            self._load(item)
        if self._experts is not None:
            assert self.state.experts is not None
            self.params, experts = self._experts.before_step(self.params, self.state.experts)
            self.state = replace(self.state, experts=experts)
        out = self._run(batch, old_weights=plan.old_weights)
        # Only now: the time of a step is the device's alone, whether or not another step hides the host's.
        now = self._clock()
        if not self.model.on_cpu:  # there the arrays are in host memory
            for array in results.wanted(plan, batch, out):
                array.copy_to_host_async()
        handle = _Launched(batch=batch, out=out, leaving=leaving)
        return InFlight(plan=plan, launched=now, handle=handle)

    def _load(self, item: SlotLoad) -> None:
        slots, dims = self.state.slots, self.model.dims
        if item.params.needs_vocab_row or item.params.bans_words:
            for buf in load_buffers(item, dims.V):
                slots = self.programs.load(slots, buf)
        if dims.text:
            for buf in text_buffers(item, dims.text):
                slots = self.programs.load_text(slots, buf)
        if item.params.logprob_token_ids:
            slots = self.programs.load_picks(slots, picks_buffer(item, dims.picks))
        for name in self.programs.stateful.keys() & item.params.extra_args.keys():
            slots = self._load_state(slots, name, item)
        self.state = replace(self.state, slots=slots)

    def _load_state(self, slots: SlotState, name: str, item: SlotLoad) -> SlotState:
        load, array = self.programs.load_state(name), slots.states[name]
        for buf in feature_states.load_buffers(item):
            array = load(array, buf)
        return replace(slots, states={**slots.states, name: array})

    @point("runner.collect")
    def collect(self, flight: InFlight) -> StepResult:
        """Wait for a launched step and give its rows in plan order."""
        launched: _Launched = flight.handle
        with working_on(step_name(launched.batch.bucket)):
            self._wait(launched.out)
        if self._mover is not None:
            self._mover.land(launched.leaving)
        now = self._clock()
        began = max(flight.launched, self._busy_until)
        self._busy_until = now
        took_us = (now - began) * 1e6
        return results.result_of(flight.plan, launched.batch, launched.out, took_us)

    def is_done(self, flight: InFlight) -> bool:
        """True: ``collect`` would not wait."""
        packed: Any = flight.handle.out.packed_RX
        return packed.is_ready()

    @point("runner.wait")
    def _wait(self, out: StepOut) -> None:
        """Until the device has done a step."""
        np.asarray(out.packed_RX)

    def update_weights(
        self,
        source: Any,
        *,
        partial: bool = False,
        donate: bool = False,
        alias: bool = False,
        beside: bool = False,
    ) -> str:
        """Copy other weights over those in use, for the next launch on; nothing compiles.

        KV written with the old weights stays; the caller sees to it.

        Args:
            source: as ``WeightUpdate`` takes it.
            partial: parameters that ``source`` lacks keep their values.
            donate: delete the jax arrays of ``source`` afterwards, where it is a tree.
            alias: the jax arrays of that tree are the weights from now on, until others come.
            beside: the old weights stay, for plans with ``old_weights``, until ``end_beside``.

        Returns:
            The stamp of the files of a directory, which are all of the weights then; else "".

        Raises:
            WeightsError: a leaf does not fit; ``field`` is ``params.<path>``, and the old weights stay.
            ConfigError: a directory that is none, or of another model.
        """
        before = (self.params, self._shared)
        if beside:
            self._check_beside(copies=not alias)
        stamp = self._take(source, partial=partial, donate=donate, alias=alias, copies=beside)
        self._before = before if beside else None
        heap.trim()
        return stamp

    def _check_beside(self, *, copies: bool) -> None:
        """Raises WeightsError where there cannot be two versions of weights at once."""
        why = ""
        if self._experts is not None:
            why = "experts of this engine move"
        elif self.speculation is not None:
            why = "its drafter goes with one version"
        else:
            memory = DeviceMemory.of(self.model.mesh.devices.flat[0])
            room, needed = memory.total - memory.taken, _bytes_of_one_device(self.params)
            if copies and needed > room:
                sizes = f"{needed / GIB:.2f} GiB of a device, {max(room, 0) / GIB:.2f} are free"
                why = f"the other weights take {sizes}: lower memory_utilization, or finish"
        if why:
            raise WeightsError(f"running: no two versions of weights: {why}", field="running")

    def _take(self, source: Any, *, partial: bool, donate: bool, alias: bool, copies: bool) -> str:
        """``update_weights``; ``copies``: into new buffers, and the old ones keep their values."""
        if alias:
            self._share(source, partial=partial, donate=donate)
            return ""
        if partial and self._experts is not None:
            why = "experts that move are replaced together with all else"
            raise WeightsError(f"params: a partial update: {why}", field="params")
        whole = isinstance(source, str | Path) and not partial
        stamp = resolve(str(source)).stamp if whole else ""  # of before they are read
        reads = partial or isinstance(source, AdapterDelta)
        copies = copies or bool(self._shared)
        own = own_copy(self.params, read=reads) if copies else self.params
        self.params, self._shared = self._overwrite(own, source, some=partial), {}
        if self._experts is not None:
            self.state = replace(self.state, experts=self._experts.initial())
        if donate:
            delete_leaves(source, self.params)
        return stamp

    def _share(self, source: Any, *, partial: bool, donate: bool) -> None:
        """Raises WeightsError: ``source`` cannot be used as it is."""
        for name, given in (("partial", partial), ("donate", donate)):
            if given:
                raise WeightsError(f"{name}: nothing is copied (alias)", field=name)
        if self._experts is not None:
            raise WeightsError("alias: experts of this engine move", field="alias")
        self.params, self._shared = self._overwrite.shared(source)

    def weights_fault(self) -> str:
        """The reason that there are no weights any more; "": there are."""
        shared = [*self._shared.items(), *(self._before[1].items() if self._before else ())]
        gone = [name for name, leaf in shared if leaf.is_deleted()]
        return f"params.{gone[0]}: who shares it has deleted it (alias)" if gone else ""

    def end_beside(self) -> None:
        """Give the memory of the old weights back, but for arrays that are a caller's. No step with them is in
        flight."""
        if self._before is not None and not self._before[1]:
            for leaf in jax.tree.leaves(self._before[0]):
                leaf.delete()
        self._before = None
        heap.trim()

    def sleep(self, parts: Sequence[str]) -> None:
        """Give device memory back: ``kv`` is lost, ``weights`` go to host memory. No step is in flight.

        Raises:
            WeightsError: shared weights were deleted.
        """
        if "weights" in parts and (why := self.weights_fault()):
            raise WeightsError(why, field="params")
        if "kv" in parts:
            self._drop_state()
        if "weights" in parts:
            self._asleep, self._shared = to_host(self.params, delete=not self._shared), {}
        heap.trim()

    def wake(self, parts: Sequence[str]) -> None:
        """Take it again: KV of zeros, the weights as they were. Nothing compiles."""
        if "weights" in parts:
            self.params, self._asleep = to_devices(self.params, self._asleep), None
        if "kv" in parts:
            self.state = self._fresh_state()

    def _drop_state(self) -> None:
        for leaf in jax.tree.leaves(self.state):
            if not leaf.is_deleted():
                leaf.delete()

    @point("runner.reset")
    def reset(self) -> None:
        """A new zeroed device state, after a step failed and took the donated one with it, and a
        made-up step to see that the device works.

        Raises:
            Exception: it does not; whatever JAX says.
        """
        self._drop_state()  # there is no room for two pools
        self.state = self._fresh_state()
        if not self.weights_fault():
            self._rehearse(self.ladder.buckets[0], GREEDY)

    def report(self) -> dict[str, Any]:
        """The device side's lines of the start banner."""
        mesh, server = self.model.mesh, self._spill.server if self._spill is not None else None
        return {
            "device": f"{mesh.devices.size} x {mesh.devices.flat[0].device_kind}",
            "sharding": self.model.rules.described(mesh.shape),
            "backend": self.model.backend.name,
            "no_better_backend": self.sizes.no_better_attention,
            "dtype": str(self.model.dtype),
            "kv_dtype": self.sizes.kv_name,
            "kernels": self.sizes.kernels or "xla",
            "no_kernels": self._no_kernels,
            "paths": paths(self.params, self.sizes.kernels, {b.T for b in self.ladder.buckets}),
            "programs": len(self.programs),
            "programs_loaded": self.programs.n_loaded,
            "kv_transfer_address": server.address if server is not None else None,
            **self.memory.report(),
        }

    def counters(self) -> dict[str, float]:
        """The device side's counters for /metrics."""
        disk = {} if self._spill is None else self._spill.counters()
        experts = {} if self._experts is None else self._experts.counters()
        late = {"compiles_after_ready_total": float(self.programs.late_compiles)}
        return late | disk | experts

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

    def export(self, pages: list[tuple[int, bytes]]) -> int:
        """Begin to write device pages (page, digest) for other engines."""
        assert self._mover is not None, "there is no disk tier"
        return self._mover.export(self.state.kv, pages)

    def exported(self) -> int:
        """Calls of ``export`` whose pages are written."""
        return 0 if self._spill is None else self._spill.n_exported

    def page_s(self) -> float:
        return 0.0 if self._spill is None else self._spill.page_s

    def flush(self, pages: list[tuple[int, bytes]]) -> None:
        """The last call: write device pages (page, digest) to disk."""
        if self._mover is not None:
            self._mover.flush(self.state.kv, pages)

    def rebalance_experts(self, load_LE: np.ndarray | None = None) -> None:
        """Begin to move experts to where loads are even, before each of the next steps some of them.

        Args:
            load_LE: tokens of each expert, of the layers that have experts; by default those counted since the
                last time.

        Raises:
            ConfigError: experts of this engine do not move.
        """
        if self._experts is None or not self._experts.move_experts:
            raise ConfigError("experts move with enable_eplb only", field="enable_eplb")
        self._experts.rebalance(load_LE)

    def _fresh_state(self) -> DeviceState:
        """Zeroed, but for the places where experts are."""
        state = self._new_state()
        return state if self._experts is None else replace(state, experts=self._experts.state())

    def _open_disk(self, options: CacheOptions) -> Spill | None:
        mover = self._mover
        n = 0 if mover is None else mover.page_nbytes
        spill = open_spill(options, n, lambda: identity(self.model, self._all_params()))
        if mover is not None:
            mover.spill = spill
        return spill

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
        self.state = replace(self.state, kv=kv)
        return leaving

    def _run(self, batch: StepBatch, *, old_weights: bool = False) -> StepOut:
        step, params = self.programs.step(batch.bucket), self._all_params()
        if old_weights:
            assert self._before is not None, "the weights of before are gone"
            params = self._before[0]
        self.state, out = step(params, self.state, batch.buf)
        return out

    def _all_params(self) -> Any:
        """As the steps take them."""
        if self.speculation is None:
            return self.params
        return {"target": self.params, "drafter": self.speculation.params}

    def _rehearse(self, bucket: Bucket, params: SamplingParams) -> float:
        """Seconds of a step of made-up rows, from its launch until it is done; not from the end of the launch, after
        which the host may be held up until nothing is left to wait for. Slots and pages of others stay as they
        are, and nothing is remembered of what slots hold."""
        batch = self._made_up(bucket, params)
        with working_on(step_name(batch.bucket)):
            began = self._clock()
            self._wait(self._run(batch))
        return self._clock() - began

    def _made_up(self, bucket: Bucket, params: SamplingParams) -> StepBatch:
        plan = rehearsal(bucket, self.sizes.dims, params)
        bucket = bucket if bucket in self.programs.buckets else self.ladder.choose(Needs.of(plan))
        batch = self._packer.pack(plan, bucket)
        views = numpy_views(batch.buf, self.model.fields(bucket))
        views["slot_R"][...] = self.sizes.dims.C
        self._packer.forget()
        return batch

    def made_up(self, bucket: Bucket) -> tuple[Any, DeviceState, np.ndarray]:
        """(parameters, state, buffer) of a step of greedy rows that fill ``bucket``, as its program takes them. Who
        donates the state puts another in its place."""
        return self._all_params(), self.state, self._made_up(bucket, GREEDY).buf

    def _get_ready(self, progress: Progress) -> None:
        """Run every program, tell the limits how long that took, and allow no compile any more."""
        if self.model.on_cpu:
            heap.keep_freed()
        warm_up = WarmUp(run=self._rehearse, clock=self._clock, progress=progress)
        times = warm_up.times(
            self.ladder.sizes,
            cpu=self.model.on_cpu,
            drafts=self.limits.max_drafts > 0,
        )
        self.limits = dataclasses.replace(
            self.limits, step_times=times, page_move_s=self._time_moves()
        )
        self._rehearse_experts()
        self.programs.seal()
        heap.collect_and_trim()

    def _rehearse_experts(self) -> None:
        """Run the programs of experts once, and forget the loads of made-up rows."""
        if self._experts is not None:
            assert self.state.experts is not None
            self.params = self._experts.rehearse(self.params, self.state.experts)
            self.state = replace(self.state, experts=self._experts.initial())

    def _time_moves(self) -> float:
        if self._mover is None:
            return 0.0
        kv, seconds = self._mover.seconds_per_page(self.state.kv, self._clock)
        self.state = replace(self.state, kv=kv)
        return seconds


def _bytes_of_one_device(params: Any) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))
