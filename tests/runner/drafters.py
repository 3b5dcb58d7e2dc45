"""Drafters for the tiny model of ``harness``, with weights that make drafts right, or not."""

from __future__ import annotations

from typing import Any

import numpy as np

from jserve.model.draft_model import draft_model
from jserve.model.drafter import REPLICATED
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.shard import is_spec, shardings
from jserve.model.tree import Parents
from jserve.runner.drafts import Speculation
from tests.runner.harness import ARCH, RULES, _draw, tiny_params

import jax


def drawn(specs: Any, mesh: Any, rules: Any, seed: int) -> Any:
    """Seeded float32 weights of any tree of specs."""
    rng = np.random.default_rng(seed)
    host = jax.tree.map(lambda s: _draw(rng, s), specs, is_leaf=is_spec)
    return jax.device_put(host, shardings(specs, mesh, rules))


def same_model(mesh: Any, n: int = 3, tree: Parents = ()) -> Speculation:
    """The target as its own draft model: every draft is right while its KV is."""
    drafter = draft_model(LLAMA, ARCH, ARCH, mesh.shape["tp"])
    return Speculation(drafter=drafter, params=tiny_params(mesh), n_draft=n, tree=tree)


def other_model(mesh: Any, n: int = 3, tree: Parents = ()) -> Speculation:
    """A model of other weights: most drafts are wrong."""
    drafter = draft_model(LLAMA, ARCH, ARCH, mesh.shape["tp"])
    params = tiny_params(mesh, seed=7)
    return Speculation(drafter=drafter, params=params, n_draft=n, tree=tree)
