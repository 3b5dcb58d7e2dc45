"""The account of bench.prefix: its oracle against brute force, and what it calls exact."""

from __future__ import annotations

import random

import pytest

from bench.prefix import Oracle, Seen, account, compared, read_config, table


def brute(known: list[list[int]], prompt: list[int], page: int) -> int:
    best = 0
    for tokens in known:
        n = 0
        while n < min(len(tokens) // page * page, len(prompt) - 1) and tokens[n] == prompt[n]:
            n += 1
        best = max(best, n // page * page)
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_oracle_knows_what_a_cache_that_forgets_nothing_knows(seed):
    rng = random.Random(seed)
    oracle, known = Oracle(4), []
    for _ in range(40):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        assert oracle.cached(prompt) == brute(known, prompt, 4)
        oracle.learn(prompt)
        known.append(prompt)


def seen(n_cached: int, expected: int) -> Seen:
    return Seen(ttft_s=0.1, n_prompt=100, n_cached=n_cached, expected=expected, tokens=[1])


@pytest.mark.parametrize(
    ("n_cached", "computed", "exact"),
    [((0, 96), 104, True), ((0, 64), 136, False), ((0, 96), 105, False), ((0, 96), 72, False)],
)
def test_exact_means_to_the_token(n_cached, computed, exact):
    found = account("chat", [seen(n_cached[0], 0), seen(n_cached[1], 96)], computed, 0)
    assert found["exact"] is exact
    assert found["prompt_tokens"] == 200


def test_what_was_made_before_is_counted_apart():
    found = account("retrieval", [seen(96, 96)], 4 + 800, 800)
    assert (found["exact"], found["computed_tokens"], found["precomputed_tokens"]) == (True, 4, 800)


def test_the_first_request_of_the_system_prompt_is_cold_and_not_in_the_median():
    slow = Seen(ttft_s=9.0, n_prompt=100, tokens=[1])
    found = account("system", [slow, seen(96, 96)], 104, 0)
    assert (found["ttft_p50_ms"], found["ttft_first_ms"]) == (100.0, 9000.0)


def test_both_sides_are_compared():
    off = {"chat": account("chat", [Seen(ttft_s=1.0, n_prompt=100, tokens=[1])], 100, 0)}
    on = {"chat": account("chat", [seen(96, 96)], 4, 0)}
    pair = compared(off, on)["chat"]
    assert (pair["ttft_ratio"], pair["tokens_saved"]) == (0.1, 96)
    assert table({"chat": pair}).row_count == 1


def test_a_model_without_a_config_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 100, "max_position_embeddings": 64}')
    assert read_config(tmp_path) == (25, 75, 64)
