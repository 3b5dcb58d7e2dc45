"""Processors and samplers on the real runner: rows beside others, drafts, states, layouts, and what ends a request."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.model import feature_states, features
from jserve.model.feature import StepFeature
from jserve.model.features.processor import logits_processor, sampler
from jserve.model.features.row import RowView, row_state
from jserve.model.noise import keys
from jserve.model.sample import PURPOSE_OWN
from jserve.model.view import Bucket
from jserve.runner.runner import ModelRunner
from jserve.sampling import SamplingParams
from jserve.types import NOTHING_LEFT, Sequence, SlotLoad, StepResult
from tests.runner import test_layouts
from tests.runner.harness import ARCH, Job, Rig, make_runner, prompts, tiny_params

V, N = ARCH.V, 24
RNG = np.random.default_rng(0)
TABLE = jnp.asarray(np.concatenate([np.tile([5, 6, 7, 8], 3), RNG.integers(0, V, 60)]), jnp.int32)


def tabled(logits_V: jax.Array, row: RowView) -> jax.Array:
    """The n-th output token is the n-th of the table."""
    assert row.state is not None
    wanted = TABLE[row.state]
    return jnp.where(jnp.arange(logits_V.shape[0]) == wanted, logits_V, -jnp.inf)


def once(logits_V: jax.Array, row: RowView) -> jax.Array:
    """No token twice."""
    assert row.state is not None
    return jnp.where(row.state, -jnp.inf, logits_V)


def other(logits_V: jax.Array, row: RowView) -> jax.Array:
    """Sharper, and nothing of the token before."""
    same_V = jnp.arange(logits_V.shape[0]) == row.token
    return jnp.where(same_V, -jnp.inf, logits_V * row.numbers["by"])


def broken(logits_V: jax.Array, row: RowView) -> jax.Array:
    """What the number says: NaN, infinity, nothing left."""
    bad = jnp.array([jnp.nan, jnp.inf, -jnp.inf])[row.numbers["kind"].astype(jnp.int32)]
    return jnp.full_like(logits_V, bad).at[1].set(jnp.where(bad < 0, bad, 0.0))


def categorical(logits_V: jax.Array, key: jax.Array, row: RowView) -> jax.Array:
    return jax.random.categorical(key, logits_V / row.numbers["t"])


FEATURES: dict[str, Callable[[], StepFeature]] = {
    "broken": lambda: logits_processor("broken", broken, kind=0.0),
    "categorical": lambda: sampler("categorical", categorical, t=1.0),
    "last": lambda: sampler("last", lambda x_V, key, row: jnp.int32(V - 1)),
    "once": lambda: logits_processor(
        "once", once, state=row_state(np.zeros(V, bool), lambda x_V, t: x_V.at[t].set(True))
    ),
    "other": lambda: logits_processor("other", other, by=1.0),
    "tabled": lambda: logits_processor(
        "tabled", tabled, state=row_state(0, lambda n, token: n + 1)
    ),
    "uniform": lambda: sampler("uniform", lambda x_V, key, row: jax.random.randint(key, (), 0, V)),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_REGISTERED", made())


@lru_cache
def made() -> dict[str, StepFeature]:
    return {name: feature() for name, feature in FEATURES.items()}


def bucket(J: int = 4) -> Bucket:
    return Bucket(D=6, P=48, F=4, J=J).with_also(*made().values())


@lru_cache
def runner() -> ModelRunner:
    return make_runner((bucket(),), max_drafts=3)


def job(prompt: list[int], seed: int = 0, temperature: float = 1.0, **asked: Any) -> Job:
    params = SamplingParams(max_tokens=64, temperature=temperature, extra_args=asked)
    return Job(prompt=prompt, n=N, params=params, seed=seed)


def mixed() -> list[Job]:
    asked: list[dict[str, Any]] = [
        {"tabled": True},
        {"once": True, "other": 1.5},
        {},
        {"categorical": {"t": 0.7}},
        {"uniform": True},
        {"once": True, "categorical": 2.0},
    ]
    return [job(p, seed=i, **asked[i]) for i, p in enumerate(prompts(6, seed=7, low=2, high=20))]


@lru_cache
def alone() -> list[list[int]]:
    return [Rig(runner()).run([one])[0] for one in mixed()]


@pytest.mark.slow
def test_rows_draw_beside_others_what_they_draw_alone() -> None:
    drawn = alone()
    assert drawn[0] == TABLE[:N].tolist()
    assert len(set(drawn[1])) == len(set(drawn[5])) == N, "no token twice"
    assert Rig(runner()).run([job(list(mixed()[2].prompt), seed=2)])[0] == drawn[2]
    for depth, chunk in ((0, 0), (2, -1)):
        rig = Rig(runner(), seed=depth, depth=depth, chunk=chunk, pick=0.7)
        assert rig.run(mixed()) == drawn


def guesses(truth: list[list[int]], rng: np.random.Generator) -> Callable[[Sequence, int], Any]:
    """Drafts that are mostly right."""

    def drafts(seq: Sequence, most: int) -> list[int]:
        ahead = truth[int(seq.request.id)][seq.n_output :][:most]
        return [t if rng.random() < 0.8 else int(rng.integers(0, V)) for t in ahead]

    return drafts


@pytest.mark.parametrize("seed", [0, 1])
def test_drafts_change_nothing(seed: int) -> None:
    """A state has the tokens that were accepted, and behind a draft that draft."""
    rig = Rig(runner(), drafter=guesses(alone(), np.random.default_rng(seed)), seed=seed)
    assert rig.run(mixed()) == alone()
    assert max(rig.accepted) == 4
    assert any(1 < n < 4 for n in rig.accepted)


def test_a_key_is_of_the_seed_and_the_position() -> None:
    [drawn] = Rig(runner()).run([job([3, 4, 5], seed=9, uniform=True)])
    pos_E = jnp.arange(3, 3 + N, dtype=jnp.int32)
    seed_E2 = jnp.tile(jnp.array([[9, 0]], jnp.uint32), (N, 1))
    for key, token in zip(keys(seed_E2, pos_E, PURPOSE_OWN), drawn, strict=True):
        assert token == int(jax.random.randint(key, (), 0, V))


def test_a_sampler_draws_as_often_as_it_should() -> None:
    """First tokens of one prompt and 600 seeds, against its softmax: chi-square over the likeliest."""
    draws = [first([job([1, 2], seed=s, categorical=1.0) for s in range(i, i + 4)]) for i in STARTS]
    counts_V = np.bincount(np.concatenate([d.tokens_RJ[:, 0] for d in draws]), minlength=V)
    logp = first([job([1, 2], temperature=0.0)], logprobs=20)
    assert logp.top_ids_RJL is not None
    assert logp.top_logprobs_RJL is not None
    ids, p = logp.top_ids_RJL[0, 0, :6], np.exp(logp.top_logprobs_RJL[0, 0, :6])
    n = counts_V.sum()
    seen, want = np.append(counts_V[ids], 0), np.append(p, 1 - p.sum()) * n
    seen[-1] = n - seen.sum()
    keep = want > 5
    assert np.sum((seen - want)[keep] ** 2 / want[keep]) < 25


STARTS = range(0, 600, 4)


def first(
    jobs: list[Job], logprobs: int | None = None, on: ModelRunner | None = None
) -> StepResult:
    """The results of the step that computes the prompts."""
    rig = Rig(on or runner())
    if logprobs is not None:
        jobs = [
            Job(prompt=j.prompt, params=SamplingParams(temperature=0.0, logprobs=logprobs))
            for j in jobs
        ]
    plan, _ = rig._plan(rig._admit(jobs))
    return rig.runner.collect(rig.runner.launch(plan))


def test_what_cannot_be_drawn_ends_the_request_and_names_the_feature() -> None:
    for kind, said in enumerate(["NaN or infinite", "NaN or infinite", "no token that may"]):
        result = first([job([1, 2]), job([1, 2], broken=kind), job([1, 2], other=1.0)])
        assert result.finite_R.tolist() == [True, False, True]
        assert list(result.faults) == [1]
        assert result.faults[1][0] == "broken"
        assert said in result.faults[1][1]
    masked = SamplingParams(allowed_token_ids=(1, 2), extra_args={"last": True})
    result = first([Job(prompt=[1, 2], params=masked), job([1, 2], last=True)])
    assert result.finite_R.tolist() == [False, True]
    assert result.faults == {0: ("last", "draws a token that may not be drawn")}
    assert int(result.tokens_RJ[1, 0]) == V - 1


def test_what_a_processor_and_other_constraints_leave_nothing_of_names_it() -> None:
    """Neither of them alone does."""
    params = SamplingParams(allowed_token_ids=(2,), extra_args={"other": 1.0})
    result = first([Job(prompt=[1, 2], params=params), Job(prompt=[1, 3], params=params)])
    assert result.finite_R.tolist() == [False, True]
    assert result.faults == {0: ("other", NOTHING_LEFT)}
    assert int(result.tokens_RJ[1, 0]) == 2


def test_a_chunk_in_mid_prompt_draws_nothing_and_cannot_fail() -> None:
    rig = Rig(runner(), chunk=4)
    plan, _ = rig._plan(rig._admit([job(list(range(9)), broken=2.0)]))
    result = rig.runner.collect(rig.runner.launch(plan))
    assert result.finite_R.tolist() == [True]
    assert result.faults == {}


@pytest.mark.slow
def test_no_feature_hides_logits_of_the_model_that_are_not_finite() -> None:
    params = tiny_params(runner().model.mesh)
    bad = jax.tree.map(lambda x: x * jnp.nan, params)
    result = first(
        [job([1, 2], tabled=True), job([1, 2])], on=make_runner((bucket(1),), params=bad)
    )
    assert result.finite_R.tolist() == [False, False]
    assert result.faults == {}


@pytest.mark.parametrize("n", [0, 1, 5000])
def test_a_slot_is_filled_with_what_the_output_makes(n: int) -> None:
    """Of a sequence that goes on: in several runs where it has many tokens."""
    feature = StepFeature(name="sum", state=row_state(jnp.int32(3), lambda x, token: x * 5 + token))
    output = RNG.integers(0, V, n).tolist()
    item = SlotLoad(slot=2, tokens=[9, 9, *output], n_prompt=2, params=SamplingParams())
    load, array = jax.jit(feature_states.loader(feature)), jnp.arange(4, dtype=jnp.int32)
    for buf in feature_states.load_buffers(item):
        array = load(array, buf)
    want = 3
    for token in output:
        want = (want * 5 + token) % 2**32
    assert array.tolist() == [0, 1, int(np.uint32(want).astype(np.int32)), 3]


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["split logits", "2D, split logits", "auto, heads"])
def test_layouts_draw_what_one_device_draws(spec: str) -> None:
    one = test_layouts.runner(test_layouts.SPECS[spec], (bucket(1),))
    assert Rig(one).run(mixed()) == alone()
    result = first([job([1, 2], broken=2.0), job([1, 2])], on=one)
    assert result.faults == {0: ("broken", NOTHING_LEFT)}


def test_a_state_of_another_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="start is int32") as caught:
        row_state(0, lambda n, token: n + 0.5)
    assert caught.value.field == "state"
