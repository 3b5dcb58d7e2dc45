"""Exact chances of what a model of seven tokens says, and many rows that draw from it with drafts.

The model has one layer with a window of three tokens, so the last three decide what may come next and a
table of 343 contexts says how likely, wherever a row stands. Rows draw tens of tokens each by verify
steps, and every token is judged given the two before it and its place among those that its step drew: an
accepted draft, what follows it, what follows a draft that fell or the end of a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import astuple, dataclass, replace
from functools import cache, lru_cache
from itertools import product
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from jserve.model import draft_tree as tree, slots as slot_rows
from jserve.model.arch import resized
from jserve.model.attention import backend
from jserve.model.ctx import Ctx
from jserve.model.draft_tree import TreeShape
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.features import MASK
from jserve.model.hand import Row, pack
from jserve.model.mesh import make_mesh
from jserve.model.shard import Axes
from jserve.model.step import DeviceState, StepModel, make_step
from jserve.model.view import Bucket, StepDims, numpy_views, unpack
from jserve.runner.batch import uses
from jserve.runner.state import new_state
from jserve.sampling import SamplingParams
from jserve.speculation.drafters.draft_model import draft_model
from jserve.speculation.drafters.drafter import Drafter
from jserve.speculation.drafters.eagle3 import eagle3
from jserve.speculation.drafters.medusa import medusa
from jserve.speculation.drafters.prompt_lookup import ngram
from jserve.types import SlotLoad
from tests.model.sample_reference import Context, adjusted, distribution
from tests.model.sample_rig import mask_words
from tests.runner.harness import ARCH, RULES
from tests.speculation.device.drafters import drawn

V, START = 7, 5
"""Tokens, and the one that every text starts with."""
WINDOW = 3
ROWS, M, Z = 1024, 9, 8
ARCH7 = resized(ARCH, V=V, L=1, D=16, F=32, N=4, K=2, windows=(WINDOW,))
TREE = (0, 0, 1, 2, 2)
CHAIN: TreeShape = ()
N_CHAIN = 3

Allowed = Callable[[Seq[int]], np.ndarray]
"""Output so far -> bool[V]: what may follow. Only its length and its last two tokens matter."""


@dataclass(frozen=True)
class Setting:
    """How tokens are drawn."""

    params: SamplingParams
    allowed: Allowed | None = None
    far_seeds: bool = False
    """Seeds from the whole range, not neighbours."""


def by_place(output: Seq[int]) -> np.ndarray:
    """A mask that knows how long the output is and nothing else."""
    return np.arange(V) % 3 != len(output) % 3


def _drawn_by(**params: Any) -> Setting:
    return Setting(SamplingParams(**{"temperature": 1.0, **params}))


SETTINGS = {
    "plain": _drawn_by(),
    "cold": _drawn_by(temperature=0.3),
    "hot": _drawn_by(temperature=2.0),
    "top_k": _drawn_by(top_k=4),
    "top_p": _drawn_by(top_p=0.8),
    "min_p": _drawn_by(min_p=0.08),
    "penalties": _drawn_by(repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.6),
    "bias": _drawn_by(logit_bias={2: 1.5, 6: -100.0}),
    "allowed": _drawn_by(allowed_token_ids=(0, 1, 3, 5)),
    "mask": Setting(SamplingParams(temperature=1.0), allowed=by_place),
    "seeds": Setting(SamplingParams(temperature=0.8, top_k=5, top_p=0.9), far_seeds=True),
}


# --- who drafts


class HostDrafts(Protocol):
    """Drafts made beside the device, for all rows."""

    def propose(self, texts: list[list[int]], most: int) -> list[Seq[int]]:
        """Of each row, whose text is START and its output."""
        ...

    def mask(self, row: int, drafts: Seq[int]) -> np.ndarray | None:
        """int32[1 + len(drafts), 1] that the row needs; None: none."""
        ...


@dataclass(frozen=True)
class Kind:
    """A drafter of the device with its weights, or else drafts of the host."""

    parents: TreeShape = CHAIN
    drafter: Drafter | None = None
    params: Any = None

    @property
    def n(self) -> int:
        return len(self.parents) or N_CHAIN


@lru_cache
def target_params() -> Any:
    params = drawn(LLAMA.specs(ARCH7, 1), make_mesh(1), RULES, seed=11)
    # Seven tokens are more alike than in a text: what comes next must depend on what came before, and on
    # the token before that too, or a row that reads the KV of another branch would not show it.
    layers = [{**layer, "o": layer["o"] * 8} for layer in params["layers"]]
    return {**params, "embed": params["embed"] * 3, "layers": layers}


def device_kind(name: str, parents: TreeShape = CHAIN) -> Kind:
    """A drafter near the target (many drafts stand, many do not), heads of random weights, or one that
    copies."""
    mesh, target = make_mesh(1), target_params()
    if name == "lookup":
        return Kind(parents, ngram(ARCH7, least=1, most=3, window=M * Z), {})
    if name == "draft":
        drafter = draft_model(LLAMA, ARCH7, ARCH7)
        noise = drawn(drafter.specs(1), mesh, RULES, seed=3)
        return Kind(parents, drafter, jax.tree.map(lambda a, b: a + 0.3 * b, target, noise))
    if name == "eagle3":
        drafter = eagle3(
            resized(ARCH7, windows=(0,)), ARCH7, taps=(0, 1), own_embed=False, mapped=False
        )
    else:
        drafter = medusa(ARCH7, n_heads=3)
    return Kind(parents, drafter, drawn(drafter.specs(1), mesh, RULES, seed=4))


# --- rows that draw


@dataclass(frozen=True)
class Drawn:
    """Tokens that verify rows drew, each with what it was drawn after."""

    texts: list[list[int]]
    """Of each row: START and its output."""
    drafts: list[list[int]]
    """Of each row, beside every token of the output: the host's draft for its place, -1 for none."""
    places: list[list[int]]
    """Of each row, beside every token: how many its step had drawn before it."""
    n_stood: int

    @property
    def n(self) -> int:
        return sum(map(len, self.drafts))

    def __add__(self, other: Drawn) -> Drawn:
        parts = (a + b for a, b in zip(astuple(self), astuple(other), strict=True))
        return Drawn(*parts)


class Dice:
    """The verify step of one kind, compiled once, and rows that use it."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        held = kind.n if kind.drafter is not None else 0
        self.bucket = Bucket(
            D=ROWS, P=0, F=0, J=1 + kind.n, n_draft=held, tree=kind.parents, features=(MASK,)
        )
        text = 0 if kind.drafter is None else kind.drafter.text
        self.dims = StepDims(C=ROWS, M=M, Z=Z, V=V, drafts=held, text=text, n_vocab_rows=ROWS)
        self.model = StepModel(
            family=LLAMA, arch=ARCH7, backend=backend("xla"), dims=self.dims, mesh=make_mesh(1),
            rules=RULES, n_pages=M * ROWS + 1, kv_dtype=jnp.dtype("float32"),
            dtype=jnp.dtype("float32"), drafter=kind.drafter,
        )  # fmt: skip
        own = {"target": target_params(), "drafter": kind.params}
        self.params = target_params() if kind.drafter is None else own
        self.step = jax.jit(make_step(self.model, self.bucket), donate_argnums=1)
        self.state = new_state(self.model)
        pages = [range(1 + M * r, 1 + M * (r + 1)) for r in range(ROWS)]
        rows = [Row(p, -1, [-1] * self.bucket.J, slot=r) for r, p in enumerate(pages)]
        self.blank = pack(self.bucket, self.dims, self.model.backend, rows, [])

    def throw(
        self, setting: Setting, n: int, host: Callable[[], HostDrafts] | None = None
    ) -> Drawn:
        """At least ``n`` tokens; ``host`` makes who drafts where the device does not."""
        all_, first = Drawn([], [], [], 0), 1000
        while all_.n < n:
            all_ += self._once(setting, self._seeds(setting, first), host() if host else None)
            first += ROWS
        return all_

    def _seeds(self, setting: Setting, first: int) -> np.ndarray:
        """int32[ROWS, 2]"""
        seeds = first + np.arange(ROWS, dtype=np.int64)
        if setting.far_seeds:
            seeds = np.random.default_rng(first).integers(-(2**63), 2**63 - 1, ROWS, np.int64)
        return seeds.view(np.int32).reshape(ROWS, 2)

    def _once(self, setting: Setting, seeds: np.ndarray, host: HostDrafts | None) -> Drawn:
        """Rows of one token each, until the first of them might fill its pages."""
        self.state = DeviceState(kv=self.state.kv, slots=self._slots(setting.params))
        texts: list[list[int]] = [[START] for _ in range(ROWS)]
        placed: list[list[int]] = [[] for _ in range(ROWS)]
        places: list[list[int]] = [[] for _ in range(ROWS)]
        n_stood = 0
        while max(map(len, texts)) + self.bucket.J < M * Z:
            drafts = None if host is None else host.propose(texts, self.kind.n)
            n_ok_R, token_RJ = self._run(setting, seeds, texts, drafts, host)
            for r, (n_ok, tokens) in enumerate(
                zip(n_ok_R.tolist(), token_RJ.tolist(), strict=True)
            ):
                texts[r] += tokens[:n_ok]
                here = () if drafts is None else drafts[r]
                placed[r] += [*here, *[-1] * n_ok][:n_ok]
                places[r] += range(n_ok)
            n_stood += int((n_ok_R - 1).sum())
        return Drawn(texts, placed, places, n_stood)

    def _slots(self, params: SamplingParams) -> Any:
        """Slots whose last token is START, with no KV yet."""
        dims = self.dims
        one = slot_rows.empty(1, V, dims.drafts, text=dims.text, n_vocab_rows=1)
        item = SlotLoad(slot=0, tokens=[START], n_prompt=1, params=params, vocab_row=0)
        for buf in slot_rows.load_buffers(item, V):
            one = slot_rows.load(one, jnp.asarray(buf))
        for buf in slot_rows.text_buffers(item, self.dims.text) if self.dims.text else ():
            one = slot_rows.load_text(one, jnp.asarray(buf))
        one = replace(one, last_C=jnp.full(1, START, jnp.int32))
        every = jax.tree.map(lambda x: jnp.asarray(np.repeat(x, ROWS, axis=0)), one)
        return replace(every, vocab=replace(every.vocab, row_C=jnp.arange(ROWS)))

    def _run(
        self,
        setting: Setting,
        seeds: np.ndarray,
        texts: list[list[int]],
        drafts: list[Seq[int]] | None,
        host: HostDrafts | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        buf, params = self.blank.copy(), setting.params
        v = numpy_views(buf, self.model.fields(self.bucket))
        for name in ("temperature", "top_p", "min_p", "top_k"):
            v[f"{name}_R"][:] = getattr(params, name)
        for name in ("repetition", "presence", "frequency"):
            v[f"{name}_R"][:] = getattr(params, f"{name}_penalty")
        v["uses_R"][:] = v["flags"][...] = uses(params)
        v["seed_R2"][:] = seeds
        v["mask_RJW"][:] = v["redraw_RJ"][:] = -1
        if drafts is not None:
            self._put(v, drafts)
        if setting.allowed is not None:
            self._mask(v["mask_RJW"], setting.allowed, texts)
        for r in range(ROWS) if host is not None and drafts is not None else ():
            own = host.mask(r, drafts[r])
            if own is not None:
                v["mask_RJW"][r, : len(own)] &= own
        self.state, out = self.step(self.params, self.state, buf)
        packed = np.asarray(out.packed_RX)
        assert packed[:, 1].all(), "some logits were not finite"
        return packed[:, 0], packed[:, 2 : 2 + self.bucket.J]

    def _put(self, v: dict[str, np.ndarray], drafts: list[Seq[int]]) -> None:
        J = self.bucket.J
        count_R = v["count_R"][:] = 1 + np.array([len(ids) for ids in drafts])
        tok_RJ, row_RJ = v["tok_T"].reshape(ROWS, J), v["row_T"].reshape(ROWS, J)
        row_RJ[:] = np.where(np.arange(J) < count_R[:, None], np.arange(ROWS)[:, None], ROWS)
        for r, ids in enumerate(drafts):
            tok_RJ[r, 1 : 1 + len(ids)] = ids

    def _mask(self, out: np.ndarray, allowed: Allowed, texts: list[list[int]]) -> None:
        """Masks that depend on the place alone; of a tree, on its depth."""
        place_RJ = np.array([len(t) - 1 for t in texts])[:, None] + self._depths()
        words = [mask_words(allowed([0] * n), V)[0] for n in range(place_RJ.max() + 1)]
        out[..., 0] &= np.array(words, np.int32)[place_RJ]

    def _depths(self) -> np.ndarray:
        """[J], of the nodes of the trees to be verified."""
        return np.array(tree.depths(self.kind.parents or tree.chain(self.kind.n)))


# --- what should come


@lru_cache
def _raw() -> dict[tuple[int, ...], np.ndarray]:
    """float64[V], the logits after every text of one to three tokens."""
    ends = list(product(range(V), repeat=WINDOW))
    dims, attn = StepDims(C=len(ends), M=1, Z=Z, V=V), backend("ref")
    bucket = Bucket(D=0, P=WINDOW * len(ends), F=len(ends))
    model = StepModel(
        family=LLAMA, arch=ARCH7, backend=attn, dims=dims, mesh=make_mesh(1), rules=RULES,
        n_pages=len(ends) + 1, kv_dtype=jnp.dtype("float32"), dtype=jnp.dtype("float32"),
    )  # fmt: skip
    rows = [Row([1 + i], 0, end, slot=i) for i, end in enumerate(ends)]
    state, buf = new_state(model), jnp.asarray(pack(bucket, dims, attn, [], rows))
    view = unpack(buf, model.fields(bucket), bucket, dims, state.slots)
    x_TD, _ = LLAMA.forward(Ctx.of(ARCH7, view, attn, Axes()), target_params(), state.kv)
    logits = np.asarray(LLAMA.logits(ARCH7, target_params(), x_TD, Axes()), np.float64)
    by_row = logits.reshape(len(ends), WINDOW, V)
    return {
        end[: i + 1]: row[i] for end, row in zip(ends, by_row, strict=True) for i in range(WINDOW)
    }


After = Callable[[list[int], int], np.ndarray]
"""(START and output so far, the host's draft or -1) -> float64[V], the chances of the next token."""


def chances(setting: Setting) -> After:
    """What the target says under ``setting``."""
    params, allowed = setting.params, setting.allowed

    def counted(text: list[int], draft: int) -> np.ndarray:
        mask = None if allowed is None else allowed(text[1:])
        context = Context(prompt=[START], output=text[1:], mask=mask)
        return distribution(adjusted(_raw()[tuple(text[-WINDOW:])], params, context), params)

    @cache
    def known(last: tuple[int, ...], masked: tuple[bool, ...] | None) -> np.ndarray:
        mask = None if masked is None else np.array(masked)
        context = Context(prompt=[START], output=[], mask=mask)
        return distribution(adjusted(_raw()[last], params, context), params)

    def after(text: list[int], draft: int) -> np.ndarray:
        masked = None if allowed is None else tuple(allowed(text[1:]).tolist())
        return known(tuple(text[-WINDOW:]), masked)

    return counted if params.penalised else after


def p_value(drawn: Drawn, after: After) -> float:
    """Of chi-square tests over all outcomes (token, given the two before it), one for each place in a step,
    rare outcomes taken together: the smallest, times their number. 0 where a token came that cannot."""
    J = 1 + max(map(max, drawn.places))
    shape = (J, V * V, V)
    seen, hoped, spread = np.zeros(shape), np.zeros(shape), np.zeros((*shape, V))
    rows = zip(drawn.texts, drawn.drafts, drawn.places, strict=True)
    for text, drafts, places in rows:
        for i, (draft, place) in enumerate(zip(drafts, places, strict=True), 1):
            p_V = after(text[:i], draft)
            if p_V[text[i]] == 0:
                return 0.0
            group = text[i - 1] + V * (text[i - 2] if i > 1 else 0)
            seen[place, group, text[i]] += 1
            hoped[place, group] += p_V
            spread[place, group] += np.diag(p_V) - np.outer(p_V, p_V)
    found = [_tail(*parts) for parts in zip(seen - hoped, hoped, spread, strict=True)]
    return min(1.0, J * min(found))


def _tail(off_GV: np.ndarray, hoped_GV: np.ndarray, spread_GVV: np.ndarray) -> float:
    """Chance of a larger chi-square over all groups."""
    parts = [_standardised(*of) for of in zip(off_GV, hoped_GV, spread_GVV, strict=True)]
    total, df = (sum(x) for x in zip(*parts, strict=True))
    return float(stats.chi2.sf(total, df)) if df else 1.0


def _standardised(
    off_V: np.ndarray, hoped_V: np.ndarray, spread_VV: np.ndarray
) -> tuple[float, int]:
    """(chi-square, degrees of freedom) of one group's differences, whose covariance is ``spread_VV``."""
    rare = hoped_V < 10
    merge = np.vstack([np.eye(V)[~rare], rare[None]]).astype(float)
    off, spread = merge @ off_V, merge @ spread_VV @ merge.T
    values, vectors = np.linalg.eigh(spread)
    # The differences of a group add up to nothing, so one direction has no spread.
    real = values > 5.0 * max(1.0, values.max() / 1e4)
    return float(((vectors[:, real].T @ off) ** 2 / values[real]).sum()), int(real.sum())
