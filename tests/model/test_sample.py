"""Sampling against the sorted float64 reference: every field, in every pair, and the draws by
chi-square."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model import sample as sampling
from jserve.model.view import LOGPROBS, RANDOM, TRUNCATE
from jserve.sampling import MAX_LOGPROBS, SamplingParams
from tests.model.sample_reference import Context, adjusted, distribution
from tests.model.sample_rig import draws_of, jitted, slots_of

V = 300
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 1.8},
    "top_k": {"top_k": 7},
    "wide_top_k": {"top_k": 150},
    "top_p": {"top_p": 0.6},
    "wide_top_p": {"top_p": 0.97},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.7},
    "encourage": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.9},
    "bias": {"logit_bias": {3: 4.5, 17: -100.0, 40: -3.25}},
    "allowed": {"allowed_token_ids": tuple(range(0, V, 3))},
    "bad": {"bad_token_ids": ((5,), (9, 11), (7, 9, 12), (8, 9, 13))},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": (21, 24)},
}
OUTPUT = (30, 30, 7, 9)


def _context(rng: np.random.Generator) -> Context:
    prompt = rng.integers(0, V, 12).tolist()
    return Context(prompt=prompt, output=OUTPUT, eos_ids=(2,))


def _pairs() -> list[dict[str, Any]]:
    singles = list(FIELDS.values())
    return [{}, *singles, *({**a, **b} for a, b in itertools.combinations(singles, 2))]


@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_every_pair_of_fields_gives_the_reference_distribution(spread):
    rng = np.random.default_rng(int(spread * 10))
    rows = [(SamplingParams(**kw, max_tokens=99), _context(rng)) for kw in _pairs()]
    raw = (rng.standard_normal((len(rows), V)) * spread).astype(np.float32)
    raw[:, [2, 5, 11, 12, 13, 21]] += 3 * spread  # likely, so that a ban that fails is seen
    draws, flags = draws_of(rows)
    slots = slots_of(rows, V)
    fns = jitted()
    x = fns["adjust"](raw, draws, slots, flags)
    cut = fns["truncated"](fns["scaled"](x, draws)[0], draws, flags | RANDOM | TRUNCATE)
    w = np.exp(np.asarray(cut, np.float64))
    best = np.asarray(fns["argmax"](x))
    for i, (params, context) in enumerate(rows):
        want = adjusted(raw[i], params, context)
        np.testing.assert_allclose(np.asarray(x[i]), want, rtol=2e-5, atol=2e-5)
        if params.greedy:
            assert best[i] == int(np.argmax(want)), params
        else:
            p = distribution(want, params)
            np.testing.assert_array_equal(w[i] > 0, p > 0, err_msg=str(params))
            np.testing.assert_allclose(w[i] / w[i].sum(), p, rtol=3e-4, atol=1e-6)


def test_processed_logits_are_those_of_the_reference_distribution():
    """Also of greedy rows, which have no temperature and no truncation."""
    rng = np.random.default_rng(8)
    rows = [(SamplingParams(**kw, max_tokens=99), _context(rng)) for kw in _pairs()]
    raw = (rng.standard_normal((len(rows), V)) * 3).astype(np.float32)
    draws, flags = draws_of(rows)
    slots, flags = slots_of(rows, V), flags | RANDOM | TRUNCATE
    x = np.asarray(sampling.processed(raw, draws, slots, flags | LOGPROBS), np.float64)
    w = np.exp(x - x.max(1, keepdims=True))
    for i, (params, context) in enumerate(rows):
        want = adjusted(raw[i], params, context)
        p = np.exp(want - want.max())
        p = p / p.sum() if params.greedy else distribution(want, params)
        np.testing.assert_array_equal(w[i] > 0, p > 0, err_msg=str(params))
        np.testing.assert_allclose(w[i] / w[i].sum(), p, rtol=3e-4, atol=1e-6)
    np.testing.assert_array_equal(sampling.processed(raw, draws, slots, flags & ~LOGPROBS), raw)


def test_sample_of_a_mixed_batch_equals_each_row_alone():
    rng = np.random.default_rng(3)
    rows = [(SamplingParams(**kw, max_tokens=99), _context(rng)) for kw in _pairs()[1:14]]
    raw = (rng.standard_normal((len(rows), V)) * 3).astype(np.float32)
    draws, flags = draws_of(rows)
    slots = slots_of(rows, V)
    together, ok = jitted()["sample"](raw, draws, slots, flags)
    assert np.all(ok)
    for i, row in enumerate(rows):
        alone_draws, alone_flags = draws_of([row], seeds=[i])
        alone, _ = jitted()["sample"](raw[i : i + 1], alone_draws, slots_of([row], V), alone_flags)
        assert int(alone[0]) == int(together[i]), row[0]


def test_stop_ids_are_forbidden_until_min_tokens_are_out():
    """The token after five outputs is the sixth, which ``min_tokens`` of 6 still wants; the one after six may
    stop."""
    params = SamplingParams(temperature=0.0, min_tokens=6, stop_token_ids=(21,), max_tokens=99)
    contexts = [Context(prompt=(4,) * 12, output=(30,) * n, eos_ids=(2,)) for n in (5, 6, 7)]
    rows = [(params, context) for context in contexts]
    raw = np.zeros((3, V), np.float32)
    raw[:, 21], raw[:, 2], raw[:, 40] = 5.0, 4.0, 3.0
    draws, flags = draws_of(rows)
    token_E, ok_E = jitted()["sample"](raw, draws, slots_of(rows, V), flags)
    assert np.asarray(token_E).tolist() == [40, 21, 21]
    assert np.all(ok_E)
    for row, (params, context) in zip(raw, rows, strict=True):
        want = int(np.argmax(adjusted(row, params, context)))
        assert want == (40 if len(context.output) < 6 else 21)


@pytest.mark.parametrize("n_vocab", [50, 64, 65, 1000, 5003])
def test_threshold_keeps_what_a_full_sort_keeps(n_vocab):
    rng = np.random.default_rng(n_vocab)
    rows = []
    for _ in range(64):
        params = SamplingParams(
            temperature=float(rng.choice([0.3, 1.0, 2.0])),
            top_k=int(rng.choice([0, 1, 2, 63, 64, 65, 200, n_vocab, n_vocab + 5])),
            top_p=float(rng.choice([1.0, 0.001, 0.5, 0.9, 0.999])),
            min_p=float(rng.choice([0.0, 0.02, 0.3, 1.0])),
        )
        rows.append((params, Context(prompt=[0], output=[])))
    raw = rng.standard_normal((64, n_vocab)).astype(np.float32)
    raw[:32] *= 5
    raw[48:] = np.round(raw[48:] * 2) / 2  # many ties
    draws, _ = draws_of(rows)
    scaled_EV, _ = jitted()["scaled"](raw, draws)
    x = np.asarray(jitted()["truncated"](scaled_EV, draws, RANDOM | TRUNCATE))
    for i, (params, _) in enumerate(rows):
        kept = set(np.flatnonzero(distribution(raw[i].astype(np.float64), params)))
        got = set(np.flatnonzero(np.isfinite(x[i])))
        slack = _near_edge(raw[i], params)
        assert got ^ kept <= slack, (params, len(kept), len(got))


def _near_edge(raw_V: np.ndarray, params: SamplingParams) -> set[int]:
    """Tokens whose mass above them is within float32 rounding of top_p: either answer is right."""
    low, high = (
        distribution(
            raw_V.astype(np.float64),
            SamplingParams(
                temperature=params.temperature,
                top_k=params.top_k,
                min_p=min(1.0, params.min_p * (1 + sign * 1e-6)),
                top_p=min(1.0, params.top_p * (1 + sign * 3e-6)),
            ),
        )
        for sign in (-1, 1)
    )
    return set(np.flatnonzero((low > 0) != (high > 0)))


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0, "top_k": 20},
    {"top_p": 0.7},
    {"min_p": 0.05, "temperature": 1.5},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "logit_bias": {4: 2.0}},
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kw", SETTINGS, ids=str)
def test_fifty_thousand_draws_follow_the_distribution(kw):
    assert _chi_square(kw) < 1.0


def _chi_square(kw: dict[str, Any], n: int = 50_000) -> float:
    """Chi-square of n draws over its critical value at p = 1e-6; below 1 is a pass."""
    params, size = SamplingParams(**kw), 200
    context = Context(prompt=[1, 4, 4], output=[7, 9])
    raw_V = (np.random.default_rng(1).standard_normal(size) * 2).astype(np.float32)
    one, flags = draws_of([(params, context)])
    slots = slots_of([(params, context)], size)
    many = replace(
        one,
        **{
            name: jnp.repeat(getattr(one, name), n, axis=0)
            for name in one.__dataclass_fields__
            if name not in ("mask_EW", "redraw_E", "seed_E2", "pos_E")
        },
        seed_E2=jnp.asarray(np.arange(n, dtype=np.int64).view(np.uint32).reshape(n, 2)) // 7,
        pos_E=jnp.arange(n, dtype=jnp.int32) % 7,
    )
    raw_NV = jnp.broadcast_to(jnp.asarray(raw_V), (n, size))
    tokens, _ = jitted()["sample"](raw_NV, many, slots, flags | RANDOM)
    p = distribution(adjusted(raw_V, params, context), params)
    seen = np.bincount(np.asarray(tokens), minlength=size)
    assert not np.any(seen[p == 0]), "a token that was cut was drawn"
    big = p * n >= 5
    expect = np.append(p[big] * n, max(p[~big].sum() * n, 1e-9))
    got = np.append(seen[big], seen[~big].sum())
    keep = expect >= 1
    chi = float(((got - expect)[keep] ** 2 / expect[keep]).sum())
    return chi / _critical(int(keep.sum()) - 1)


def _critical(df: int) -> float:
    """Chi-square quantile at 1 - 1e-6 (Wilson and Hilferty)."""
    df = max(df, 1)
    return df * (1 - 2 / (9 * df) + 4.753 * (2 / (9 * df)) ** 0.5) ** 3


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "break_it",
    [
        lambda x: x / 2,
        lambda x: jnp.where(x > -1.6, x, x - 0.35),
        lambda x: jnp.roll(x, 1, axis=1),
        lambda x: x.at[:, :32].set(-jnp.inf),
    ],
)
def test_the_chi_square_test_sees_a_wrong_distribution(break_it, monkeypatch):
    """Mutants of the logits must fail the test above, or it proves nothing."""
    right = sampling.truncated
    monkeypatch.setattr(sampling, "truncated", lambda *a: break_it(right(*a)))
    _fails(monkeypatch)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "break_it",
    [
        lambda g: g * 0.9,
        lambda g: jnp.minimum(g, 2.0),
        lambda g: jnp.broadcast_to(g[:, :1], g.shape),
        lambda g: g.at[:, 100:].set(g[:, :100]),
    ],
)
def test_the_chi_square_test_sees_wrong_noise(break_it, monkeypatch):
    right = sampling.gumbel
    monkeypatch.setattr(sampling, "gumbel", lambda *a: break_it(right(*a)))
    _fails(monkeypatch)


def _fails(monkeypatch: Any) -> None:
    jitted.cache_clear()
    try:
        with pytest.raises(AssertionError):
            assert _chi_square({"temperature": 1.5}) < 1.0
    finally:
        monkeypatch.undo()
        jitted.cache_clear()


def test_a_draw_depends_on_seed_and_position_only():
    rng = np.random.default_rng(8)
    params, context = SamplingParams(), Context(prompt=[1], output=[])
    raw_V = rng.standard_normal(V).astype(np.float32)
    seeds = [5, -1, 2**62, 5, 6]
    draws, flags = draws_of([(params, context)] * 5, seeds=seeds)
    draws = replace(draws, pos_E=jnp.asarray([3, 3, 3, 3, 3]))
    fn, slots = jitted()["sample"], slots_of([(params, context)] * 5, V)
    raw = np.broadcast_to(raw_V, (5, V))
    first = np.asarray(fn(raw, draws, slots, flags)[0])
    assert first[0] == first[3]
    order = np.array([4, 2, 0, 1, 3])
    shuffled = replace(draws, seed_E2=draws.seed_E2[order])
    np.testing.assert_array_equal(np.asarray(fn(raw, shuffled, slots, flags)[0]), first[order])
    seen = {
        tuple(np.asarray(fn(raw, replace(draws, pos_E=jnp.full(5, p)), slots, flags)[0]).tolist())
        for p in range(12)
    }
    assert len(seen) > 8, "positions must change the draw"
    assert len(set(np.asarray(first).tolist())) > 1, "seeds must change the draw"


def test_drafts_before_a_draw_count_as_output():
    """Penalties and bad words at draft place j must see what they would see one token at a time."""
    rng = np.random.default_rng(6)
    drafts = (9, 12, 9)
    kw = {"bad_token_ids": ((7, 9, 12), (9, 12, 9, 44), (12, 9, 45)), "frequency_penalty": 0.7}
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.3, max_tokens=99, **kw)
    start = Context(prompt=rng.integers(0, V, 9).tolist(), output=(7,))
    rows = [(params, start)] * 4
    raw = rng.standard_normal((4, V)).astype(np.float32)
    draws, flags = draws_of(rows, J=4)
    place = jnp.arange(4)
    prefix = np.array([[d if i < j else -1 for i, d in enumerate(drafts)] for j in range(4)])
    draws = replace(
        draws, prefix_EJ=jnp.asarray(prefix, jnp.int32), n_prefix_E=place, pos_E=draws.pos_E + place
    )
    got = np.asarray(jitted()["adjust"](raw, draws, slots_of(rows, V), flags))
    for j in range(4):
        context = Context(prompt=start.prompt, output=(*start.output, *drafts[:j]))
        np.testing.assert_allclose(got[j], adjusted(raw[j], params, context), rtol=2e-5, atol=2e-5)
    assert np.isneginf(got[1, 12])
    assert np.isneginf(got[3, [44, 45]]).all()
    assert not np.isneginf(got[2, [12, 44, 45]]).any()


def test_greedy_takes_the_lowest_of_equal_logits():
    raw = np.zeros((3, V), np.float32)
    raw[0, [250, 40]] = 2.0
    raw[1, [31, 32]] = 1.0
    np.testing.assert_array_equal(np.asarray(jitted()["argmax"](raw)), [40, 31, 0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_broken_logit_is_told(bad):
    temperatures = (0, 0, 1, 1, 0)
    rows = [(SamplingParams(temperature=t), Context(prompt=[1], output=[])) for t in temperatures]
    raw = np.random.default_rng(0).standard_normal((5, V)).astype(np.float32)
    raw[1, 77] = bad
    draws, flags = draws_of(rows)
    for f in (0, flags):
        _, ok = jitted()["sample"](raw, draws, slots_of(rows, V), f)
        assert np.asarray(ok).tolist() == [True, False, True, True, True]


def test_one_broken_logit_of_many_is_told():
    """Among so many the largest number by XLA:CPU is that of the others."""
    rows = [(SamplingParams(temperature=0.0), Context(prompt=[1], output=[]))] * 5
    raw = np.random.default_rng(0).standard_normal((5, 4096)).astype(np.float32)
    raw[1, 2048] = np.nan
    draws, _ = draws_of(rows)
    _, ok = jitted()["sample"](raw, draws, slots_of(rows, 4096), 0)
    assert np.asarray(ok).tolist() == [True, False, True, True, True]


def test_a_row_with_everything_forbidden_is_told():
    params = SamplingParams(
        allowed_token_ids=(4, 5), logit_bias={4: -100.0}, bad_token_ids=((5,),), temperature=0.7
    )
    nothing = Context(prompt=[1], output=[])
    rows = [(params, nothing), *[(SamplingParams(), nothing)] * 4]
    raw = np.zeros((5, V), np.float32)
    draws, flags = draws_of(rows)
    _, ok = jitted()["sample"](raw, draws, slots_of(rows, V), flags)
    assert np.asarray(ok).tolist() == [False, True, True, True, True]


def test_grammar_masks_forbid_and_rows_without_one_are_free():
    rng = np.random.default_rng(2)
    mask = rng.random(V) < 0.1
    rows = [
        (SamplingParams(temperature=0.0), Context(prompt=[1], output=[], mask=mask)),
        (SamplingParams(temperature=0.0), Context(prompt=[1], output=[])),
    ]
    raw = rng.standard_normal((2, V)).astype(np.float32)
    draws, flags = draws_of(rows)
    token, _ = jitted()["sample"](raw, draws, slots_of(rows, V), flags)
    want = [int(np.argmax(adjusted(raw[i], *rows[i]))) for i in range(2)]
    assert np.asarray(token).tolist() == want
    assert want[0] != int(np.argmax(raw[0]))


def test_logprobs_are_of_the_raw_logits():
    raw = (np.random.default_rng(4).standard_normal((3, V)) * 3).astype(np.float32)
    token = jnp.asarray([5, 100, 299])
    found = jitted()["logprobs"](raw, token, LOGPROBS)
    chosen, ids, top = found.logprob_E, found.top_ids_EL, found.top_logprobs_EL
    x = raw.astype(np.float64)
    want = x - np.log(np.exp(x).sum(1, keepdims=True))
    np.testing.assert_allclose(np.asarray(chosen), want[range(3), [5, 100, 299]], rtol=1e-5)
    order = np.argsort(-want, axis=1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(np.asarray(ids), order)
    np.testing.assert_allclose(np.asarray(top), np.take_along_axis(want, order, 1), rtol=1e-5)
    assert not np.any(np.asarray(jitted()["logprobs"](raw, token, 0).logprob_E))


OPEN = 5


def _thinking_draws(mask_V: np.ndarray, redraw: int, n: int, temperature: float = 1.0):
    """``n`` equal rows under one mask, with seeds 0 to n - 1."""
    params = SamplingParams(temperature=temperature, max_tokens=99)
    row = (params, Context(prompt=[1, 2], output=[], mask=mask_V))
    draws, flags = draws_of([row])
    many = {
        name: jnp.repeat(getattr(draws, name), n, axis=0)
        for name in draws.__dataclass_fields__
        if getattr(draws, name) is not None
    }
    many["seed_E2"] = jnp.stack([jnp.arange(n, dtype=jnp.uint32), jnp.zeros(n, jnp.uint32)], 1)
    many["slot_E"] = jnp.zeros(n, jnp.int32)
    return (
        replace(draws, **many, redraw_E=jnp.full(n, redraw, jnp.int32)),
        flags,
        slots_of([row], V),
    )


@pytest.mark.slow
def test_a_thought_begins_as_often_as_without_a_mask_and_the_answer_keeps_its_distribution():
    n, raw_V = 20_000, np.full(V, -20.0, np.float32)
    raw_V[[OPEN, 40, 80, 200, 250]] = np.log([0.6, 0.1, 0.1, 0.1, 0.1])
    mask_V = np.zeros(V, bool)
    mask_V[[OPEN, 40, 250]] = True
    draws, flags, slots = _thinking_draws(mask_V, OPEN, n)
    raw = jnp.tile(raw_V, (n, 1))
    token, ok = jitted()["sample"](raw, draws, slots, flags)
    free, _ = jitted()["sample"](raw, replace(draws, mask_EW=None, redraw_E=None), slots, flags)
    token, free = np.asarray(token), np.asarray(free)
    assert np.all(ok)
    np.testing.assert_array_equal(token == OPEN, free == OPEN)
    stays = np.isin(free, [OPEN, 40, 250])
    np.testing.assert_array_equal(token[stays], free[stays])
    share = np.bincount(token, minlength=V) / n
    np.testing.assert_allclose(share[[OPEN, 40, 250]], [0.6, 0.2, 0.2], atol=4 * 0.5 / n**0.5)
    assert share[[OPEN, 40, 250]].sum() == 1.0
    again = share_of(token[~stays])
    np.testing.assert_allclose(again[[40, 250]], 0.5, atol=4 * 0.5 / (~stays).sum() ** 0.5)


def share_of(token_E: np.ndarray) -> np.ndarray:
    return np.bincount(token_E, minlength=V) / len(token_E)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_may_think_leaves_the_others_alone(temperature):
    rng = np.random.default_rng(11)
    n = 64
    raw = (rng.standard_normal((n, V)) * 3).astype(np.float32)
    raw[: n // 2, OPEN] += 12
    mask_V = rng.random(V) < 0.3
    mask_V[OPEN] = True
    draws, flags, slots = _thinking_draws(mask_V, OPEN, n, temperature)
    own = jnp.where(jnp.arange(n) % 3 == 0, OPEN, -1)
    sample = jitted()["sample"]
    mixed, _ = sample(raw, replace(draws, redraw_E=own), slots, flags)
    masked, _ = sample(raw, replace(draws, redraw_E=jnp.full(n, -1)), slots, flags)
    free, _ = sample(raw, replace(draws, mask_EW=None, redraw_E=None), slots, flags)
    own, mixed, masked, free = (np.asarray(x) for x in (own, mixed, masked, free))
    np.testing.assert_array_equal(mixed[own < 0], masked[own < 0])
    stays = (own >= 0) & mask_V[free]
    assert 0 < stays.sum() < (own >= 0).sum()
    np.testing.assert_array_equal(mixed[stays], free[stays])
    again = mixed[(own >= 0) & ~stays]
    assert mask_V[again].all()
    assert OPEN not in again


def test_a_thought_may_begin_where_the_structure_allows_nothing():
    """The row is sound only if its first draw stays."""
    raw = np.zeros((2, V), np.float32)
    raw[0, OPEN], raw[1, 7] = 9.0, 9.0
    mask_V = np.zeros(V, bool)
    mask_V[OPEN] = True
    draws, flags, slots = _thinking_draws(mask_V, OPEN, 2, 0.0)
    token, ok = jitted()["sample"](raw, draws, slots, flags)
    assert int(token[0]) == OPEN
    assert np.asarray(ok).tolist() == [True, False]
