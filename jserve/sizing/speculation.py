"""Adds speculation to a plan: drafter weights and KV, pass times, expected tokens.

The drafter is read as the engine reads it, without its weights; times are ``sim.roofline``'s. Of one step at width
W, whose rows verify W - 1 drafts and leave as many::

    target     weights once, KV of the rows, W tokens a row
    sees       the drafter's weights once over the same tokens        (draft model, EAGLE-3)
    passes     its layers once for each level of drafts, over those with children
    draws      its unembedding (a Medusa head) once for each level, over the same

    tokens of a row   1 + sum over drafts of the chance that all drafts down to it are accepted
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import jax

from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.model import draft_tree as trees
from jserve.model.draft_tree import TreeShape
from jserve.model.param_spec import is_spec
from jserve.sim.roofline import Roofline, Work
from jserve.sizing.models import Model, device_bytes, source_of
from jserve.speculation.drafters.drafter import Drafter
from jserve.speculation.drafters.load import LoadedDrafter, copying, find_drafter
from jserve.speculation.host import trees as written
from jserve.speculation.host.methods import DEVICE, check, shape
from jserve.speculation.policy.draft_count import widths


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRate:
    """Decoding at one batch and context, at the width that gives the most tokens."""

    batch: int
    context: int
    width: int
    """Tokens of a row: 1 and its drafts; 1 where drafting does not pay."""
    tokens_per_step: float
    """Of a row, expected."""
    verify_ms: float
    """The target's part."""
    draft_ms: float
    expected_tok_s: float
    speed_up: float
    """Over ``Rate.expected_tok_s``."""
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculated:
    """Of an engine that speculates; bytes are one device's."""

    method: str
    drafter: str
    """The model or directory of its files; empty: it has none."""
    n_drafts: int
    tree: TreeShape
    devices: int
    """That share the drafter; 1: each holds all of it."""
    weight_bytes: int
    kv_bytes_per_token: int
    slot_bytes: int
    """Drafts of all slots, and the text that they are copied from."""
    draft_rows: int
    """Rows of a step beside which it drafts at most."""
    acceptance: float
    chances: tuple[float, ...]
    """Of a draft by its rank among its siblings."""
    rates: tuple[DraftRate, ...]


def drafter_of(model: Model, config: EngineConfig, tp: int) -> LoadedDrafter | None:
    """The drafter that the options name, without its weights; None: the device drafts nothing.

    Args:
        tp: devices that share the kv heads.

    Raises:
        ConfigError: what an engine would refuse.
    """
    options = config.speculative
    check(options, tp)
    if options.method == "ngram":
        return copying(options, config.n_drafts, model.arch)
    if options.method not in DEVICE:
        return None
    try:
        source = source_of(options.model, load_format=config.model.load_format)
    except ConfigError as error:
        field = "speculative.model" if error.field == "model" else error.field
        raise ConfigError(error.message, field=field) from None
    found = find_drafter(options.method, source, model.arch)
    drafter = found.over(tp, options.tensor_parallel_size).drafter
    n_draft, tree = shape(options, drafter.n_max)
    return LoadedDrafter(drafter=drafter, params=None, n_draft=n_draft, tree=tree)


def weight_bytes(speculation: LoadedDrafter | None, model: Model, tp: int) -> int:
    """Of the drafter on one device of ``tp``."""
    if speculation is None:
        return 0
    held = 1 if speculation.drafter.replicated else tp
    return device_bytes(speculation.drafter.specs(held), model.dtype, held)


def acceptance_of(given: float | None, config: EngineConfig) -> float:
    """The assumed chance of a likeliest draft; by default what tree ``auto`` goes by.

    Raises:
        ConfigError: no chance, or nothing speculates.
    """
    if given is None:
        return written.chances_of(config.speculative.tree_chances)[0]
    if config.speculative.method == "off":
        raise ConfigError("acceptance means nothing without --speculative", field="acceptance")
    if not 0 <= given <= 1:
        raise ConfigError(f"acceptance must be 0 to 1, not {given}", field="acceptance")
    return given


def chances_of(acceptance: float, config: EngineConfig) -> tuple[float, ...]:
    """Chances by rank where the first is ``acceptance``: what it leaves is shared as those that tree
    ``auto`` goes by share what theirs leaves."""
    ranks = written.chances_of(config.speculative.tree_chances)
    rest = (1 - acceptance) / (1 - ranks[0]) if ranks[0] < 1 else 0.0
    return (acceptance, *(rest * r for r in ranks[1:]))


def tokens_per_step(parents: TreeShape, by_rank: Seq[float]) -> float:
    """Expected of a row that verifies a tree: 1 and each draft's chance of acceptance."""
    accepted, seen = [1.0], [0] * (1 + len(parents))
    for parent in parents:
        rank = seen[parent]
        seen[parent] += 1
        accepted.append(accepted[parent] * (by_rank[rank] if rank < len(by_rank) else 0.0))
    return sum(accepted)


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """The work of a drafter beside one target."""

    drafter: Drafter
    line: Roofline
    """The target's."""
    n_seen: int
    """Weights read to see a step's tokens; 0: it sees none."""
    n_passed: int
    """Weights of one pass."""
    n_drawn: int
    """Weights of the logits of one level."""

    @classmethod
    def of(cls, drafter: Drafter, line: Roofline) -> DraftCosts:
        specs = drafter.specs(1)
        unembed = line.unembed
        if drafter.copy is not None:
            return cls(drafter, line, 0, 0, 0)
        if drafter.advance is None:
            one = _count(specs) // drafter.n_max
            return cls(drafter, line, 0, 0, one if one >= unembed else one + unembed)
        table, own = _count(specs.get("embed")), _count(specs.get("unembed"))
        body = _count(specs) - table - own - _count(specs.get("d2t"))
        tied = drafter.arch.tied and table  # its embedding is its unembedding
        return cls(drafter, line, body, body - _count(specs.get("fc")), own or tied or unembed)

    def works(self, rows: int, tokens: int, context: float, tree: TreeShape) -> list[Work]:
        """Of a step of ``rows`` and ``tokens`` that leaves drafts of that shape, one after the other."""
        if self.drafter.copy is not None:
            return []  # a search in the text: nothing beside a step
        found = [self._work(self.n_seen, rows, tokens, 0, context)] if self.n_seen else []
        for depth, n_inner in enumerate(inner_of(tree)):
            drawn = rows * n_inner
            passes = self.n_passed and (depth or not self.drafter.reads_next)
            read = self.n_drawn + (self.n_passed if passes else 0)
            found.append(self._work(read, rows, drawn if passes else 0, drawn, context))
        return found

    def seconds(self, works: Seq[Work]) -> float:
        """Expected. Beside reading and multiplying, each costs the share of a step's other costs that its
        layers and its one draw have of the target's."""
        layers = 1 + self.line.arch.L
        other = self.line.chip.step_s * (1 + len(self.drafter.kv_layers)) / layers
        line = self.line
        return sum(line.limit(w) / line.chip.reached + line.links(w) + other for w in works)

    def _work(self, read: int, rows: int, tokens: int, drawn: int, context: float) -> Work:
        """A pass over ``tokens`` that reads so many weights, ``n_drawn`` of them for ``drawn`` logits."""
        line, arch = self.line, self.drafter.arch
        kv = dataclasses.replace(line.kv, layers=self.drafter.kv_layers, groups=None)
        tp = 1 if self.drafter.replicated else line.tp
        body = read - (self.n_drawn if drawn else 0)
        attention = arch.layers[0].attn.key_flops * tokens * kv.seen(context)
        n_sums = (2 * len(kv.layers) + 1) * (tokens > 0) if tp > 1 else 0
        sent = 2 * n_sums * 4.0 * tokens * arch.D + 4.0 * drawn * arch.V
        return Work(
            weight_bytes=line.itemsize * read / tp,
            kv_bytes=kv.step_bytes(rows, tokens, context) if tokens else 0.0,
            flops=(2 * body * tokens + 2 * self.n_drawn * drawn + attention) / tp,
            n_collectives=n_sums + (drawn > 0) if tp > 1 else 0,
            link_bytes=sent * (tp - 1) / tp,
        )


def inner_of(parents: TreeShape) -> list[int]:
    """Nodes that get children, of each depth that has any."""
    depth = trees.depths(parents)
    return [
        len({p for p in parents if depth[p] == d}) for d in range(max(depth, default=0)) if parents
    ]


def _count(specs: Any) -> int:
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs, is_leaf=is_spec))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Decoding rates of an engine that speculates."""

    line: Roofline
    drafting: DraftCosts | None
    """None: the host drafts, and its time is not counted."""
    tree: TreeShape
    n_drafts: int
    draft_rows: int
    by_rank: tuple[float, ...]

    def rate(self, batch: int, context: int, *, fits: bool) -> DraftRate:
        """At the width that gives the most tokens a second."""
        alone = batch / self._verify(batch, 1, context)
        found = [self._at(batch, w, context, alone) for w in self._widths(batch)]
        return dataclasses.replace(max(found, key=lambda r: r.expected_tok_s), fits=fits)

    def _widths(self, batch: int) -> tuple[int, ...]:
        if self.drafting is not None and batch > self.draft_rows:
            return (1,)
        return (1, 1 + self.n_drafts) if self.tree else widths(self.n_drafts)

    def _at(self, batch: int, width: int, context: int, alone: float) -> DraftRate:
        shaped = self.tree or trees.chain(width - 1)
        verify, draft = self._verify(batch, width, context), 0.0
        tokens = tokens_per_step(shaped, self.by_rank) if width > 1 else 1.0
        if self.drafting is not None and width > 1:
            works = self.drafting.works(batch, batch * width, context, shaped)
            draft = self.drafting.seconds(works)
        rate = batch * tokens / (verify + draft)
        return DraftRate(
            batch=batch,
            context=context,
            width=width,
            tokens_per_step=tokens,
            verify_ms=verify * 1e3,
            draft_ms=draft * 1e3,
            expected_tok_s=rate,
            speed_up=rate / alone,
            fits=True,
        )

    def _verify(self, batch: int, width: int, context: int) -> float:
        n = batch * width
        return self.line.expected(self.line.work(rows=batch, tokens=n, drawn=n, n_context=context))
