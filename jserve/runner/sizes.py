"""Derives step dimensions, runner limits and the bucket ladder from a model and the options.

It owns the arithmetic that an engine and ``jserve plan`` share, so that a plan cannot differ from what is
allocated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.kv_layout import KV_FORMS, KVLayout, chosen_groups
from jserve.model.arch import Arch, with_kv_forms
from jserve.model.attention import (
    AttentionBackend,
    backend as find_backend,
    candidates,
    check_layers,
)
from jserve.model.draft_tree import TreeShape
from jserve.model.family import Family
from jserve.model.features import registered
from jserve.model.kv_bytes import BYTES
from jserve.model.kv_quant import E4M3
from jserve.model.native import has_attention, takes_rows
from jserve.model.rope import short_context
from jserve.model.shard import ShardRules
from jserve.model.sinks import with_sinks
from jserve.model.step import StepModel
from jserve.model.view import StepDims
from jserve.ports import RunnerLimits
from jserve.runner.buckets import Ladder, beside_prefill
from jserve.runner.memory import DeviceMemory, MemoryPlan, host_pages, plan_memory
from jserve.speculation.drafters.drafter import kv_layout
from jserve.speculation.drafters.load import LoadedDrafter
from jserve.window import PageDemand, tokens_ahead

MAX_PREFILL_ROWS = 8


def step_dims(
    arch: Arch,
    config: EngineConfig,
    speculation: LoadedDrafter | None = None,
    *,
    penalises: bool = False,
) -> StepDims:
    """The dimensions that all buckets share; ``penalises`` as in ``sizes_of``.

    Raises:
        ConfigError: ``max_model_len`` exceeds the model's.
    """
    length = config.model.max_model_len or arch.max_position
    if length > arch.max_position:
        raise ConfigError(
            f"max_model_len {length} exceeds the model's {arch.max_position}", field="max_model_len"
        )
    Z = config.cache.page_size
    C, M = config.scheduler.max_num_seqs, -(-length // Z)
    picks = config.device.max_logprob_token_ids
    n_vocab_rows = config.scheduler.n_vocab_rows(penalises=penalises)
    scored = config.device.max_prompt_logprobs
    dims = StepDims(
        C=C,
        M=M,
        Z=Z,
        V=arch.V,
        scored=scored,
        picks=picks,
        n_vocab_rows=n_vocab_rows,
        states=tuple(
            (feature.name, feature.state.start.shape, feature.state.start.dtype.name)
            for feature in registered()
            if feature.state is not None
        ),
    )
    if speculation is None:
        return dims
    return dataclasses.replace(
        dims,
        drafts=speculation.n_draft,
        text=min(speculation.drafter.text, M * Z),
    )


def kv_dtype(config: EngineConfig, dtype: Any) -> Any:
    """The type that KV is rounded to, for activations of ``dtype``; int8: bytes, in forms of each layer
    (``kv_bytes``)."""
    name = config.cache.kv_cache_dtype
    if name in KV_FORMS or config.cache.kv_cache_dtype_skip_layers:
        return BYTES
    named = {"auto": dtype, "fp8_e4m3": E4M3}
    return jnp.dtype(named.get(name, name))


def kv_name(config: EngineConfig, dtype: Any) -> str:
    """The type or form in which most layers keep KV, for activations of ``dtype``."""
    name = config.cache.kv_cache_dtype
    plain = dataclasses.replace(config.cache, kv_cache_dtype_skip_layers=())
    plain = dataclasses.replace(config, cache=plain)
    return name if name in KV_FORMS else str(kv_dtype(plain, dtype))


def with_kv_options(
    arch: Arch, config: EngineConfig, dtype: Any, speculation: LoadedDrafter | None
) -> Arch:
    """``arch`` with the forms of KV that the options ask for.

    Raises:
        ConfigError: as ``with_kv_forms``, also for a drafter's layers.
    """
    options, name = config.cache, jnp.dtype(dtype).name
    form = options.kv_cache_dtype
    if speculation is not None and speculation.drafter.kv_layers and form in KV_FORMS:
        with_kv_forms(speculation.drafter.arch, form, (), name)
    skipped, rotate = options.kv_cache_dtype_skip_layers, options.kv_cache_rotate
    return with_kv_forms(arch, form, skipped, name, rotate=rotate)


def stored_kv(
    config: EngineConfig,
    attention: AttentionBackend,
    dtype: Any,
    arch: Arch,
    speculation: LoadedDrafter | None = None,
) -> Any:
    """The dtype of the KV pool, for activations of ``dtype``.

    Raises:
        ConfigError: ``attention`` cannot serve it with these heads, or not the trees of drafts.
    """
    stored = attention.kv_dtype(kv_dtype(config, dtype))
    tree = () if speculation is None else speculation.tree
    page_size = config.cache.page_size
    check_layers(attention, arch, stored, tree, page_size)
    if speculation is not None and speculation.drafter.kv_layers:
        drafter = speculation.drafter.arch
        forms = (arch.kv_form,) * drafter.L if arch.kv_forms else ()
        drafter = dataclasses.replace(drafter, kv_forms=forms)
        check_layers(attention, drafter, stored, tree, page_size)
    return stored


def chosen_attention(
    arch: Arch,
    config: EngineConfig,
    dtype: Any,
    platform: str,
    capability: str = "",
    speculation: LoadedDrafter | None = None,
    kernels: str = "",
) -> tuple[str, str]:
    """(the attention backend that serves this model with these options, why it is not the best one): the first
    candidate that can.

    Raises:
        ConfigError: the option asks for one that this device or jax cannot run, or for a form of KV that the model
            does not have.
    """
    config = config.on(platform)
    arch = with_kv_options(arch, config, dtype, speculation)
    *better, last = candidates(
        config.device.attention_backend, platform, capability, native=has_attention(kernels)
    )
    reason = ""
    for name in better:
        try:
            attention = find_backend(name, platform)
            with_sinks(arch, attention, config.device.attention_sinks)
            stored_kv(config, attention, dtype, arch, speculation)
        except ConfigError as error:
            reason = reason or error.message
            continue
        return name, reason
    return last, reason


def page_demand(
    arch: Arch, config: EngineConfig, dims: StepDims, window: int, *, prefills: bool = True
) -> PageDemand:
    """The pages that a sequence holds at once. ``window``: tokens that layers read at most, where no groups have
    pages of their own (0: some read all); ``prefills`` False: once its prompt is computed."""
    drafts = dims.drafts or config.n_drafts
    budget = config.scheduler.max_num_batched_tokens if prefills else 1
    ahead = tokens_ahead(config.scheduler, budget, drafts)
    reaches = () if dims.groups is None else dims.groups.reaches
    return PageDemand.of(reaches, dims.Z, ahead, window, arch.sinks)


def with_groups(
    arch: Arch,
    config: EngineConfig,
    dims: StepDims,
    speculation: LoadedDrafter | None,
    *,
    shared_pass: bool,
) -> StepDims:
    """``dims`` with the groups of layers that pages belong to, where it pays: where a window gives pages back before
    the context ends.

    Raises:
        ConfigError: option ``kv_groups`` is on, and it cannot be.
    """
    asked = config.cache.kv_groups
    obstacles = _obstacles(arch, config, speculation, shared_pass=shared_pass)
    groups = chosen_groups(arch.kv_layers, asked, obstacles)
    if groups is None:
        return dims
    grouped = dataclasses.replace(dims, groups=groups)
    columns = page_demand(arch, config, grouped, 0).columns(dims.M)
    if asked == "auto" and min(columns) == dims.M:
        return dims
    return dataclasses.replace(grouped, columns=columns)


def _obstacles(
    arch: Arch, config: EngineConfig, speculation: LoadedDrafter | None, *, shared_pass: bool
) -> Iterator[str]:
    """The options and parts that need pages of all layers, in words."""
    if arch.sinks:
        yield "attention_sinks keep pages of all layers"
    if not shared_pass:
        yield f"the forward pass of family {arch.family} is its own"
    if speculation is not None and (speculation.drafter.kv_layers or speculation.tree):
        yield f"speculative drafter {speculation.drafter.name} shares the pages of all layers"


CPU_DRAFT_ROWS, DRAFT_ROWS = 8, 32
"""Rows beside which a device still has arithmetic to spare for guesses. A few verify rows of 4 to 8
tokens already keep a CPU's multipliers busy; a GPU reads weights for longer than that."""


def draft_rows(config: EngineConfig, platform: str) -> int:
    """Most decode rows of a step that drafts on the device."""
    usual = CPU_DRAFT_ROWS if platform == "cpu" else DRAFT_ROWS
    return min(config.speculative.max_rows or usual, config.scheduler.max_num_seqs)


def runner_limits(
    arch: Arch,
    config: EngineConfig,
    dims: StepDims,
    n_pages: int,
    n_host_pages: int,
    window: int,
) -> RunnerLimits:
    budget = config.scheduler.max_num_batched_tokens
    return RunnerLimits(
        n_slots=dims.C,
        max_rows=dims.C,
        max_decode_rows=dims.C,
        max_prefill_tokens=budget,
        max_prefill_rows=max(1, min(MAX_PREFILL_ROWS, dims.C, budget)),
        max_drafts=dims.drafts or config.n_drafts,
        device_drafts=dims.drafts,
        drafts_from_text=dims.text > 0,
        n_pages=n_pages,
        page_size=dims.Z,
        max_model_len=min(config.model.max_model_len or arch.max_position, arch.max_position),
        vocab_size=arch.V,
        short_context=short_context(arch),
        masks=config.device.structured_outputs,
        scores_prompts=config.device.prompt_logprobs,
        max_prompt_logprobs=dims.scored,
        features={feature.name: feature.check for feature in registered()},
        slot_features=tuple(name for name, *_ in dims.states),
        kv_names={f.name: f.kv_name for f in registered() if f.kv_name is not None},
        prompt_features={f.name: f.of_prompt for f in registered() if f.of_prompt is not None},
        picks=dims.picks,
        n_vocab_rows=dims.n_vocab_rows,
        n_host_pages=n_host_pages,
        window=window,
        sinks=arch.sinks,
        reaches=() if dims.groups is None else dims.groups.reaches,
        group_columns=dims.columns,
    )


def drafting_limits(
    limits: RunnerLimits, config: EngineConfig, speculation: LoadedDrafter | None, platform: str
) -> RunnerLimits:
    """``limits`` with what ``speculation`` adds to them."""
    if speculation is None:
        return limits
    return dataclasses.replace(
        limits,
        draft_depths=speculation.depths,
        draft_rows=draft_rows(config, platform),
        prefill_width=0 if speculation.tree else beside_prefill(limits.max_drafts),
        drafts_from_kv=bool(speculation.drafter.kv_layers),
    )


def ladder_of(
    limits: RunnerLimits, tree: TreeShape = (), *, masks_drafts: bool, skips_padding: bool = False
) -> Ladder:
    return Ladder.of(
        max_decode_rows=limits.max_decode_rows,
        max_prefill_tokens=limits.max_prefill_tokens,
        max_prefill_rows=limits.max_prefill_rows,
        max_drafts=limits.max_drafts,
        scores=limits.scores_prompts,
        masks=limits.masks,
        masks_drafts=masks_drafts,
        device_drafts=limits.device_drafts,
        draft_rows=limits.draft_rows,
        tree=tree,
        registered=registered(),
        skips_padding=skips_padding,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """All sizes that follow from a model, its devices and the options, before anything is allocated."""

    config: EngineConfig
    """With numbers where the options leave them to the device."""
    arch: Arch
    """With the attention sinks and forms of KV that the options ask for."""
    attention: AttentionBackend
    no_better_attention: str
    """The reason why it is not the best one for such devices; empty: it is, or was asked for by name."""
    dims: StepDims
    dtype: Any
    """Of the activations."""
    kv_dtype: Any
    """The type that KV is rounded to."""
    kv: KVLayout
    """The layout of a page of the pool."""
    memory: MemoryPlan
    kernels: str
    """Level of the native kernels in use, ``hopper`` where quantised weights have that one, or empty."""
    limits: RunnerLimits
    """Without measured times."""
    ladder: Ladder

    @property
    def kv_name(self) -> str:
        """The form of option ``kv_cache_dtype`` that KV is kept in, or its type."""
        return self.arch.kv_form or str(self.kv_dtype)


def _most_rows(limits: RunnerLimits) -> int:
    """Tokens of the largest step."""
    return limits.max_decode_rows * (1 + limits.max_drafts) + limits.max_prefill_tokens


def sizes_of(
    arch: Arch,
    config: EngineConfig,
    *,
    dtype: Any,
    platform: str,
    tp: int,
    weight_bytes: int,
    memory: DeviceMemory,
    speculation: LoadedDrafter | None = None,
    penalises: bool = False,
    capability: str = "",
    kernels: str = "",
    shared_pass: bool = True,
) -> Sizes:
    """
    Args:
        dtype: of the activations.
        platform: of the devices, as jax calls it.
        capability: their compute capability where they are CUDA's.
        kernels: as of ``Sizes``; empty: everything is XLA's.
        tp: devices that the kv heads are split over.
        weight_bytes: on one device, a drafter's too.
        memory: of one device.
        penalises: whether requests that say nothing have a penalty, by the model's generation_config.json.
        shared_pass: whether the family's forward pass is the decoder that all share, which reads groups of layers.

    Raises:
        ConfigError: an option cannot be honoured, or there is no room; ``field`` is its name.
    """
    config = config.on(platform)
    name, no_better = chosen_attention(
        arch, config, dtype, platform, capability, speculation, kernels
    )
    attention = find_backend(name, platform)
    arch = with_sinks(arch, attention, config.device.attention_sinks)
    arch = with_kv_options(arch, config, dtype, speculation)
    stored = stored_kv(config, attention, dtype, arch, speculation)
    dims = step_dims(arch, config, speculation, penalises=penalises)
    dims = with_groups(arch, config, dims, speculation, shared_pass=shared_pass)
    drafter = None if speculation is None else speculation.drafter
    kv = kv_layout(arch, drafter, page_size=dims.Z, dtype=stored, tp=tp)
    kv = dataclasses.replace(kv, groups=dims.groups)
    pool = plan_memory(
        kv=kv,
        dims=dims,
        weight_bytes=weight_bytes,
        options=config.cache,
        memory=memory,
        demand=page_demand(arch, config, dims, kv.window),
        resting=page_demand(arch, config, dims, kv.window, prefills=False),
    )
    n_host = host_pages(config.cache.host_memory_gb, kv.host_page_bytes)
    limits = runner_limits(arch, config, dims, pool.n_pages, n_host, kv.window)
    limits = drafting_limits(limits, config, speculation, platform)
    tree = () if speculation is None else speculation.tree
    return Sizes(
        config=config,
        arch=arch,
        attention=attention,
        no_better_attention=no_better,
        dims=dims,
        dtype=dtype,
        kv_dtype=kv_dtype(config, dtype),
        kv=kv,
        memory=pool,
        kernels=kernels,
        limits=limits,
        ladder=ladder_of(
            limits,
            tree,
            masks_drafts=config.speculative.method == "synthetic",
            skips_padding=name == "native" and takes_rows(kernels, _most_rows(limits)),
        ),
    )


def step_model(
    sizes: Sizes, family: Family, mesh: Mesh, rules: ShardRules, speculation: LoadedDrafter | None
) -> StepModel:
    """Returns the part that all steps of an engine of these sizes share; no weights are looked at."""
    return StepModel(
        family=family,
        arch=sizes.arch,
        backend=sizes.attention,
        dims=sizes.dims,
        mesh=mesh,
        rules=rules,
        n_pages=sizes.memory.n_pages,
        kv_dtype=sizes.kv.dtype,
        dtype=sizes.dtype,
        drafter=None if speculation is None else speculation.drafter,
        experts=sizes.config.device.tracks_experts,
        logprobs_mode=sizes.config.device.logprobs_mode,
        kernels=sizes.kernels,
    )
