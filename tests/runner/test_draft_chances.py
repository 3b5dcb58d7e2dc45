"""The distribution of sampled tokens with device drafters: joint outcomes of two tokens against the
target's exact probabilities, and bugs planted in the step, each of which a test of this kind sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jserve.model import path, step as step_module, tree, verify
from jserve.model.attention import backend
from jserve.model.draft_model import draft_model
from jserve.model.eagle3 import eagle3
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.hand import Row, pack
from jserve.model.medusa import medusa
from jserve.model.shard import make_mesh
from jserve.model.step import StepModel, make_step
from jserve.model.view import RANDOM, TRUNCATE, Bucket, StepDims, numpy_views
from jserve.runner.state import new_state
from tests.runner.drafters import drawn
from tests.runner.harness import ARCH, RULES

V, PROMPT, ROWS = 7, [5, 3], 64
SMALL = replace(ARCH, V=V, L=1, D=16, F=32, N=4, K=2)
TREE = (0, 0, 1, 1, 2, 3)
PLAIN, CUT = {"temperature": 1.0}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9}


@dataclass(frozen=True)
class Kind:
    drafter: Any
    params: Any
    parents: tuple[int, ...]


def kind_of(name: str, parents: tuple[int, ...], target: Any) -> Kind:
    mesh = make_mesh(1)
    if name == "draft":  # near the target: many drafts stand, many do not
        drafter = draft_model(LLAMA, SMALL, SMALL)
        noise = drawn(drafter.specs(1), mesh, RULES, seed=3)
        return Kind(drafter, jax.tree.map(lambda a, b: a + 0.3 * b, target, noise), parents)
    if name == "eagle3":
        drafter = eagle3(SMALL, SMALL, taps=(0, 1), own_embed=False, mapped=False)
    else:
        drafter = medusa(SMALL, n_heads=3)
    return Kind(drafter, drawn(drafter.specs(1), mesh, RULES, seed=4), parents)


def target_params() -> Any:
    params = drawn(LLAMA.specs(SMALL, 1), make_mesh(1), RULES, seed=11)
    # Seven tokens are more alike than in a text: what comes next must depend on what came before.
    return {**params, "embed": params["embed"] * 3}


class Dice:
    """Rows that all start from ``PROMPT``, each with a seed of its own, three tokens drawn of each."""

    def __init__(self, kind: Kind, target: Any, **sampling: Any) -> None:
        n = len(kind.parents) or 3
        self.bucket = Bucket(D=ROWS, P=2 * ROWS, F=ROWS, J=1 + n, n_draft=n, tree=kind.parents)
        self.dims = StepDims(C=ROWS, M=2, Z=8, V=V, drafts=n)
        self.model = StepModel(
            family=LLAMA, arch=SMALL, backend=backend("xla"), dims=self.dims, mesh=make_mesh(1),
            rules=RULES, n_pages=2 * ROWS + 1, kv_dtype=jnp.dtype("float32"),
            dtype=jnp.dtype("float32"), drafter=kind.drafter,
        )  # fmt: skip
        self.params = {"target": target, "drafter": kind.params}
        self.sampling = sampling
        self.step = jax.jit(make_step(self.model, self.bucket), donate_argnums=1)
        self.state = new_state(self.model)

    def throw(self, first_seed: int) -> tuple[np.ndarray, int]:
        """(int[ROWS, 3] tokens, drafts that stood)."""
        tokens: list[list[int]] = [[] for _ in range(ROWS)]
        stood = 0
        for nth in range(3):
            n_ok_R, token_RJ = self._run(first_seed, prefill=nth == 0)
            for r in range(ROWS):
                tokens[r] += token_RJ[r, : n_ok_R[r]].tolist()
            stood += int((n_ok_R - 1).sum())
        return np.array([row[:3] for row in tokens]), stood

    def _run(self, first_seed: int, prefill: bool) -> tuple[np.ndarray, np.ndarray]:
        pages = [[1 + 2 * r, 2 + 2 * r] for r in range(ROWS)]
        J = self.bucket.J
        first = [Row(p, 0, PROMPT, slot=r) for r, p in enumerate(pages)] if prefill else []
        later = [] if prefill else [Row(p, -1, [-1] * J, slot=r) for r, p in enumerate(pages)]
        buf = pack(self.bucket, self.dims, self.model.backend, later, first)
        v = numpy_views(buf, self.model.fields(self.bucket))
        rows = slice(ROWS, None) if prefill else slice(0, ROWS)
        for name, value in self.sampling.items():
            v[f"{name}_R"][rows] = value
        v["seed_R2"][rows, 0] = first_seed + np.arange(ROWS)
        v["uses_R"][rows] = v["flags"][...] = RANDOM | TRUNCATE * (len(self.sampling) > 1)
        self.state, out = self.step(self.params, self.state, buf)
        packed = np.asarray(out.packed_RX)[rows]
        return packed[:, 0], packed[:, 2 : 2 + J]

    def pairs(self, n: int) -> tuple[np.ndarray, int]:
        """(counts [V, V] of the second and third tokens of n rows, drafts that stood)."""
        counts, stood = np.zeros((V, V), int), 0
        for i in range(-(-n // ROWS)):
            tokens, more = self.throw(1000 + i * ROWS)
            np.add.at(counts, (tokens[:, 1], tokens[:, 2]), 1)
            stood += more
        return counts, stood


def exact(target: Any, **sampling: Any) -> np.ndarray:
    """[V, V]: probabilities of the second and third tokens, over all first ones."""
    mesh, dims = make_mesh(1), StepDims(C=ROWS, M=2, Z=8, V=V)
    attn, P = backend("ref"), 4 * V * V
    bucket = Bucket(D=0, P=P, F=V * V)
    model = StepModel(
        family=LLAMA, arch=SMALL, backend=attn, dims=dims, mesh=mesh, rules=RULES,
        n_pages=V * V + 1, kv_dtype=jnp.dtype("float32"), dtype=jnp.dtype("float32"),
    )  # fmt: skip
    from jserve.model.view import unpack

    rows = [Row([1 + a * V + b], 0, [*PROMPT, a, b], slot=0) for a in range(V) for b in range(V)]
    state = new_state(model)
    view = unpack(
        jnp.asarray(pack(bucket, dims, attn, [], rows)),
        model.fields(bucket),
        bucket,
        dims,
        state.slots,
    )
    x_TD, _ = LLAMA.forward(SMALL, target, view, state.kv, attn, None)
    logits = np.asarray(LLAMA.logits(SMALL, target, x_TD, None), np.float64).reshape(V, V, 4, V)
    p = np.apply_along_axis(lambda x: filtered(x, **sampling), 3, logits)
    first, second, third = p[0, 0, 1], p[:, 0, 2], p[:, :, 3]
    return np.einsum("a,ab,abc->bc", first, second, third)


def filtered(x_V: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    order = np.argsort(-x_V)
    p = np.exp((x_V - x_V.max()) / temperature)
    if top_k:
        p[order[top_k:]] = 0.0
    sure = np.cumsum(p[order]) - p[order]
    p[order[sure >= top_p * p.sum()]] = 0.0
    return p / p.sum()


def p_value(counts: np.ndarray, chances: np.ndarray) -> float:
    """Of the chi-square test, rare outcomes taken together; 0 for an outcome that cannot be."""
    counts, want = counts.ravel(), chances.ravel() * counts.sum()
    if counts[want == 0].any():
        return 0.0
    rare = want < 10
    seen = np.append(counts[~rare], counts[rare].sum())
    hoped = np.append(want[~rare], want[rare].sum())
    if hoped[-1] == 0:
        seen, hoped = seen[:-1], hoped[:-1]
    return float(stats.chisquare(seen, hoped * seen.sum() / hoped.sum()).pvalue)


def judged(name: str, parents: tuple[int, ...], sampling: dict[str, Any], n: int) -> float:
    target = target_params()
    counts, stood = Dice(kind_of(name, parents, target), target, **sampling).pairs(n)
    assert stood > n / 10, "hardly a draft stood: nothing was tested"
    return p_value(counts, exact(target, **sampling))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [PLAIN, CUT], ids=["plain", "cut"])
@pytest.mark.parametrize(
    ("name", "parents"),
    [
        ("draft", ()),
        ("draft", TREE),
        ("eagle3", ()),
        ("eagle3", TREE),
        ("medusa", ()),
        ("medusa", TREE),
    ],
    ids=str,
)
def test_pairs_of_tokens_come_with_their_chances(name, parents, sampling):
    assert judged(name, parents, sampling, 50_000) > 1e-4


# --- planted bugs


def accept_always(token, drawn, count):
    return jnp.maximum(count, 1) + 0 * verify.accept(token, drawn, count)


def as_if_drafted(real: Callable) -> Callable:
    """What is put out is the draft, not what was drawn: all of them stand, and so are the tokens."""

    def by_row(view, x_E, fill):
        out = real(view, x_E, fill)
        if x_E.dtype != jnp.int32 or x_E.ndim > 1 or view.J == 1:
            return out
        D, J = view.D, view.J
        draft_DJ = view.tok_T[: D * J].reshape(D, J)
        return out.at[:D, : J - 1].set(draft_DJ[:, 1:])

    return by_row


def bonus_from_the_draft(real: Callable) -> Callable:
    """After the last draft that stands comes the next draft instead of the draw."""

    def by_row(view, x_E, fill):
        out = real(view, x_E, fill)
        if x_E.dtype != jnp.int32 or x_E.ndim > 1 or view.J == 1:
            return out
        D, J = view.D, view.J
        token_DJ = view.tok_T[: D * J].reshape(D, J)
        n_ok_D = verify.accept(token_DJ, out[:D], view.count_R[:D])
        at_D = jnp.minimum(n_ok_D, J - 1)
        instead_D = token_DJ[jnp.arange(D), at_D]
        return out.at[jnp.arange(D), n_ok_D - 1].set(
            jnp.where(n_ok_D < J, instead_D, out[jnp.arange(D), n_ok_D - 1])
        )

    return by_row


def sees_all(parents):
    """Mask forgotten: a node sees all nodes before it, of other branches too."""
    J = 1 + len(parents)
    sees = tuple(tuple(x <= j for x in range(J)) for j in range(J))
    return tree.DraftMask(sees, tree.depths(parents))


def wrong_parent(token, drawn, count, parents):
    """The second child of the root is taken for a child of the first."""
    return verify.accept_tree(token, drawn, count, (0, 1, *parents[2:]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "parents"),
    [
        ("accept always", ()),
        ("bonus from the draft", ()),
        ("mask forgotten", TREE),
        ("branch with a wrong parent", TREE),
        ("path not moved", TREE),
    ],
)
def test_a_planted_bug_changes_the_chances(monkeypatch, bug, parents):
    if bug == "accept always":
        monkeypatch.setattr(step_module, "accept", accept_always)
        monkeypatch.setattr(step_module, "by_row", as_if_drafted(step_module.by_row))
    elif bug == "bonus from the draft":
        monkeypatch.setattr(step_module, "by_row", bonus_from_the_draft(step_module.by_row))
    elif bug == "mask forgotten":
        monkeypatch.setattr("jserve.model.view.mask_of", sees_all)
    elif bug == "branch with a wrong parent":
        monkeypatch.setattr(path, "accept_tree", wrong_parent)
    else:
        monkeypatch.setattr(step_module, "straightened", lambda attn, view, kv, path: kv)
    assert judged("draft", parents, PLAIN, 30_000) < 1e-6
