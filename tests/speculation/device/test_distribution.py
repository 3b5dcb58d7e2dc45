"""Joint second-token outcomes of speculation against exact target probabilities: one chi-square each.

50,000 sequences at once through the jitted sampler and ``verify.accept``, on a target whose next-token logits
depend on the last token only, so exact probabilities are a table. The first two tokens of a row with one draft
come from a verify step (and, where the draft fell, from the step after it). A joint outcome shows what a test of
first tokens cannot: an accepted draft, what follows it, and what follows a draft that fell.

Mutations that the test must catch. Verification here draws every position with its own key and keeps drafts that
equal the draw, so two of the usual ones have no counterpart: there is no residual to renormalise, and draft
probabilities are never used, filtered or not. The others are planted below.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.sampling import SamplingParams
from jserve.speculation.device.verify import accept
from tests.model.sample_reference import Context, adjusted, distribution
from tests.model.sample_rig import draws_of, jitted, mask_words, slots_of

V, N, P_MIN = 32, 50_000, 1e-6
PROMPT = [1, 2, 3]
LAST = 3
POS = len(PROMPT)

SETTINGS = {
    "plain": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=2.0),
    "top_k": SamplingParams(temperature=1.0, top_k=6),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, min_p=0.05),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.5
    ),
    "bias": SamplingParams(temperature=1.0, logit_bias={3: 2.0, 7: -100.0}),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=tuple(range(4, 25))),
    "mask": SamplingParams(temperature=1.0),
    "all": SamplingParams(
        temperature=0.8, top_k=20, top_p=0.9, presence_penalty=0.5, logit_bias={5: 1.0}
    ),
}
DRAFTERS = ("good", "uniform", "adversarial", "ngram")
MUTATIONS = (
    "accept always",
    "bonus from the draft",
    "mask forgotten",
    "context of another draft",
    "one key for both positions",
    "penalties forget the draft",
)


@lru_cache
def target() -> np.ndarray:
    """float32[V, V]: logits of the next token after each token; it likes to say a token twice."""
    logits = np.random.default_rng(7).normal(0, 1.6, (V, V)) + 2.5 * np.eye(V)
    return logits.astype(np.float32)


def masks(setting: str) -> tuple[np.ndarray | None, np.ndarray | None]:
    """What a grammar allows at the first and at the second place."""
    if setting != "mask":
        return None, None
    token = np.arange(V)
    return token % 3 != 0, token % 3 != 1


@lru_cache
def exact(setting: str) -> np.ndarray:
    """float64[V, V]: joint probabilities of the first two tokens."""
    params, (first, second) = SETTINGS[setting], masks(setting)
    logits = adjusted(target()[LAST], params, Context(prompt=PROMPT, output=[], mask=first))
    p_V = distribution(logits, params)
    joint = np.zeros((V, V))
    for x in np.flatnonzero(p_V):
        context = Context(prompt=PROMPT, output=[int(x)], mask=second)
        joint[x] = p_V[x] * distribution(adjusted(target()[x], params, context), params)
    return joint


def drafts(setting: str, drafter: str) -> np.ndarray:
    """int32[N]: one draft each, none of them knowing the draw."""
    rng = np.random.default_rng(11)
    p_V = exact(setting).sum(1)
    match drafter:
        case "good":
            return rng.choice(V, N, p=p_V).astype(np.int32)
        case "uniform":
            return rng.integers(0, V, N, dtype=np.int32)
        case "adversarial":
            return np.full(N, int(np.argmin(p_V)), np.int32)
    return np.full(N, int(np.argmax(p_V)), np.int32)


def drawn(setting: str, last_N, output_NJ, place: int, key_place: int, mask) -> np.ndarray:
    """int32[N]: the sampler's draws after ``last_N``, ``output_NJ`` being the drafts before them."""
    params = SETTINGS[setting]
    one, flags = draws_of([(params, Context(prompt=PROMPT, output=[]))], J=2)
    draws = jax.tree.map(lambda a: jnp.repeat(a, N, axis=0), one)
    seeds = np.arange(N, dtype=np.int64).view(np.uint32).reshape(N, 2)
    draws = replace(
        draws,
        seed_E2=jnp.asarray(seeds),
        pos_E=jnp.full(N, POS + key_place, jnp.int32),
        prefix_EJ=jnp.asarray(output_NJ),
        n_prefix_E=jnp.full(N, place, jnp.int32),
        mask_EW=None if mask is None else jnp.tile(jnp.asarray(mask_words(mask, V)), (N, 1)),
    )
    raw_EV = jnp.asarray(target())[jnp.asarray(last_N)]
    token_E, ok_E = jitted()["sample"](raw_EV, draws, slots(setting), flags)
    assert bool(jnp.all(ok_E))
    return np.asarray(token_E)


@lru_cache
def slots(setting: str):
    return slots_of([(SETTINGS[setting], Context(prompt=PROMPT, output=[]))], V)


def outcomes(setting: str, drafter: str, mutation: str = "") -> np.ndarray:
    """int32[N, 2]: the first two tokens that each sequence gets."""
    draft_N = drafts(setting, drafter)
    none_N1, second = np.full((N, 1), -1, np.int32), masks(setting)[1]
    if mutation == "mask forgotten":
        second = None
    context_N = np.roll(draft_N, 1) if mutation == "context of another draft" else draft_N
    counted = mutation != "penalties forget the draft"
    key_place = 0 if mutation == "one key for both positions" else 1
    zero_N = first_draws(setting)
    prefix = draft_N[:, None] if counted else none_N1
    one_N = drawn(setting, context_N, prefix, int(counted), key_place, second)
    token = np.stack([np.full(N, LAST, np.int32), draft_N], 1)
    n_ok = np.asarray(
        accept(jnp.asarray(token), jnp.asarray(np.stack([zero_N, one_N], 1)), jnp.full(N, 2))
    )
    if mutation == "accept always":
        zero_N, n_ok = draft_N, np.full(N, 2)
    if mutation == "bonus from the draft":
        one_N = drafts(setting, "uniform")[::-1]
    # Where the draft fell, the next step draws the second token after the first one.
    later_N = one_N if mutation == "accept always" else next_draws(setting)
    return np.stack([zero_N, np.where(n_ok == 2, one_N, later_N)], 1)


@lru_cache
def first_draws(setting: str) -> np.ndarray:
    """int32[N]: the first token of every sequence."""
    none_N1 = np.full((N, 1), -1, np.int32)
    return drawn(setting, np.full(N, LAST), none_N1, 0, 0, masks(setting)[0])


@lru_cache
def next_draws(setting: str) -> np.ndarray:
    """int32[N]: the second token, drawn by a step of its own."""
    zero_N = first_draws(setting)
    return drawn(setting, zero_N, zero_N[:, None], 1, 1, masks(setting)[1])


def p_value(found_N2: np.ndarray, joint_VV: np.ndarray) -> float:
    """Of a chi-square over the 31 likeliest pairs and the rest; 0 where the impossible happened."""
    p = joint_VV.ravel()
    pair_N = found_N2[:, 0] * V + found_N2[:, 1]
    if (p[pair_N] <= 0).any():
        return 0.0
    count = np.bincount(pair_N, minlength=V * V)
    top = np.argsort(-p)[:31]
    expected = [*(p[top] * N), N * (1 - p[top].sum())]
    seen = [*count[top], N - count[top].sum()]
    pairs = [(s, e) for s, e in zip(seen, expected, strict=True) if e >= 5]
    statistic = sum((s - e) ** 2 / e for s, e in pairs)
    return _tail(statistic, len(pairs) - 1)


def _tail(statistic: float, df: int) -> float:
    """Chance of a larger chi-square (Wilson and Hilferty's approximation, good far out)."""
    z = ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return 0.5 * math.erfc(z / math.sqrt(2))


def test_the_judge_knows_the_critical_value():
    assert _tail(83.6, 31) == pytest.approx(1e-6, rel=0.3)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_second_token_has_the_targets_distribution(setting, drafter):
    assert p_value(outcomes(setting, drafter), exact(setting)) > P_MIN


@pytest.mark.parametrize("setting", ["plain", "top_p", "all"])
def test_the_same_tokens_come_without_drafts(setting):
    """More than the distribution: the very tokens, whatever was drafted."""
    plain = outcomes(setting, "adversarial")
    for drafter in DRAFTERS:
        np.testing.assert_array_equal(outcomes(setting, drafter), plain)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_test_can_fail(mutation):
    setting = {"mask forgotten": "mask", "penalties forget the draft": "penalties"}
    name = setting.get(mutation, "plain")
    drafter = "uniform" if mutation == "accept always" else "good"
    assert p_value(outcomes(name, drafter, mutation), exact(name)) < P_MIN
