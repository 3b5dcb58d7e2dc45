"""A drafter ready to run: its functions, its weights on the mesh, how much it drafts.

Owns the way from the name of a method and a directory to a ``Speculation``, and what cannot be
honoured of them. Must not know plans, nor how drafts are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from jserve.errors import ConfigError
from jserve.model import tree as trees
from jserve.model.draft_model import draft_model
from jserve.model.drafter import REPLICATED, Drafter
from jserve.model.families import family_for
from jserve.model.family import Arch, Family
from jserve.model.shard import ShardRules
from jserve.model.tree import Parents
from jserve.weights import heads
from jserve.weights.loader import load
from jserve.weights.source import Source

MAX_DRAFTS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What drafts on the device. ``params`` is the tree of ``drafter.specs``, placed on the mesh.

    Raises:
        ConfigError: more drafts, or deeper ones, than the drafter makes; no tree.
    """

    drafter: Drafter
    params: Any
    n_draft: int
    """Drafts left in a slot: the length of the chain, or the nodes of the tree below its root."""
    tree: Parents = ()
    """Empty: a chain."""

    def __post_init__(self) -> None:
        trees.check(self.tree)
        if not 1 <= self.n_draft <= MAX_DRAFTS:
            raise ConfigError(
                f"speculative.num_tokens must be 1 to {MAX_DRAFTS}, not {self.n_draft}",
                field="speculative.num_tokens",
            )
        if self.tree and len(self.tree) != self.n_draft:
            raise ConfigError(
                f"speculative.tree has {len(self.tree)} drafts, num_tokens is {self.n_draft}",
                field="speculative.tree",
            )
        depth = max(trees.depths(self.tree or trees.chain(self.n_draft)))
        if depth > self.drafter.n_max:
            raise ConfigError(
                f"speculative.num_tokens: {self.drafter.name} drafts at most {self.drafter.n_max}"
                f" tokens ahead, not {depth}",
                field="speculative.num_tokens",
            )


def load_draft_model(
    source: Source,
    target: Arch,
    mesh: Mesh,
    rules: ShardRules,
    dtype: Any,
    *,
    n_draft: int,
    tree: Parents = (),
    **how: Any,
) -> Speculation:
    """The model in ``source`` as a drafter; ``how`` are options of ``loader.load``.

    Raises:
        ConfigError: the model cannot be a drafter of ``target``.
        WeightsError: its files are broken.
    """
    family: Family = family_for(source.config)
    arch = family.arch(source.config)
    tp = 1 if rules.kv_heads is None else mesh.shape.get(rules.kv_heads, 1)
    drafter = draft_model(family, arch, target, tp)
    laid = REPLICATED if drafter.replicated else rules
    params = load(family, arch, source, mesh, laid, dtype, **how)
    return Speculation(drafter=drafter, params=params, n_draft=n_draft, tree=tree)


def load_head(
    method: str,
    source: Source,
    target: Arch,
    mesh: Mesh,
    rules: ShardRules,
    dtype: Any,
    *,
    n_draft: int,
    tree: Parents = (),
    **how: Any,
) -> Speculation:
    """The head in ``source`` (``method``: eagle3 or medusa) as a drafter; ``how`` are options of
    ``loader.load``.

    Raises:
        ConfigError: the head cannot be a drafter of ``target``.
        WeightsError: its files are broken or not of that format.
    """
    drafter, params = heads.load_head(method, source, target, mesh, rules, dtype, **how)
    return Speculation(drafter=drafter, params=params, n_draft=n_draft, tree=tree)
