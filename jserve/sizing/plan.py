"""Plans a deployment: what fits, the roofline time of each bucket, tokens per second.

Sizes are those of the engine (``layout``), so a plan promises what it will do; times are ``sim.roofline``'s.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.kv_layout import KVGroups
from jserve.model.draft_tree import chain
from jserve.model.features import SCORE
from jserve.model.view import Bucket
from jserve.runner.memory import MemoryPlan
from jserve.runner.programs import step_name
from jserve.runner.sizes import page_demand
from jserve.sim.roofline import CHIPS, Chip, Roofline
from jserve.sizing import speculation as drafts
from jserve.sizing.layout import Layout, lay_out, with_advice
from jserve.sizing.models import find
from jserve.sizing.speculation import DraftCosts, Gain, Speculated

LENGTHS = (512, 2048, 8192)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residents:
    """The number of sequences of one length that the pool holds at once."""

    length: int
    """Tokens, prompt and answer together."""
    pages: int
    """Of all groups of layers, where they have pages of their own: once the prompt is computed."""
    over: float
    """Bytes of these pages / bytes of KV that the layers still read of such a sequence."""
    sequences: int
    admitted: int
    """As many of them as ``max_num_seqs`` lets run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """Groups of layers that look back equally far, each with pages of its own."""

    reads: int
    """Tokens that a token reads in them at most; 0: all."""
    chunked: bool
    groups: int
    layers: int
    arrays: int
    """Layers that a page of these groups has room for, in all of them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRate:
    """Decoding at one batch and context."""

    batch: int
    context: int
    limit_ms: float
    """A step at the device's rates, collectives included."""
    expected_ms: float
    limit_tok_s: float
    expected_tok_s: float
    fits: bool
    """True where the pool holds so many sequences of that length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One compiled step of the engine, full, at the plan's context; bytes and flops are one
    device's."""

    name: str
    decode_rows: int
    prefill_tokens: int
    prefill_rows: int
    tokens_per_decode_row: int
    drafts: int
    """That a drafter on the device leaves in each row; what it reads and multiplies is in all figures
    below."""
    logits_bytes: int
    """float32 logits drawn from at once. A step's scratch is a few times that: as they come, adjusted, and
    as weights."""
    weight_bytes: int
    kv_bytes: int
    flops: float
    bound: str
    """memory or compute; the target's part."""
    limit_ms: float
    """Without collectives."""
    collectives_ms: float
    draft_ms: float
    """Expected of the drafter's part."""
    expected_ms: float
    compiled: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Of one step: sums of the activations of its tokens, and one gather of logits."""

    all_reduces: int
    all_gathers: int
    bytes_per_token: int
    """float32, as one device sends them in a decode step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything ``jserve plan`` says. Bytes are per device unless they say total."""

    model: str
    family: str
    parameters: int
    active_parameters: int
    """That one token meets: all but the embedding's rows and the experts that it does not choose."""
    dtype: str
    weight_bytes_total: int
    form_bytes: dict[str, int]
    """Bytes of the weights in each form; what is not quantised has the name of its type."""
    paths: dict[str, dict[str, list[int]]]
    """The paths of products with matrices in each quantised form, by the least and the most tokens of the programs that
    take them: native kernels, ``quant_matmul``, or XLA's products (``jserve.model.dot.path_of``)."""
    active_bytes_total: int
    """Of the active parameters."""
    device: str
    devices: int
    device_bytes: int
    """The bytes that the process takes of a device's memory."""
    attention_backend: str
    kv_dtype: str
    kv_bytes_per_token: int
    kv_bytes_per_token_total: int
    page_size: int
    kv_groups: tuple[LayerGroups, ...]
    """By how far layers look back, where pages belong to groups of them; empty: a page is of all layers."""
    max_model_len: int
    max_num_seqs: int
    max_penalized_seqs: int
    """Of these, as many as can have penalties or biases."""
    memory: MemoryPlan
    residents: tuple[Residents, ...]
    rates: tuple[DecodeRate, ...]
    context: int
    """Tokens that each row of ``programs`` reads."""
    programs: tuple[Program, ...]
    collectives: Collectives
    speculation: Speculated | None


def lengths_of(text: str) -> tuple[int, ...]:
    """Tokens of ``512,2k,8k`` in rising order; k is 1024. Nothing is ().

    Raises:
        ConfigError: a part that is no positive number.
    """
    found = set()
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(\d{1,9})([kK]?)", part.strip())
        if match is None or int(match[1]) == 0:
            raise ConfigError(
                f"lengths {text!r}: {part.strip()!r} is no number of tokens such as 512 or 8k",
                field="lengths",
            )
        found.add(int(match[1]) * (1024 if match[2] else 1))
    return tuple(sorted(found))


def plan(
    name: str,
    device: str,
    lengths: tuple[int, ...],
    config: EngineConfig,
    acceptance: float | None = None,
) -> tuple[Plan, Layout]:
    """Plan ``name`` on ``tensor_parallel_size`` devices of that kind. No lengths: those of
    ``LENGTHS`` that are shorter than the context. ``acceptance``: the assumed chance that a likeliest
    draft is accepted, None for what tree ``auto`` assumes.

    Raises:
        ConfigError: an unknown device, a length beyond the context, a model that cannot be read,
        split or fitted (saying how many devices it takes).
    """
    if device not in CHIPS:
        raise ConfigError(
            f"device must be one of {', '.join(CHIPS)}, not {device!r}", field="device"
        )
    chip, acceptance = CHIPS[device], drafts.acceptance_of(acceptance, config)
    options = config.model
    forms = (options.quantization, options.quantization_config)
    model = find(
        name,
        options.revision,
        options.dtype,
        quantization=forms,
        max_model_len=options.max_model_len,
    )
    try:
        laid = lay_out(model, config, chip)
    except ConfigError as error:
        raise with_advice(error, model, config, chip) from None
    context = _context(laid)
    lengths = lengths or tuple(n for n in LENGTHS if n < context) or (context,)
    if lengths[-1] > context:
        raise ConfigError(
            f"lengths: {lengths[-1]} tokens exceed the context of {context}", field="lengths"
        )
    return _plan(laid, chip, lengths, acceptance), laid


def _plan(laid: Layout, chip: Chip, lengths: tuple[int, ...], acceptance: float) -> Plan:
    model, sizes, tp = laid.model, laid.sizes, laid.tp
    memory = sizes.memory
    line, context = roofline_of(laid, chip), lengths[len(lengths) // 2]
    per_token = dataclasses.replace(sizes.kv, groups=None).page_bytes // sizes.dims.Z
    rates = tuple(_rate(laid, line, b, n) for n in lengths for b in BATCHES)
    drafting = None if laid.speculation is None else DraftCosts.of(laid.speculation.drafter, line)
    return Plan(
        model=model.name,
        family=model.family.name,
        parameters=model.n_params,
        active_parameters=line.active + line.unembed,
        dtype=str(model.dtype),
        weight_bytes_total=model.weight_bytes,
        form_bytes=model.form_bytes(),
        paths=model.paths(tp, sizes.kernels, {b.T for b in laid.buckets}),
        active_bytes_total=round((line.active + line.unembed) * line.itemsize),
        device=chip.name,
        devices=tp,
        device_bytes=memory.total_bytes,
        attention_backend=sizes.attention.name,
        kv_dtype=sizes.kv_name,
        kv_bytes_per_token=per_token,
        kv_bytes_per_token_total=per_token * tp,
        page_size=sizes.dims.Z,
        kv_groups=_groups(sizes.dims.groups),
        max_model_len=_context(laid),
        max_num_seqs=sizes.dims.C,
        max_penalized_seqs=sizes.dims.n_vocab_rows,
        memory=memory,
        residents=tuple(_residents(laid, n) for n in lengths),
        rates=rates,
        context=context,
        programs=tuple(_program(line, drafting, b, context) for b in laid.buckets),
        collectives=_collectives(line),
        speculation=_speculated(laid, line, drafting, rates, acceptance),
    )


def _drafter_name(laid: Layout) -> str:
    """Of the files that the drafter was read from; empty: there are none."""
    made = laid.speculation
    if made is None or made.drafter.copy is not None:
        return ""
    return laid.config.speculative.model or laid.model.name


def _speculated(
    laid: Layout,
    line: Roofline,
    drafting: DraftCosts | None,
    rates: tuple[DecodeRate, ...],
    acceptance: float,
) -> Speculated | None:
    config, made, dims = laid.config, laid.speculation, laid.sizes.dims
    if config.speculative.method == "off":
        return None
    gain = Gain(
        line=line,
        drafting=drafting,
        tree=() if made is None else made.tree,
        n_drafts=config.n_drafts if made is None else made.n_draft,
        draft_rows=laid.sizes.limits.draft_rows,
        by_rank=drafts.chances_of(acceptance, config),
    )
    return Speculated(
        method=config.speculative.method,
        drafter=_drafter_name(laid),
        n_drafts=gain.n_drafts,
        tree=gain.tree,
        devices=1 if made is None or made.drafter.replicated else laid.tp,
        weight_bytes=laid.draft_weight_bytes,
        kv_bytes_per_token=laid.draft_page_bytes // dims.Z,
        slot_bytes=4 * dims.C * (dims.drafts + dims.text),
        draft_rows=dims.C if made is None else gain.draft_rows,
        acceptance=acceptance,
        chances=gain.by_rank,
        rates=tuple(gain.rate(r.batch, r.context, fits=r.fits) for r in rates),
    )


def _groups(groups: KVGroups | None) -> tuple[LayerGroups, ...]:
    if groups is None:
        return ()
    found, first = [], 0
    for reach in groups.reaches:
        numbers = range(first, first + reach.n_groups)
        found.append(
            LayerGroups(
                reads=reach.span.most,
                chunked=reach.span.chunk > 0,
                groups=reach.n_groups,
                layers=sum(group in numbers for group, _ in groups.places),
                arrays=reach.n_groups * groups.n_arrays,
            )
        )
        first = numbers.stop
    return tuple(found)


def _context(laid: Layout) -> int:
    return laid.config.model.max_model_len or laid.model.arch.max_position


def roofline_of(laid: Layout, chip: Chip) -> Roofline:
    """Returns the prices of a layout's steps."""
    return Roofline(
        arch=laid.model.arch,
        itemsize=laid.model.itemsize,
        chip=chip,
        kv_itemsize=laid.sizes.kv.dtype.itemsize,
        tp=laid.tp,
        ep=laid.config.device.expert_parallel_size,
    )


def _residents(laid: Layout, length: int) -> Residents:
    dims, window = laid.sizes.dims, laid.sizes.limits.window
    grouped = dims.groups is not None
    demand = page_demand(laid.model.arch, laid.config, dims, window, prefills=not grouped)
    pages = demand.most(length)
    held = (laid.sizes.memory.n_pages - 1) // pages
    kv = laid.sizes.kv
    return Residents(
        length=length,
        pages=pages,
        over=pages * kv.page_bytes / kv.step_bytes(1, 0, length),
        sequences=held,
        admitted=min(held, dims.C),
    )


def _rate(laid: Layout, line: Roofline, batch: int, context: int) -> DecodeRate:
    work = line.work(rows=batch, tokens=batch, drawn=batch, n_context=context)
    limit, expected = line.limit(work) + line.links(work), line.expected(work)
    return DecodeRate(
        batch=batch,
        context=context,
        limit_ms=limit * 1e3,
        expected_ms=expected * 1e3,
        limit_tok_s=batch / limit,
        expected_tok_s=batch / expected,
        fits=batch <= _residents(laid, context).sequences,
    )


def _program(line: Roofline, drafting: DraftCosts | None, bucket: Bucket, context: int) -> Program:
    drawn = bucket.D * bucket.J + (bucket.P if SCORE in bucket.features else bucket.F)
    work = line.work(rows=bucket.R, tokens=bucket.T, drawn=drawn, n_context=context)
    works, at_once = [], bucket.D * bucket.J + bucket.F
    if drafting is not None and bucket.n_draft:
        tree = bucket.tree or chain(bucket.n_draft)
        works = drafting.works(bucket.R, bucket.T, context, tree)
        at_once = max(at_once, bucket.R * max(drafts.inner_of(tree)))
    draft = drafting.seconds(works) if drafting is not None else 0.0
    every = [work, *works]
    return Program(
        name=step_name(bucket),
        decode_rows=bucket.D,
        prefill_tokens=bucket.P,
        prefill_rows=bucket.F,
        tokens_per_decode_row=bucket.J,
        drafts=bucket.n_draft,
        logits_bytes=4 * at_once * line.arch.V,
        weight_bytes=int(sum(w.weight_bytes for w in every)),
        kv_bytes=int(sum(w.kv_bytes for w in every)),
        flops=sum(w.flops for w in every),
        bound="compute" if line.is_compute_bound(work) else "memory",
        limit_ms=sum(map(line.limit, every)) * 1e3,
        collectives_ms=sum(map(line.links, every)) * 1e3,
        draft_ms=draft * 1e3,
        expected_ms=(line.expected(work) + draft) * 1e3,
    )


def _collectives(line: Roofline) -> Collectives:
    one = line.work(rows=1, tokens=1, drawn=1, n_context=0)
    gathers = 1 if one.n_collectives else 0
    return Collectives(
        all_reduces=one.n_collectives - gathers,
        all_gathers=gathers,
        bytes_per_token=int(one.link_bytes),
    )
