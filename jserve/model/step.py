"""One trip to the device: ``step(params, state, buf) -> (state, out)``.

It owns the order of a step (unpack, forward, logits where tokens are drawn, sample, accept, advance the slots), the
state that survives it and the packing of what comes back. It composes a family and an attention backend and knows
neither. A pure function, run under ``shard_map`` on every mesh, one device included; state is donated by the
caller.

Logits are computed where tokens are drawn (E places, ``jserve.model.draws``).
``out.packed_RX`` holds n_ok, 1 for sound logits (else 0, or the code of a feature's fault, ``feature_logits``), J
tokens and the bits of J log-probabilities per row.

With a drafter (``jserve.speculation.drafters.drafter``) ``params`` is {"target", "drafter"}, ``state.kv`` has its
layers after the target's, and a step of a bucket with ``n_draft`` shows it all tokens and leaves so
many drafts in the slots at the end. In other buckets, and without a drafter, nothing of this is in the
program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import register_dataclass

from jserve.errors import ConfigError
from jserve.kv_layout import KVLayer, KVLayout
from jserve.model import slots as slot_rows
from jserve.model.arch import Arch
from jserve.model.attention import AttentionBackend, LayerKV, check_layers
from jserve.model.attn_mesh import over_heads
from jserve.model.ctx import Ctx, Edit
from jserve.model.dot import skip_unread
from jserve.model.drawn import drawn
from jserve.model.draws import by_row, drawn_places, per_draw
from jserve.model.family import Family, Pass, check_layout
from jserve.model.feature_states import advanced
from jserve.model.mesh import MeshAxis, n_parts
from jserve.model.moe_places import ExpertState, state_shapes
from jserve.model.native import kernels
from jserve.model.points import entering, read_by, written_by
from jserve.model.sample import Chosen
from jserve.model.shard import Axes, ShardRules, abstract, padded, partitions
from jserve.model.slots import NONE, SlotState
from jserve.model.view import (
    PENALTY,
    Bucket,
    Field,
    StepDims,
    StepView,
    layout,
    unpack,
)
from jserve.model.vocab_part import WHOLE, VocabPart
from jserve.speculation.device.accepted_path import accepted, along, as_chain, straightened
from jserve.speculation.device.draft_loop import DraftContext, StepOutcome, leave_drafts
from jserve.speculation.device.verify import accept
from jserve.speculation.drafters.drafter import REPLICATED, Drafter, Target, kv_layout


@register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """Everything that survives a step; donated to it and replaced whole."""

    kv: list[LayerKV]
    """Of each layer, or each array that groups of layers share; a drafter's last (in an abstract state: their
    shapes, shardings or partitions)."""
    slots: SlotState
    experts: ExpertState | None = None
    """None: experts stay where they are, and nobody counts their tokens."""


@register_dataclass
@dataclass(frozen=True)
class StepOut:
    """The arrays that a step returns to the host."""

    packed_RX: jax.Array
    """int32[R, 2 + 2 J]."""
    top_ids_RJL: jax.Array
    top_logprobs_RJL: jax.Array
    extra: dict[str, Any]
    """The outputs of the bucket's features, by name."""
    prompt: dict[str, jax.Array]
    """[P, ...]: their values of prefill tokens, of those that give any."""
    rank_RJ: jax.Array | None = None
    """int32: ranks of the drawn tokens; None without ``StepDims.picks``, as ``picked_RJK``."""
    picked_RJK: jax.Array | None = None


def slot_shapes(dims: StepDims) -> Any:
    """The abstract ``SlotState``."""
    sizes = {"text": dims.text, "picks": dims.picks, "n_vocab_rows": dims.n_vocab_rows}
    return slot_rows.shapes(dims.C, dims.V, dims.drafts, **sizes, states=dims.states)


class PoolArray(NamedTuple):
    """One array of the KV pool on the whole mesh."""

    shape: tuple[int, ...]
    axis: MeshAxis
    """Mesh axes that its heads are split over; None: every device holds all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """The static part that all steps of an engine share; with a ``Bucket`` it determines a program."""

    family: Family
    arch: Arch
    backend: AttentionBackend
    dims: StepDims
    mesh: Mesh
    rules: ShardRules
    n_pages: int
    kv_dtype: Any
    """As the backend stores it."""
    dtype: Any
    drafter: Drafter | None = None
    experts: bool = False
    """The state has the places of experts, and counts the tokens of each."""
    logprobs_mode: str = "raw_logprobs"
    """Option ``logprobs_mode``."""
    kernels: str = ""
    """Level of the native kernels that compute products, attention and writes of KV; ``hopper``: a kernel computes
    products of few rows with weights in groups; empty: XLA computes all."""

    @property
    def on_cpu(self) -> bool:
        """False for an abstract mesh, too."""
        return isinstance(self.mesh, Mesh) and self.mesh.devices.flat[0].platform == "cpu"

    @property
    def axes(self) -> Axes:
        """Raises ConfigError for a rule that the mesh or the collectives cannot honour."""
        return Axes.of(self.rules, self.mesh.shape)

    @property
    def tp(self) -> int:
        """Devices that share the kv heads."""
        return n_parts(self.heads_axis, self.mesh.shape)

    @property
    def heads_axis(self) -> MeshAxis:
        """The mesh axes that arrays of kv heads are split over."""
        return self.rules.split("kv_heads", self.mesh.shape)

    @property
    def kv(self) -> KVLayout:
        Z, tp = self.dims.Z, self.tp
        kv = kv_layout(self.arch, self.drafter, page_size=Z, dtype=self.kv_dtype, tp=tp)
        return replace(kv, groups=self.dims.groups)

    @property
    def draft_rules(self) -> ShardRules:
        whole = self.drafter is None or self.drafter.replicated
        return REPLICATED if whole else self.rules.in_width

    @property
    def draft_axes(self) -> Axes:
        return Axes.of(self.draft_rules, self.mesh.shape)

    def draft_specs(self) -> Any:
        assert self.drafter is not None, "there is no drafter"
        split = self.draft_rules.split("kv_heads", self.mesh.shape) is not None
        specs = self.drafter.specs(self.tp if split else 1)
        return padded(specs, self.draft_rules, self.mesh.shape)

    def kv_arrays(self) -> list[tuple[PoolArray, ...]]:
        """The arrays of every layer of ``kv.pool_layers``, as the pool has them on the whole mesh."""
        kv, Z = self.kv, self.dims.Z

        def of(layer: KVLayer) -> tuple[PoolArray, ...]:
            axis = None if layer.replicated else self.heads_axis
            sizes = [(kv.heads(layer, array), array.width) for array in layer.arrays]
            shapes = [self.backend.pool_shapes(*size, self.n_pages, Z) for size in sizes]
            return tuple(PoolArray(shape, axis) for parts in shapes for shape in parts)

        return [of(layer) for layer in kv.pool_layers]

    @property
    def n_own(self) -> int:
        """Entries of ``DeviceState.kv`` that are the target's."""
        return self.arch.L if self.dims.groups is None else self.dims.groups.n_arrays

    def fields(self, bucket: Bucket) -> tuple[Field, ...]:
        return layout(bucket, self.dims, self.backend.plan_shapes(bucket, self.dims))

    def specs(self) -> Any:
        return padded(self.family.specs(self.arch, self.tp), self.rules, self.mesh.shape)

    def param_partitions(self) -> Any:
        target = partitions(self.specs(), self.rules)
        if self.drafter is None:
            return target
        return {"target": target, "drafter": partitions(self.draft_specs(), self.draft_rules)}

    @property
    def ep(self) -> int:
        """Devices, or groups of them, that have different experts."""
        return n_parts(self.axes.experts, self.mesh.shape)

    def expert_shapes(self) -> Any:
        """The abstract ``ExpertState``, None where there is none."""
        if not self.experts:
            return None
        return state_shapes(self.arch, self.rules.redundant_experts)

    def state_partitions(self) -> Any:
        before = (None,) * self.backend.kv_axis
        kv: Any = [
            tuple(PartitionSpec(*before, array.axis) for array in layer)
            for layer in self.kv_arrays()
        ]
        return DeviceState(
            kv=kv,
            slots=jax.tree.map(lambda _: PartitionSpec(), slot_shapes(self.dims)),
            experts=jax.tree.map(lambda _: PartitionSpec(), self.expert_shapes()),
        )

    def state_shardings(self) -> Any:
        return jax.tree.map(
            lambda p: NamedSharding(self.mesh, p),
            self.state_partitions(),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

    def abstract_params(self) -> Any:
        target = abstract(self.specs(), self.mesh, self.rules, self.dtype)
        if self.drafter is None:
            return target
        drafter = abstract(self.draft_specs(), self.mesh, self.draft_rules, self.dtype)
        return {"target": target, "drafter": drafter}

    def abstract_state(self) -> Any:
        kv: Any = [
            tuple(jax.ShapeDtypeStruct(array.shape, self.kv_dtype) for array in layer)
            for layer in self.kv_arrays()
        ]
        slots, experts = slot_shapes(self.dims), self.expert_shapes()
        state = DeviceState(kv=kv, slots=slots, experts=experts)
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            state,
            self.state_shardings(),
        )


# Jitted only so that buckets with as many draws trace them once; XLA inlines the calls.
_ADVANCE = jax.jit(slot_rows.advance)

Step = Callable[[Any, DeviceState, jax.Array], tuple[DeviceState, StepOut]]


def make_step(model: StepModel, bucket: Bucket) -> Step:
    """The pure step of one bucket over global arrays.

    Raises:
        ValueError: a bucket of fewer than two tokens or drawn places (XLA:CPU is far slower on one
        row).
        ConfigError: a tree, and attention sinks; heads that the backend cannot serve.
    """
    if bucket.tree and model.arch.sinks:
        raise ConfigError(
            "attention_sinks do not go with trees of drafts, only with chains",
            field="attention_sinks",
        )
    check_layers(model.backend, model.arch, model.kv_dtype, bucket.tree, model.dims.Z)
    check_layout(model.family, model.arch, model.axes)
    if bucket.T < 2 or bucket.D * bucket.J + bucket.F < 2:
        raise ValueError(f"{bucket} has fewer than two tokens or drawn places")
    fields = model.fields(bucket)
    if model.rules.auto:
        attention = over_heads(model.backend, model.mesh, model.heads_axis)
        model = replace(model, backend=attention)

    def local(params: Any, state: DeviceState, buf: jax.Array) -> tuple[DeviceState, StepOut]:
        with kernels(model.kernels):
            view = unpack(buf, fields, bucket, model.dims, state.slots)
            return run(model, bucket, params, state, view)

    if model.rules.auto:
        return _partitioned(model, local)
    whole = PartitionSpec()
    state_specs = model.state_partitions()
    return jax.shard_map(
        local,
        mesh=model.mesh,
        in_specs=(model.param_partitions(), state_specs, whole),
        out_specs=(state_specs, whole),
        check_vma=False,
    )


def _partitioned(model: StepModel, step: Step) -> Step:
    """``step`` of whole arrays, for XLA's partitioner: results lie as the state does, and whole."""
    whole = NamedSharding(model.mesh, PartitionSpec())

    def partitioned(params: Any, state: DeviceState, buf: jax.Array) -> tuple[DeviceState, StepOut]:
        return lax.with_sharding_constraint(
            step(params, state, buf), (model.state_shardings(), whole)
        )

    return partitioned


def run(
    model: StepModel, bucket: Bucket, params: Any, state: DeviceState, view: StepView
) -> tuple[DeviceState, StepOut]:
    """One step on this shard of everything."""
    arch, drafts = model.arch, bucket.n_draft > 0
    own: Any = None
    if model.drafter is not None:
        params, own = params["target"], params["drafter"]
    points = _points(model, bucket)
    edits = _edits(arch, bucket, view)
    done = _forward(model, params, _kept(view, model.n_pages), state, points, edits)
    x_TD, kv, values = done.x_TD, done.kv, done.read
    with jax.named_scope("logits"):
        x_ED = skip_unread(x_TD[drawn_places(view)], per_draw(view, view.count_R > 0))
        raw_EV = _target(model, params).own_logits(x_ED)
    with jax.named_scope("sample"):
        part = VocabPart.of(model.axes, arch.V)
        drawn_E, ok_E, fault_E, chosen = drawn(
            view,
            bucket.features,
            state.slots,
            raw_EV,
            part,
            processes=model.logprobs_mode == "processed_logprobs",
            # Not where devices would have to go through the loop together.
            skips=model.on_cpu and part == WHOLE and not model.rules.auto,
        )
    n_ok_D = None
    if view.tree is not None:
        with jax.named_scope("path"):
            n_ok_D, path_DJ = accepted(view, drawn_E)
            kv = straightened(model.backend, view, kv, path_DJ)
            of_tree = (drawn_E, ok_E, fault_E, chosen, x_TD, values)
            drawn_E, ok_E, fault_E, chosen, x_TD, values = along(view, path_DJ, of_tree)
            view = as_chain(view, path_DJ)
    with jax.named_scope("advance"):
        token_RJ = by_row(view, drawn_E, NONE)
        n_ok_R = _n_ok(view, _accepted(view, token_RJ) if n_ok_D is None else n_ok_D)
        len_R = _new_len(view, n_ok_R)
        penalised_R = (view.uses_R & PENALTY) > 0
        slots = _ADVANCE(state.slots, view.slot_R, len_R, token_RJ, n_ok_R, penalised_R)
        states = advanced(slots.states, bucket.features, view, token_RJ, n_ok_R)
        slots = replace(slots, states=states)
    drafted, target = state.kv[model.n_own :], _target(model, params)
    found = dict(zip(points, values, strict=True))
    taps = [found[name] for name in _drafter_points(model)] if drafts else []
    outcome = StepOutcome(
        view=view, token_RJ=token_RJ, n_ok_R=n_ok_R, len_R=len_R, x_TD=x_TD, taps=taps
    )
    if drafts:
        with jax.named_scope("draft"):
            draft_ctx = _draft_ctx(model, target, own)
            drafted, slots = leave_drafts(draft_ctx, drafted, outcome, slots, bucket)
    extra, prompt = {}, {}
    for feature in bucket.features:
        seen = replace(outcome, read=[found[name] for name in read_by(arch, feature)])
        extra[feature.name] = feature.after(target, seen)
        if feature.after_prompt is not None and bucket.P:
            prompt[feature.name] = feature.after_prompt(target, seen)
    experts = state.experts and state.experts.counted(done.count_LE)
    state = DeviceState(kv=[*kv, *drafted], slots=slots, experts=experts)
    return state, _pack(outcome, ok_E, fault_E, chosen, extra, prompt)


def _target(model: StepModel, params: Any) -> Target:
    return Target(
        arch=model.arch,
        params=params,
        embedding=model.family.embed,
        unembedding=model.family.logits,
        attn=model.backend,
        axes=model.axes,
        scored=model.dims.scored,
    )


def _draft_ctx(model: StepModel, target: Target, own: Any) -> DraftContext:
    assert model.drafter is not None, "there is no drafter"
    return DraftContext(model.drafter, target, own, model.dims, model.draft_axes, model.on_cpu)


def _kept(view: StepView, n_pages: int) -> StepView:
    """The view for the target: what it computes only to show it to the drafter is written nowhere
    (to a page that does not exist), so that KV which others share keeps its bits."""
    if view.backfill_F is None:
        return view
    shown_R = jnp.concatenate([jnp.zeros(view.D, bool), view.backfill_F])
    shown_T = shown_R[jnp.minimum(view.row_T, view.D + view.F - 1)]
    return replace(view, write_page_T=jnp.where(shown_T, n_pages, view.write_page_T))


def _points(model: StepModel, bucket: Bucket) -> tuple[str, ...]:
    """All that are read in steps of ``bucket``, each once."""
    asked = [name for feature in bucket.features for name in read_by(model.arch, feature)]
    return tuple(dict.fromkeys([*(_drafter_points(model) if bucket.n_draft else ()), *asked]))


def _edits(arch: Arch, bucket: Bucket, view: StepView) -> dict[str, Edit]:
    """The changes of the residual stream in steps of ``bucket``, several at one point in the order of features."""
    found: dict[str, list[Edit]] = {}
    for feature in bucket.features:
        for name in written_by(arch, feature):
            assert feature.edit is not None, f"{feature} has writes and no edit"
            found.setdefault(name, []).append(partial(feature.edit, view))

    def all_of(edits: list[Edit], x_TD: jax.Array) -> jax.Array:
        return reduce(lambda x, edit: edit(x), edits, x_TD)

    return {name: partial(all_of, edits) for name, edits in found.items()}


def _drafter_points(model: StepModel) -> tuple[str, ...]:
    taps = () if model.drafter is None else model.drafter.taps
    return tuple(entering(i, model.arch.L) for i in taps)


def _forward(
    model: StepModel,
    params: Any,
    view: StepView,
    state: DeviceState,
    points: tuple[str, ...],
    edits: dict[str, Edit],
) -> Pass:
    family, experts, kv = model.family, state.experts, state.kv[: model.n_own]
    ctx = Ctx.of(model.arch, view, model.backend, model.axes, experts and experts.places)
    ctx = replace(ctx, edits=edits)
    if experts is not None:
        assert family.counted is not None, f"{family.name} counts nothing"
        return family.counted(ctx, params, kv, points)
    if not points and not edits:
        return Pass(*family.forward(ctx, params, kv), [], None)
    if family.tapped is None:
        why = f"the family {family.name} has no points that can be read or changed"
        raise ConfigError(why, field="architectures")
    return Pass(*family.tapped(ctx, params, kv, points), None)


def _accepted(view: StepView, token_RJ: jax.Array) -> jax.Array:
    """int32[D] accepted tokens, of chains."""
    D, J = view.D, view.J
    return accept(view.tok_T[: D * J].reshape(D, J), token_RJ[:D], view.count_R[:D])


def _n_ok(view: StepView, n_ok_D: jax.Array) -> jax.Array:
    """int32[R] tokens drawn: those of decode rows, one of a prefill row that emits."""
    n_ok_R = jnp.concatenate([n_ok_D, jnp.ones(view.F, jnp.int32)])
    return jnp.where(view.emit_R & (view.count_R > 0), n_ok_R, 0)


def _new_len(view: StepView, n_ok_R: jax.Array) -> jax.Array:
    """Valid KV tokens: all of a prefill row, the accepted ones of a decode row."""
    decode = jnp.arange(view.D + view.F) < view.D
    return view.start_R + jnp.where(decode, n_ok_R, view.count_R)


def _pack(
    outcome: StepOutcome,
    ok_E: jax.Array,
    fault_E: jax.Array | None,
    chosen: Chosen,
    extra: dict[str, Any],
    prompt: dict[str, jax.Array],
) -> StepOut:
    view, n_ok_R = outcome.view, outcome.n_ok_R
    ok_RJ = by_row(view, ok_E, True)
    valid_RJ = jnp.arange(view.J) < jnp.maximum(n_ok_R, 1)[:, None]
    # Also of a row that draws nothing: its pages are shared as soon as they are known to be sound.
    finite_R = jnp.all(ok_RJ | ~valid_RJ, axis=1) | (view.count_R == 0)
    bits_RJ = jax.lax.bitcast_convert_type(by_row(view, chosen.logprob_E, 0.0), jnp.int32)
    code_R = finite_R.astype(jnp.int32)
    if fault_E is not None:
        first_R1 = jnp.argmax(~ok_RJ & valid_RJ, axis=1)[:, None]
        of_RJ = by_row(view, fault_E, 0)
        code_R = jnp.where(finite_R, 1, jnp.take_along_axis(of_RJ, first_R1, axis=1)[:, 0])
    head_R2 = jnp.stack([n_ok_R, code_R], axis=1)
    return StepOut(
        packed_RX=jnp.concatenate([head_R2, outcome.token_RJ, bits_RJ], axis=1),
        top_ids_RJL=by_row(view, chosen.top_ids_EL, NONE),
        top_logprobs_RJL=by_row(view, chosen.top_logprobs_EL, 0.0),
        extra=extra,
        prompt=prompt,
        rank_RJ=None if chosen.rank_E is None else by_row(view, chosen.rank_E, 0),
        picked_RJK=None if chosen.picked_EK is None else by_row(view, chosen.picked_EK, 0.0),
    )
