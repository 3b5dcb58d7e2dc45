"""The figures of a comparison, beside arithmetic over whole distributions."""

from __future__ import annotations

import numpy as np
import pytest

from jserve.quality.metrics import TokenScores, compared, metrics


def scores(logits_nV: np.ndarray, tokens_n: np.ndarray, k: int) -> TokenScores:
    log_nV = logits_nV - np.log(np.exp(logits_nV).sum(axis=1, keepdims=True))
    ids_nK = np.argsort(-log_nV, axis=1, kind="stable")[:, :k]
    return TokenScores(
        logprob_n=np.take_along_axis(log_nV, tokens_n[:, None], 1)[:, 0].astype(np.float32),
        ids_nK=ids_nK.astype(np.int32),
        top_nK=np.take_along_axis(log_nV, ids_nK, 1).astype(np.float32),
    )


def whole(p_nV: np.ndarray, q_nV: np.ndarray) -> np.ndarray:
    """KL of whole distributions."""
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p_nV, q_nV))
    return (np.exp(p) * (p - q)).sum(axis=1)


def pair(n: int = 150, V: int = 40, off: float = 0.3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    p = rng.normal(0, 3, (n, V))
    return p, p + rng.normal(0, off, (n, V)), rng.integers(0, V, n)


def test_with_all_ids_the_divergence_is_exact() -> None:
    p, q, tokens = pair()
    found = compared(scores(p, tokens, 40), scores(q, tokens, 40), 40)
    np.testing.assert_allclose(found.kl_n, whole(p, q), rtol=1e-4, atol=2e-6)
    np.testing.assert_array_equal(found.same_n, p.argmax(1) == q.argmax(1))


@pytest.mark.parametrize("off", [0.3, 3.0, 30.0])
def test_with_some_ids_it_is_a_lower_bound_that_still_sees_the_error(off: float) -> None:
    p, q, tokens = pair(off=off)
    found = compared(scores(p, tokens, 8), scores(q, tokens, 8), 40).kl_n
    exact = whole(p, q)
    assert (found <= exact + 1e-5).all()
    assert found.mean() > 0.5 * exact.mean()


def test_places_beyond_the_vocabulary_say_nothing() -> None:
    p, q, tokens = pair(V=6)
    exact = compared(scores(p, tokens, 6), scores(q, tokens, 6), 6).kl_n
    longer = []
    for x in (p, q):
        made = scores(x, tokens, 6)
        ids = np.pad(made.ids_nK, ((0, 0), (0, 3)))
        top = np.pad(made.top_nK, ((0, 0), (0, 3)), constant_values=-np.inf)
        longer.append(TokenScores(logprob_n=made.logprob_n, ids_nK=ids, top_nK=top))
    np.testing.assert_allclose(compared(*longer, 6).kl_n, exact, atol=1e-12)


def test_a_model_without_numbers_is_infinitely_far() -> None:
    p, _, tokens = pair()
    good, bad = scores(p, tokens, 8), scores(p, tokens, 8)
    bad = TokenScores(logprob_n=bad.logprob_n, ids_nK=bad.ids_nK, top_nK=bad.top_nK * np.nan)
    assert np.isinf(compared(good, bad, 40).kl_n).all()


def test_intervals_hold_the_value_and_widen_with_fewer_texts() -> None:
    p, q, tokens = pair(n=600)
    found = compared(scores(p, tokens, 40), scores(q, tokens, 40), 40)
    many = metrics(found, np.arange(600) // 6)
    few = metrics(found, np.arange(600) // 150)
    for name, metric in many.items():
        assert metric.low <= metric.value <= metric.high, name
    width = [m["mean_kl"].high - m["mean_kl"].low for m in (many, few)]
    assert width[0] > 0
    assert few["mean_kl"].value == many["mean_kl"].value
    nll = np.mean(found.worse_n)
    assert many["ln_ppl_ratio"].value == pytest.approx(nll)
