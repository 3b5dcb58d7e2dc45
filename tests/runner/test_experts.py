"""Experts that move between devices while requests run: tokens stay, and loads become even."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from itertools import combinations, combinations_with_replacement
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jserve.config import EngineConfig
from jserve.engine.engine import Engine
from jserve.errors import ConfigError
from jserve.model import moe_places
from jserve.model.families import family_for
from jserve.model.family import Family
from jserve.model.mesh import make_mesh
from jserve.model.quant import Form, QTensor
from jserve.model.quant_specs import quantised_specs
from jserve.model.shard import ShardRules
from jserve.model.view import Bucket
from jserve.runner import eplb, experts
from jserve.runner.buckets import Ladder
from jserve.runner.runner import ModelRunner
from jserve.sampling import SamplingParams
from jserve.sched.scheduler import Scheduler
from jserve.types import Request
from jserve.weights.loader import load
from jserve.weights.source import Source
from tests import programs

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "page_size": 8,
    "n_pages": 40,
    "max_model_len": 64,
    "prompt_logprobs": False,
    "structured_outputs": False,
    "max_logprob_token_ids": 0,
    "compile_cache": "",
}
BUCKETS = (Bucket(D=4, P=32, F=4),)
MOVING = {"enable_eplb": True, "num_redundant_experts": 4}


def weights(mesh: Any, rules: ShardRules, family: Family | None = None) -> Any:
    """Drawn, with choices that vary."""
    family = family or family_for(CONFIG)
    params = load(family, family.arch(CONFIG), _source(), mesh, rules, jnp.dtype("float32"), seed=3)
    scales = {"qkv": 12, "o": 12, "router": 40, "expert_gate_up": 12, "expert_down": 12}
    layers = [{k: times(x, scales.get(k, 1)) for k, x in p.items()} for p in params["layers"]]
    return params | {"layers": layers, "unembed": times(params["unembed"], 30)}


def times(x: Any, factor: int) -> Any:
    return replace(x, scale=x.scale * factor) if isinstance(x, QTensor) else x * factor


def runner(ep: int = 1, tp: int = 1, family: Family | None = None, **options: Any) -> ModelRunner:
    family, mesh = family or family_for(CONFIG), make_mesh(tp, ep=ep)
    arch, config = family.arch(CONFIG), EngineConfig.of(**OPTIONS | options)
    rules = ShardRules.of_mesh(mesh.shape, config.device.num_redundant_experts)
    given = family, arch, weights(mesh, rules, family), mesh, config
    made: dict[str, Any] = {"rules": rules, "ladder": Ladder(buckets=BUCKETS), "strict": True}
    return ModelRunner(*given, **made, files=programs.kept())


def _source() -> Source:
    about: Any = {"directory": None, "weights": None, "config": CONFIG, "generation": {}}
    return Source(name="tiny", format="dummy", **about)


@lru_cache(maxsize=1)
def moving() -> ModelRunner:
    return runner(ep=4, **MOVING)


REQUESTS = [
    Request(
        id=f"r{i}",
        prompt_ids=tuple(np.random.default_rng(i).integers(0, 96, 5 + 3 * i).tolist()),
        params=SamplingParams(
            max_tokens=16, temperature=0.0 if i % 2 else 0.8, seed=i, ignore_eos=True
        ),
    )
    for i in range(4)
]


def tokens(of: ModelRunner, between: Any = lambda step: None) -> dict[str, list[int]]:
    """Of each request; ``between`` is called before every step."""
    engine = Engine(Scheduler(of.limits, EngineConfig.of(**OPTIONS, prefix_caching=False)), of)
    for request in REQUESTS:
        engine.submit(request)
    found: dict[str, list[int]] = {request.id: [] for request in REQUESTS}
    for step in range(200):
        between(step)
        for out in engine.step():
            assert out.error is None
            found[out.request_id] += out.token_ids
        if not engine.busy:
            return found
    raise AssertionError("the requests did not end")


@lru_cache(maxsize=1)
def alone() -> dict[str, list[int]]:
    found = tokens(runner())
    assert all(len(set(own)) > 5 for own in found.values()), "tokens that experts decide"
    return found


def state_of(of: ModelRunner) -> Any:
    assert of.state.experts is not None
    return of.state.experts


@pytest.mark.slow
def test_moves_while_requests_run_change_no_token() -> None:
    """A random load for each layer every few steps; nothing compiles (``strict``)."""
    of, rng = moving(), np.random.default_rng(5)
    balancer = of._experts
    assert balancer is not None

    def between(step: int) -> None:
        if step % 4 == 1:
            of.rebalance_experts(rng.integers(1, 1000, (2, 8)))

    before = of.counters()["expert_moves_total"]
    assert tokens(of, between) == alone()
    assert of.counters()["expert_moves_total"] - before > 20
    assert balancer.slot_LS.tolist() != balancer._initial().tolist()
    n_LE = np.asarray(state_of(of).places.n_E)
    assert n_LE.sum() == 2 * balancer.n_slots
    assert n_LE.max() > 1
    assert tokens(of) == alone(), "and after them"


def quantised_family() -> Family:
    """In the form of a checkpoint in int8 with zeros."""
    form = Form(kind="int8", group=16, zeros=True, dtype="float32")
    return quantised_specs(family_for(CONFIG), lambda module, D: form if "proj" in module else None)


@pytest.mark.slow
def test_quantised_experts_move_whole() -> None:
    family = quantised_family()
    want, of = tokens(runner(family=family)), runner(ep=4, family=family, **MOVING)
    rng = np.random.default_rng(5)

    def between(step: int) -> None:
        if step % 4 == 1:
            of.rebalance_experts(rng.integers(1, 1000, (2, 8)))

    assert tokens(of, between) == want
    assert of.counters()["expert_moves_total"] > 10


@pytest.mark.slow
def test_every_slot_has_the_weights_of_its_expert() -> None:
    of, first = moving(), weights(make_mesh(1), ShardRules())
    balancer = of._experts
    assert balancer is not None
    of.rebalance_experts(np.arange(16).reshape(2, 8) ** 3)
    tokens(of)
    for layer in range(2):
        slot_S = balancer.slot_LS[layer]
        for name, rows in (("expert_gate_up", 2), ("expert_down", 1)):
            got = np.asarray(of.params["layers"][layer][name])
            want = np.asarray(first["layers"][layer][name])
            got, want = (x.reshape(-1, rows, *x.shape[1:]) for x in (got, want))
            np.testing.assert_array_equal(got, want[slot_S])


@pytest.mark.slow
def test_a_reset_keeps_the_places_and_new_weights_begin_anew() -> None:
    of = moving()
    balancer = of._experts
    assert balancer is not None
    of.rebalance_experts(np.arange(16).reshape(2, 8) ** 2)
    tokens(of)
    table = balancer.slot_LS.copy()
    assert table.tolist() != balancer._initial().tolist()
    of.reset()
    np.testing.assert_array_equal(balancer.slot_LS, table)
    assert tokens(of) == alone()
    of.update_weights(weights(make_mesh(1), ShardRules()))
    np.testing.assert_array_equal(balancer.slot_LS, balancer._initial())
    assert tokens(of) == alone()


def test_loads_are_those_of_real_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of a prompt or an answer chooses two experts in each layer; padding chooses none."""
    monkeypatch.setattr(experts, "LOAD_STEPS", 10**9)
    of = moving()
    of.state = of._fresh_state()
    tokens(of)
    load_LE = np.asarray(state_of(of).load_LE)
    # The last token of an answer is never computed. With one step in flight a row may run once more.
    n = sum(len(r.prompt_ids) + (r.params.max_tokens or 0) - 1 for r in REQUESTS)
    assert load_LE.sum(axis=1).min() >= 2 * n
    assert load_LE.sum(axis=1).max() <= 2 * (n + len(REQUESTS))
    assert (load_LE > 0).any(axis=1).all()


def test_loads_are_read_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "LOAD_STEPS", 4)
    of = moving()
    tokens(of)
    found = of.counters()
    assert found["expert_load_max_over_mean"] >= 1.0
    assert 0.125 <= found["expert_load_hottest_share"] <= 0.5
    by_device = [n for name, n in found.items() if name.startswith("expert_load_total{")]
    assert len(by_device) == 4
    assert sum(by_device) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ep", "tp", "spare"), [(2, 1, 0), (4, 1, 0), (2, 2, 2), (8, 1, 8), (1, 4, 0)]
)
def test_every_mesh_draws_what_one_device_draws(ep: int, tp: int, spare: int) -> None:
    options: dict[str, Any] = {"num_redundant_experts": spare} if spare else {}
    options |= {"enable_eplb": True} if ep > 1 else {}
    of = runner(ep, tp, **options)
    rng = np.random.default_rng(1)

    def between(step: int) -> None:
        if step % 5 == 1 and ep > 1:
            of.rebalance_experts(rng.integers(1, 1000, (2, 8)))

    assert tokens(of, between) == alone()
    assert tokens(of) == alone()


@pytest.mark.slow
def test_a_stale_table_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights move and the table does not: tokens change, so the tests above can fail."""
    of = moving()
    of.state = of._fresh_state()
    balancer = of._experts
    assert balancer is not None
    old = [balancer._table(layer) for layer in range(2)]
    monkeypatch.setattr(balancer, "_table", lambda layer: old[layer])
    of.rebalance_experts(np.random.default_rng(0).permutation(16).reshape(2, 8) ** 3)
    try:
        assert tokens(of) != alone()
    finally:
        moving.cache_clear()


def test_a_move_is_bit_for_bit() -> None:
    """Zeros with a sign, and what is not a number, among the weights."""
    mesh = make_mesh(1, ep=2)
    w = np.array([[-0.0, np.nan], [1.0, -np.inf], [-3.0, 0.0], [2.0, -0.0]], np.float32)
    spec = jax.sharding.PartitionSpec
    run = jax.jit(
        jax.shard_map(
            partial(moe_places.copied, slots=2, axis="ep"),
            mesh=mesh,
            in_specs=([spec("ep")], spec(), spec()),
            out_specs=[spec("ep")],
            check_vma=False,
        )
    )
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8):
        x = (
            jnp.nan_to_num(jnp.asarray(w)).astype(dtype)
            if dtype == jnp.int8
            else jnp.asarray(w, dtype)
        )
        [got] = run([x], np.array([0, 3], np.int32), np.array([3, 0], np.int32))
        assert np.asarray(got).tobytes() == np.asarray(x)[[3, 1, 2, 0]].tobytes()
        [same] = run([x], np.array([0, 0], np.int32), np.array([4, 4], np.int32))
        assert np.asarray(same).tobytes() == np.asarray(x).tobytes()


# ---- placement ---------------------------------------------------------------------------------


def optimum(load_E: np.ndarray, n: int, S: int) -> float:
    """Load of the fullest device under the best placement of all."""
    best, sets = np.inf, list(combinations(range(len(load_E)), S // n))
    for found in combinations_with_replacement(sets, n):
        copies = np.bincount(sum(found, ()), minlength=len(load_E))
        if copies.min() > 0:
            best = min(best, max((load_E / copies)[list(own)].sum() for own in found))
    return best


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_placement_is_within_a_tenth_of_the_best_one(data: st.DataObject) -> None:
    E, n = data.draw(st.integers(2, 6)), data.draw(st.integers(2, 3))
    room = data.draw(st.integers(-(-E // n), min(E, 9 // n)))
    load_E = np.array(data.draw(st.lists(st.integers(0, 60), min_size=E, max_size=E)), float)
    now_S = np.arange(n * room) % E
    slot_S = eplb.place(load_E, n, n * room, now_S)
    assert set(slot_S.tolist()) == set(range(E)), "every expert has a slot"
    assert all(len(set(own)) == room for own in slot_S.reshape(n, -1).tolist())
    fullest = eplb.device_loads(load_E, slot_S, n).max()
    assert fullest <= 1.1 * optimum(load_E, n, n * room) + 1e-3
    slots_of_moves(now_S, slot_S)


def slots_of_moves(now_S: np.ndarray, wanted_S: np.ndarray) -> None:
    """The moves lead there, and no expert is without a slot on the way."""
    at = now_S.copy()
    for move in eplb.moves(now_S, wanted_S):
        before = at.copy()
        for source, to in move:
            at[to] = before[source]
        assert set(at.tolist()) == set(now_S.tolist())
    np.testing.assert_array_equal(at, wanted_S)


@pytest.mark.parametrize(("E", "n"), [(64, 4), (128, 8), (256, 8)])
def test_a_zipf_load_is_even_with_an_eighth_of_spare_slots(E: int, n: int) -> None:
    S = E + E // 8
    load_E = np.random.default_rng(E).permutation(1e6 / np.arange(1, E + 1))
    now_S = np.arange(S) % E
    slot_S = eplb.place(load_E, n, S, now_S)
    assert eplb.imbalance(load_E, now_S, n) > 1.3
    assert eplb.imbalance(load_E, slot_S, n) <= 1.10
    slots_of_moves(now_S, slot_S)
    assert eplb.place(load_E, n, S, slot_S).tolist() == slot_S.tolist(), "what is even stays"


@pytest.mark.parametrize(
    ("ep", "options", "field"),
    [
        (1, {"enable_eplb": True}, "enable_eplb"),
        (1, {"num_redundant_experts": 2}, "num_redundant_experts"),
        (2, {"num_redundant_experts": 3}, "expert_parallel_size"),
        (4, {"num_redundant_experts": 12}, "num_redundant_experts"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_option(ep: int, options: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        runner(ep, **options)
    assert caught.value.field == field
