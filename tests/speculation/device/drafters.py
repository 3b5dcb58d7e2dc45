"""Drafters for the tiny model of ``harness``, with weights that make drafts right, or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jserve.model.arch import resized
from jserve.model.draft_tree import TreeShape
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.param_spec import is_spec
from jserve.model.shard import shardings
from jserve.speculation.drafters.draft_model import draft_model
from jserve.speculation.drafters.drafter import REPLICATED, Drafter, split_over
from jserve.speculation.drafters.eagle3 import eagle3
from jserve.speculation.drafters.load import LoadedDrafter
from jserve.speculation.drafters.medusa import medusa
from tests.runner.harness import ARCH, RULES, _draw, tiny_params


def drawn(specs: Any, mesh: Any, rules: Any, seed: int) -> Any:
    """Seeded float32 weights of any tree of specs."""
    rng = np.random.default_rng(seed)
    host = jax.tree.map(lambda s: _draw(rng, s), specs, is_leaf=is_spec)
    return jax.device_put(host, shardings(specs, mesh, rules))


def same_model(mesh: Any, n: int = 3, tree: TreeShape = (), wished: int = 0) -> LoadedDrafter:
    """The target as its own draft model: every draft is right while its KV is."""
    return _model(0, mesh, n, tree, wished)


def other_model(mesh: Any, n: int = 3, tree: TreeShape = (), wished: int = 0) -> LoadedDrafter:
    """A model of other weights: most drafts are wrong."""
    return _model(7, mesh, n, tree, wished)


def flat_model(mesh: Any, n: int = 3, tree: TreeShape = (), wished: int = 0) -> LoadedDrafter:
    """The target, but of two minds: its likeliest token is right, and others are nearly as likely to it."""
    return _flat(same_model(mesh, n, tree, wished))


def flat_eagle(mesh: Any, n: int = 3, tree: TreeShape = (), wished: int = 0) -> LoadedDrafter:
    return _flat(eagle(mesh, n, tree, wished))


def _flat(made: LoadedDrafter) -> LoadedDrafter:
    return replace(made, params={**made.params, "unembed": made.params["unembed"] * 0.3})


def _model(seed: int, mesh: Any, n: int, tree: TreeShape, wished: int) -> LoadedDrafter:
    drafter = split_over(draft_model(LLAMA, ARCH, ARCH), mesh.shape["tp"], wished)
    params = tiny_params(mesh, seed, whole=drafter.replicated)
    return LoadedDrafter(drafter=drafter, params=params, n_draft=n, tree=tree)


HEAD = resized(ARCH, L=1, V=100, N=4, K=2, F=48)
"""An EAGLE-3 head with a draft vocabulary, unlike the target in all it may differ in."""
TAPS = (0, 1, 2)


def eagle(mesh: Any, n: int = 3, tree: TreeShape = (), wished: int = 0) -> LoadedDrafter:
    made = eagle3(HEAD, ARCH, taps=TAPS, own_embed=False)
    drafter, params = _drawn(made, mesh, wished, seed=5)
    params["d2t"] = jax.device_put(
        np.arange(HEAD.V, dtype=np.int32) // 4, params["d2t"].sharding
    )  # rows 0, 1, 2, 3, 4 ... are tokens 0, 1, 2, 3, 5 ...
    return LoadedDrafter(drafter=drafter, params=params, n_draft=n, tree=tree)


def heads(mesh: Any, n: int = 3, tree: TreeShape = (), wished: int = 0) -> LoadedDrafter:
    drafter, params = _drawn(medusa(ARCH, n_heads=3), mesh, wished, seed=6)
    return LoadedDrafter(drafter=drafter, params=params, n_draft=n, tree=tree)


def _drawn(drafter: Drafter, mesh: Any, wished: int, seed: int) -> tuple[Drafter, Any]:
    tp = mesh.shape["tp"]
    drafter = split_over(drafter, tp, wished)
    specs = drafter.specs(1 if drafter.replicated else tp)
    return drafter, drawn(specs, mesh, REPLICATED if drafter.replicated else RULES, seed)
