"""A vocabulary that no number of devices divides: the rows that pad it are in no answer.

All logits of the model are negative, so a padded id with logit 0 would be the likeliest token, lead every
list of top log-probabilities and outrank every token that is scored.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jserve.config import EngineConfig
from jserve.model.arch import resized
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.features import MASK, SCORE
from jserve.model.mesh import make_mesh
from jserve.model.param_spec import is_spec
from jserve.model.shard import padded
from jserve.model.view import Bucket
from jserve.runner.buckets import Ladder
from jserve.runner.runner import ModelRunner
from jserve.sampling import SamplingParams
from jserve.sizing.models import device_bytes
from jserve.speculation.drafters.draft_model import draft_model
from jserve.speculation.drafters.drafter import Drafter, split_over
from jserve.speculation.drafters.eagle3 import eagle3
from jserve.speculation.drafters.load import LoadedDrafter
from jserve.speculation.drafters.medusa import medusa
from jserve.weights.adopt import adopt
from tests.runner.harness import CONFIG, OPTIONS, RULES, Job, Live, Rig, _draw
from tests.speculation.device.test_draft_loop import Watched

V = 101
ARCH = LLAMA.arch(
    CONFIG
    | {"vocab_size": V, "num_attention_heads": 12, "num_key_value_heads": 1}
    | {"intermediate_size": 48, "max_position_embeddings": 64}
)
HEAD = resized(ARCH, L=1, V=75)
STEP = Bucket(D=6, P=48, F=4, features=(MASK, SCORE))
SHARED = {"max_tokens": 64, "logprobs": 8, "prompt_logprobs": 4}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.5, "min_p": 0.01},
    {"temperature": 1.2, "top_k": 60, "repetition_penalty": 1.3},
    {"temperature": 1.2, "top_p": 0.999, "frequency_penalty": 1.5, "presence_penalty": -1.0},
    {"temperature": 0.9, "logit_bias": {3: 5.0, 100: 4.0}, "bad_token_ids": ((3, 3), (5,))},
]


def jobs() -> list[Job]:
    rng = np.random.default_rng(1)
    return [
        Job(
            prompt=[100, *rng.integers(0, V, 7).tolist()],
            n=8,
            params=SamplingParams(**SHARED, **kind),
            seed=i,
        )
        for i, kind in enumerate(KINDS)
    ]


@lru_cache(maxsize=1)
def weights() -> Any:
    rng = np.random.default_rng(4)
    tree = jax.tree.map(lambda s: _draw(rng, s), LLAMA.specs(ARCH, 1), is_leaf=is_spec)
    tree["embed"] *= 16
    tree["embed"][:, 0], tree["unembed"][:, 0] = 16.0, -8.0
    return tree


def adopted(tree: Any, specs_at: Any, tp: int) -> Any:
    mesh = make_mesh(tp)
    specs = padded(specs_at(tp), RULES, mesh.shape)
    return adopt(tree, specs, mesh, RULES, jnp.float32, canonical=specs_at(1))


def make(tp: int, bucket: Bucket, speculation: LoadedDrafter | None = None) -> ModelRunner:
    return ModelRunner(
        LLAMA,
        ARCH,
        adopted(weights(), lambda n: LLAMA.specs(ARCH, n), tp),
        make_mesh(tp),
        EngineConfig.of(**OPTIONS),
        rules=RULES,
        ladder=Ladder(buckets=(bucket,)),
        speculation=speculation,
    )


class Masked(Rig):
    """Every decode row has a grammar mask that allows all tokens but three, and the bits past the
    vocabulary."""

    def _decode_row(self, live: Live) -> Any:
        row = super()._decode_row(live)
        mask_JW = np.full((row.count, -(-V // 32)), -1, np.int32)
        mask_JW[:, 0] = ~(1 << 7 | 1 << 20 | 1 << 21)
        return msgspec.structs.replace(row, mask=mask_JW)


def answers(runner: ModelRunner) -> list[dict[str, np.ndarray]]:
    """Everything that each job is told."""
    rig = Masked(runner, chunk=6, seed=2)
    outcome = []
    for tokens, live in zip(rig.run(jobs()), rig.lives, strict=True):
        found: dict[str, Any] = {"tokens": tokens}
        for name in ("logprob_RJ", "top_ids_RJL", "top_logprobs_RJL"):
            rows = [getattr(result, name)[r, 0] for result, r in live.rows if result.n_ok_R[r]]
            found[name] = np.stack(rows)
        for name in ("logprob_n", "rank_n", "top_ids_nL", "top_logprobs_nL"):
            found[name] = np.concatenate([getattr(s, name) for s in live.prompt_scores])
        outcome.append(found)
    return outcome


@lru_cache(maxsize=1)
def one_device() -> ModelRunner:
    return make(1, STEP)


@lru_cache(maxsize=1)
def alone() -> list[dict[str, np.ndarray]]:
    return answers(one_device())


@pytest.mark.slow
@pytest.mark.parametrize(
    "tp", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_answers_are_those_of_one_device(tp: int) -> None:
    runner = make(tp, STEP)
    assert runner.params["embed"].shape[0] > V
    for got, want in zip(answers(runner), alone(), strict=True):
        for name, value in want.items():
            if "logprob" in name:
                np.testing.assert_allclose(got[name], value, atol=2e-4, err_msg=name)
            elif "ids" in name:
                # Below the first, tokens that are nearly as likely may change places.
                np.testing.assert_array_equal(got[name][..., 0], value[..., 0], err_msg=name)
            else:
                np.testing.assert_array_equal(got[name], value, err_msg=name)
            if "ids" in name or name == "tokens":
                assert np.max(got[name]) < V
    tree = LLAMA.specs(ARCH, tp)
    assert runner.memory.weight_bytes == device_bytes(tree, jnp.float32, tp)


@pytest.mark.slow
def test_the_model_would_draw_a_padded_id() -> None:
    """What the other tests rest on: a logit of 0 beats every token of this model."""
    raised = dict(weights()) | {"unembed": weights()["unembed"].copy()}
    raised["unembed"][50] = 0
    one_device().update_weights(raised)
    tokens = Rig(one_device()).run([replace(jobs()[0], n=3)])[0]
    one_device().update_weights(weights())
    assert tokens == [50, 50, 50]


def drafter_of(kind: str) -> tuple[Drafter, Any]:
    """(drafter, its weights on one device)."""
    if kind == "same":
        return draft_model(LLAMA, ARCH, ARCH), weights()
    made = medusa(ARCH, n_heads=3)
    if kind == "eagle3":
        made = eagle3(HEAD, ARCH, taps=(0, 1, 2), own_embed=True)
    rng = np.random.default_rng(6)
    tree = jax.tree.map(lambda s: _draw(rng, s), made.specs(1), is_leaf=is_spec)
    if kind == "eagle3":
        tree["d2t"] = (np.arange(HEAD.V) // 4).astype(np.int32)
        tree["norm"][0], tree["unembed"][:, 0] = 8.0, -8.0
    return made, tree


def placed(drafter: Drafter, tree: Any, tp: int) -> Any:
    """As ``adopted``; a table of ids goes along as it is."""
    table = tree.pop("d2t", None)
    if table is None:
        return adopted(tree, drafter.specs, tp)

    def others(n: int) -> Any:
        return {name: spec for name, spec in drafter.specs(n).items() if name != "d2t"}

    return {**adopted(tree, others, tp), "d2t": whole_on(make_mesh(tp), table)}


def whole_on(mesh: Any, x: np.ndarray) -> jax.Array:
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def drafts_of(kind: str, tp: int) -> tuple[list[Any], list[int], list[int]]:
    drafter, tree = drafter_of(kind)
    drafter = split_over(drafter, tp, tp)
    assert not drafter.replicated
    made = LoadedDrafter(drafter=drafter, params=placed(drafter, dict(tree), tp), n_draft=3)
    runner = make(tp, Bucket(D=6, P=48, F=4, J=4, n_draft=3), made)
    rig = Watched(runner, device="all", seed=2)
    plain = SamplingParams(max_tokens=64, temperature=0.0)
    rig.run([replace(job, params=plain) for job in jobs()[:3]])
    return rig.left, rig.accepted, rig.tried


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("eagle3", marks=pytest.mark.slow),
        "same",
        pytest.param("medusa", marks=pytest.mark.slow),
    ],
)
def test_drafts_are_those_of_one_device(kind: str) -> None:
    left, accepted, tried = drafts_of(kind, 2)
    assert (left, accepted, tried) == drafts_of(kind, 1)
    assert len(left) > 4
    assert all(0 <= draft < V for _, drafts in left for draft in drafts)
    assert kind != "same" or accepted == tried
