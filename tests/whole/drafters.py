"""Drafters on the device for the tiny model of ``equal``: each a runner with one program."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np

from jserve.model.draft_tree import TreeShape
from jserve.model.families import family_for
from jserve.model.features import SCORE
from jserve.model.shard import ShardRules, shardings
from jserve.model.view import Bucket
from jserve.ports import InFlight
from jserve.runner.runner import ModelRunner
from jserve.speculation.drafters.draft_model import draft_model
from jserve.speculation.drafters.eagle3 import eagle3
from jserve.speculation.drafters.load import LoadedDrafter
from jserve.speculation.drafters.medusa import medusa
from jserve.speculation.drafters.prompt_lookup import ngram
from jserve.types import Choice, StepPlan
from jserve.weights.dummy import draw_all
from tests.whole import equal

TREE = (0, 0, 1)
KINDS = ("draft", "eagle3", "medusa", "lookup")
TREES = KINDS[:-1]
"""Those that can draft a tree."""


def itself(
    arch: Any,
    params: Any,
    mesh: Any,
    tree: TreeShape,
    architecture: str = equal.TINY["architectures"][0],
) -> LoadedDrafter:
    """The target as its own draft model: every draft is right, of a tree one branch."""
    drafter = draft_model(family_for({"architectures": [architecture]}), arch, arch)
    places = shardings(drafter.specs(mesh.shape["tp"]), mesh, ShardRules())
    params = jax.device_put(params, places)
    return LoadedDrafter(drafter=drafter, params=params, n_draft=3, tree=tree)


def head(arch: Any, params: Any, mesh: Any, tree: TreeShape) -> LoadedDrafter:
    """An EAGLE-3 head of random weights: its drafts are wrong but for one now and then. Its layer is plain, whatever
    the target's are, as published heads' are."""
    own = family_for(equal.TINY).arch(equal.TINY | {"num_hidden_layers": 1, "hidden_size": arch.D})
    drafter = eagle3(own, arch, taps=(0, 1, 2), own_embed=False, mapped=False)
    return _random(drafter, mesh, tree)


def heads(arch: Any, params: Any, mesh: Any, tree: TreeShape) -> LoadedDrafter:
    """Medusa heads, as good."""
    return _random(medusa(arch, n_heads=3), mesh, tree)


def copies(arch: Any, params: Any, mesh: Any, tree: TreeShape) -> LoadedDrafter:
    """Prompt lookup over less than the longest text."""
    assert not tree
    return LoadedDrafter(drafter=ngram(arch, least=1, most=3, window=64), params={}, n_draft=3)


def _random(drafter: Any, mesh: Any, tree: TreeShape) -> LoadedDrafter:
    weights = draw_all(drafter.specs(mesh.shape["tp"]), 5, mesh, ShardRules(), np.float32)
    return LoadedDrafter(drafter=drafter, params=weights, n_draft=3, tree=tree)


MAKERS: dict[str, Callable[..., LoadedDrafter]] = {
    "draft": itself,
    "eagle3": head,
    "medusa": heads,
    "lookup": copies,
}


@lru_cache
def drafting(
    kind: str, tree: TreeShape = (), tp: int = 1, sharding: str | None = None
) -> ModelRunner:
    """A runner with a drafter of ``KINDS``, whose one program takes every plan."""
    drafter = partial(MAKERS[kind], tree=tree)
    return equal.make_runner(tp, drafter, (_wide(tree),), sharding=sharding)


def drafting_of(
    architecture: str, config: dict[str, Any], kind: str, tree: TreeShape = ()
) -> ModelRunner:
    """The same of transformers' tiny model of an architecture."""
    own = {"architecture": architecture} if kind == "draft" else {}
    drafter = partial(MAKERS[kind], tree=tree, **own)
    return equal.runner_of(architecture, config, drafter, (_wide(tree),))


def _wide(tree: TreeShape) -> Bucket:
    return Bucket(D=8, P=64, F=8, J=4, n_draft=3, tree=tree, features=(SCORE,))


class Watching:
    """A runner that counts what became of its drafts, and in what ways it was used."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.limits = runner, runner.limits
        self.drafted = self.stood = 0
        self.chunks = self.cached = self.anew = self.overlapping = 0
        self._flying = 0
        self._begun: set[Choice] = set()

    def launch(self, plan: StepPlan) -> InFlight:
        self._flying += 1
        self.overlapping = max(self.overlapping, self._flying - 1)
        for row in plan.rows:
            if not row.from_slot:
                self.chunks += not row.emits
                self.cached += row.start > 0 and row.choice not in self._begun
                self._begun.add(row.choice)
                self.anew += row.start + row.count > row.choice.n_prompt
        return self.runner.launch(plan)

    def collect(self, flight: InFlight) -> Any:
        self._flying -= 1
        result = self.runner.collect(flight)
        for row, n_ok in zip(flight.plan.rows, result.n_ok_R.tolist(), strict=True):
            self.drafted += len(row.drafts)
            self.stood += n_ok - 1 if row.drafts else 0
        return result
