"""Layouts of one model on eight forced devices against one device, in float32: tokens greedy and seeded, logits, and
the collectives of steps."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
import pytest

from jserve import explain_sharding
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.model import collectives, ctx, layers
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.features import MASK, SCORE
from jserve.model.mesh import mesh_of
from jserve.model.shard import ShardRules, padded, shardings
from jserve.model.view import Bucket
from jserve.runner.buckets import Ladder
from jserve.runner.runner import ModelRunner
from jserve.sampling import SamplingParams
from jserve.sharding import Sharding
from jserve.weights.place import tp_size
from tests.runner.harness import ARCH, OPTIONS, SMALL, Job, Rig, prompts, tiny_params
from tests.runner.test_equalities import alone, as_tuples, mixed_jobs

MINI = "checkpoints/jserve-mini"
XY = {"x": 2, "y": 4}
ALL = {"kv_heads": ["x", "y"], "ffn": ["x", "y"], "vocab": ["x", "y"]}
WIDTH = {"embed": "x", "kv_heads": "y", "ffn": "y"}
SPECS: dict[str, dict[str, Any]] = {
    "tp 4": {"mesh": {"tp": 4}},
    "kv repeated": {"mesh": {"tp": 8}},
    "split logits": {"mesh": {"tp": 4}, "logits": "split"},
    "split logits, kv repeated": {"mesh": {"tp": 8}, "logits": "split"},
    "sums of weights": {"mesh": {"tp": 4}, "sums": "weights"},
    "2D": {"mesh": XY, "rules": {**ALL, "kv_heads": "y", "vocab": "x"}},
    "2D, split logits": {"mesh": XY, "rules": {**ALL, "vocab": ["y", "x"]}, "logits": "split"},
    "vocabulary alone": {"mesh": {"x": 8}, "rules": {"vocab": "x"}, "logits": "split"},
    "split residual": {"mesh": {"tp": 4}, "residual": "split"},
    "split residual, heads on one axis": {
        "mesh": XY,
        "rules": {**ALL, "kv_heads": "y", "vocab": None},
        "residual": "split",
    },
    "2D, width": {"mesh": XY, "rules": {**WIDTH, "vocab": "y"}},
    "2D, width, split residual": {
        "mesh": XY,
        "rules": {**WIDTH, "vocab": None},
        "residual": "split",
    },
    "all that is split": {"mesh": XY, "rules": ALL, "logits": "split", "residual": "split"},
    "auto, heads": {"mesh": XY, "mode": "auto", "rules": ALL},
    "auto, 2D": {"mesh": XY, "mode": "auto", "rules": {"kv_heads": "y", "ffn": "y", "embed": "x"}},
    "auto, by path": {
        "mesh": XY,
        "mode": "auto",
        "rules": {"kv_heads": "y", "vocab": "x"},
        "params": {"layers/.*/down": [None, ["x", "y"]]},
    },
}
QUICK = ("2D, split logits", "2D, width, split residual", "auto, by path")


def runner(
    spec: dict[str, Any] | str, buckets: tuple[Bucket, ...] = SMALL[1:], **options: Any
) -> Any:
    """A runner of the tiny model, whose weights lie as ``spec`` says."""
    sharding = Sharding.of(spec)
    mesh = mesh_of(sharding)
    rules = ShardRules.of_sharding(sharding, mesh.shape)
    specs = padded(LLAMA.specs(ARCH, tp_size(mesh, rules)), rules, mesh.shape)
    params = jax.device_put(host_params(tp_size(mesh, rules)), shardings(specs, mesh, rules))
    return ModelRunner(
        LLAMA,
        ARCH,
        params,
        mesh,
        EngineConfig.of(**{**OPTIONS, **options}),
        rules=rules,
        ladder=Ladder(buckets=buckets),
    )


@lru_cache
def host_params(tp: int) -> Any:
    """The weights of ``tiny_params``, heads repeated for ``tp`` devices."""
    return jax.tree.map(np.asarray, tiny_params(mesh_of(Sharding.of(f"tp={tp}"))))


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SPECS]
)
def test_layouts_draw_what_one_device_draws(name: str) -> None:
    """Greedy, seeded, cut, penalised and biased rows in one batch."""
    assert as_tuples(Rig(runner(SPECS[name]), seed=3).run(mixed_jobs(1))) == alone(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_scores_of_prompts_are_those_of_one_device(name: str) -> None:
    buckets = (Bucket(D=3, P=50, F=3, features=(MASK, SCORE)),)
    got, want = (scores(runner(spec, buckets)) for spec in (SPECS[name], {"mesh": {"tp": 1}}))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def scores(one: ModelRunner) -> list[np.ndarray]:
    params = SamplingParams(temperature=0.0, prompt_logprobs=3)
    rig = Rig(one)
    rig.run([Job(prompt=p, n=2, params=params) for p in prompts(2, seed=4, low=2)])
    return [
        np.asarray(value)
        for live in rig.lives
        for s in live.prompt_scores
        for value in (s.logprob_n, s.rank_n, s.top_ids_nL, s.top_logprobs_nL)
    ]


TWO, SPLIT = "2D, split logits", "split residual"
BUGS: dict[str, tuple[str, Any, str, Any]] = {
    "partial sum added twice": (
        TWO,
        ctx,
        "reduce",
        lambda y, a, d: y if a is None else 2 * jax.lax.psum(y, a),
    ),
    "sum over one axis of two": (
        TWO,
        ctx,
        "reduce",
        lambda y, a, d: y if a is None else jax.lax.psum(y, a[0]),
    ),
    "no sum": (TWO, ctx, "reduce", lambda y, a, d: y),
    "shards of the vocabulary in another order": (
        TWO,
        layers,
        "shard_index",
        lambda a: jax.lax.axis_index(tuple(reversed(a))),
    ),
    "tokens of another device": (
        SPLIT,
        ctx,
        "own_rows",
        lambda x, a: jax.numpy.roll(collectives.own_rows(x, a), 1, axis=0),
    ),
    "partial results of one device": (
        SPLIT,
        ctx,
        "reduce_scatter",
        lambda y, a, d: collectives.own_rows(y, a),
    ),
    "tokens in another order": (
        SPLIT,
        ctx,
        "gather",
        lambda x, a, d: jax.numpy.flip(collectives.gather(x, a, d), 0),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n == "no sum" else pytest.param(n, marks=pytest.mark.slow) for n in BUGS]
)
def test_a_planted_bug_is_seen(name: str, monkeypatch: Any) -> None:
    spec, module, what, broken = BUGS[name]
    want = alone(1)
    monkeypatch.setattr(module, what, broken)
    jax.clear_caches()  # layers that were traced without the bug
    assert as_tuples(Rig(runner(SPECS[spec]), seed=3).run(mixed_jobs(1))) != want
    jax.clear_caches()


@pytest.mark.slow
def test_kv_heads_repeated_wrongly_are_seen() -> None:
    one = runner(SPECS["kv repeated"])
    for layer in one.params["layers"]:
        qkv = np.array(layer["qkv"])
        qkv[1::2, -2:] = np.roll(qkv[1::2, -2:], 1, axis=0)
        layer["qkv"] = jax.device_put(qkv, layer["qkv"].sharding)
    assert as_tuples(Rig(one, seed=3).run(mixed_jobs(1))) != alone(1)


def test_split_logits_are_gathered_nowhere() -> None:
    for program in explain_sharding(
        "llama-3.1-8b", {"mesh": {"tp": 8}, "logits": "split"}
    ).programs:
        for c in program.collectives or ():
            assert c.shape[-1] <= 4096, "neither a row of 128256 logits nor a part of one"


def test_a_split_residual_stream_is_summed_in_parts_where_prompts_are_computed() -> None:
    """Norms and additions see a part of the tokens; what a product reads goes out in the type of its weights."""
    spec = {"mesh": {"tp": 8}, "residual": "split"}
    decode, prefill = explain_sharding("llama-3.1-8b", spec, dtype="bfloat16").programs
    assert {c.op for c in decode.usual} == {"all-reduce", "all-gather"}
    T, L = prefill.prefill_tokens + 2, 32  # beside two decode rows
    found = [(c.op, c.dtype, c.shape, c.count) for c in prefill.usual if c.shape[-1] == 4096]
    want = [
        ("reduce-scatter", "float32", (-(-T // 8), 4096), 2 * L),
        ("all-gather", "bfloat16", (-(-T // 8) * 8, 4096), 2 * L),
        ("all-reduce", "float32", (T, 4096), 1),
        ("all-gather", "float32", (-(-T // 8) * 8, 4096), 1),
    ]
    assert sorted(found) == sorted(want)


def test_layouts_whose_sums_differ_have_other_names() -> None:
    """Pages on disk, step times and compiled programs are kept under these."""
    names = []
    for more in ({}, {"sums": "weights"}, {"logits": "split"}, {"residual": "split"}):
        rules = ShardRules.of_sharding(Sharding.of({"mesh": {"tp": 4}, **more}), {"tp": 4})
        names.append(rules.described({"tp": 4}))
    assert len(set(names)) == 4


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"mesh": {"tp": 2}, "logits": "sharded"}, "sharding.logits"),
        ({"mesh": {"tp": 2}, "sums": "int8"}, "sharding.sums"),
        ({**SPECS["auto, heads"], "logits": "split"}, "sharding.logits"),
        ({**SPECS["auto, heads"], "sums": "weights"}, "sharding.sums"),
        ({**SPECS["auto, heads"], "residual": "split"}, "sharding.residual"),
        ({"mesh": {"tp": 2}, "residual": "tokens"}, "sharding.residual"),
        ({"mesh": {"x": 2}, "rules": {"vocab": "x"}, "residual": "split"}, "sharding.residual"),
        ({"mesh": {"x": 2}, "rules": {"ffn": "x"}, "logits": "split"}, "sharding.logits"),
        ({"mesh": {"x": 2}, "rules": {"tokens": "x"}}, "sharding.rules.tokens"),
        ({"mesh": {"x": 2}, "rules": {"embed": "x", "ffn": "x"}}, "sharding.rules.embed"),
    ],
)
def test_what_cannot_work_is_refused_by_its_key(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explain_sharding(MINI, spec)
    assert caught.value.field == field
