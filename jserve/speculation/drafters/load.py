"""Loads a drafter: its functions, its weights on the mesh and its draft shape.

A method's name and a directory become a ``LoadedDrafter``; options and files that cannot be honoured are refused.
``find_drafter`` reads a drafter without its weights, for ``jserve plan``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax.sharding import Mesh

from jserve.config import SpeculativeOptions
from jserve.errors import ConfigError
from jserve.model import draft_tree as trees
from jserve.model.arch import Arch
from jserve.model.draft_tree import TreeShape
from jserve.model.families import family_for
from jserve.model.rope import for_context, for_requests, short_context
from jserve.model.shard import ShardRules
from jserve.speculation.drafters import heads
from jserve.speculation.drafters.draft_model import draft_model
from jserve.speculation.drafters.drafter import REPLICATED, Drafter, split_over
from jserve.speculation.drafters.prompt_lookup import ngram
from jserve.weights.loader import load
from jserve.weights.place import tp_size
from jserve.weights.quant.scheme import scheme_of
from jserve.weights.source import Source

MAX_DRAFTS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDrafter:
    """A loaded drafter. ``params`` is the tree of ``drafter.specs``, placed on the mesh.

    Raises:
        ConfigError: more drafts, or deeper ones, than the drafter makes; no tree.
    """

    drafter: Drafter
    params: Any
    """None where only sizes are asked for."""
    n_draft: int
    """Drafts left in a slot: the length of the chain, or the nodes of the tree below its root."""
    tree: TreeShape = ()
    """Empty: a chain."""

    def __post_init__(self) -> None:
        n = len(self.tree)
        trees.check(self.tree)
        if not 1 <= self.n_draft <= MAX_DRAFTS:
            raise ConfigError(
                f"speculative.num_tokens must be 1 to {MAX_DRAFTS}, not {self.n_draft}",
                field="speculative.num_tokens",
            )
        if self.tree and n != self.n_draft:
            raise ConfigError(
                f"speculative.tree has {n} drafts, num_tokens is {self.n_draft}",
                field="speculative.tree",
            )
        if list(self.depths) != sorted(self.depths):
            raise ConfigError(
                "speculative.tree: its drafts must come level by level", field="speculative.tree"
            )
        depth = max(self.depths or (self.n_draft,))
        if depth > self.drafter.n_max:
            raise ConfigError(
                f"speculative.num_tokens: {self.drafter.name} drafts at most {self.drafter.n_max}"
                f" tokens ahead, not {depth}",
                field="speculative.num_tokens",
            )

    @property
    def depths(self) -> tuple[int, ...]:
        """Of each draft of the tree, in order; (): a chain."""
        return trees.depths(self.tree)[1:]


@dataclass(frozen=True, slots=True)
class FoundDrafter:
    """A drafter in a directory, its weights not yet loaded."""

    drafter: Drafter
    load: Callable[..., Any]
    """(mesh, rules, dtype, options of ``loader.load``) -> the placed tree of its specs. Raises
    WeightsError: its files are broken."""

    def over(self, tp: int, wished: int) -> FoundDrafter:
        """The same as ``tp`` devices hold it (``split_over``)."""
        return FoundDrafter(split_over(self.drafter, tp, wished), self.load)

    def loaded(self, mesh: Mesh, rules: ShardRules, dtype: Any, **how: Any) -> Any:
        laid = REPLICATED if self.drafter.replicated else rules.in_width
        return self.load(mesh, laid, dtype, **how)


def copying(options: SpeculativeOptions, n_draft: int, target: Arch) -> LoadedDrafter:
    """Prompt lookup as ``options`` want it: a drafter without files or weights."""
    drafter = ngram(
        target,
        least=options.prompt_lookup_min,
        most=options.prompt_lookup_max,
        window=options.max_lookup_tokens,
    )
    return LoadedDrafter(drafter=drafter, params={}, n_draft=n_draft)


def find_drafter(method: str, source: Source, target: Arch) -> FoundDrafter:
    """Reads ``source`` as a drafter of ``target``, without its weights.

    Raises:
        ConfigError: no such method, or what is there cannot draft for ``target``.
        WeightsError: its files are broken.
    """
    if method not in FINDERS:
        raise ConfigError(
            f"speculative.method {method!r} does not draft on the device, only {', '.join(FINDERS)}",
            field="speculative.method",
        )
    return FINDERS[method](source, target)


def load_speculation(
    method: str,
    source: Source,
    target: Arch,
    mesh: Mesh,
    rules: ShardRules,
    dtype: Any,
    *,
    shape: Callable[[int], tuple[int, TreeShape]],
    tensor_parallel_size: int = 0,
    **how: Any,
) -> LoadedDrafter:
    """Loads ``source`` as a drafter of ``target``, ready to run.

    Args:
        shape: most drafts after one another that the drafter makes -> (drafts, their tree or ()).
        tensor_parallel_size: as of ``split_over``.
        how: options of ``loader.load``.

    Raises:
        ConfigError, WeightsError: as ``find_drafter`` and ``split_over``.
    """
    found = find_drafter(method, source, target).over(tp_size(mesh, rules), tensor_parallel_size)
    n_draft, tree = shape(found.drafter.n_max)
    params = found.loaded(mesh, rules, dtype, **how)
    return LoadedDrafter(drafter=found.drafter, params=params, n_draft=n_draft, tree=tree)


def _draft_model(source: Source, target: Arch) -> FoundDrafter:
    if scheme_of(source.config, "float32") is not None:
        raise ConfigError(
            f"{source.name}: quantization_config of a draft model is not supported",
            field="quantization_config",
        )
    family = family_for(source.config)
    plain = family.arch(source.config)
    arch = for_requests(plain, target.max_position)
    if short_context(arch) != short_context(target):  # rows say what they have of the target's
        arch = for_context(plain, target.max_position)
    return FoundDrafter(draft_model(family, arch, target), partial(load, family, arch, source))


def _head(method: str, source: Source, target: Arch) -> FoundDrafter:
    return FoundDrafter(*heads.read_head(method, source, target))


FINDERS: dict[str, Callable[[Source, Arch], FoundDrafter]] = {
    "draft": _draft_model,
    **{method: partial(_head, method) for method in heads.READERS},
}
