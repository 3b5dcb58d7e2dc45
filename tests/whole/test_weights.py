"""A trainer beside the Python door, on two devices and with a vocabulary that does not divide over them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve import LLM, SamplingParams
from jserve.errors import WeightsError
from jserve.model.families import family_for
from jserve.model.shard import ParamSpec, is_spec

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_model_len": 96,
    "page_size": 8,
    "compile_cache": "",
    "prompt_logprobs": False,
    "structured_outputs": False,
}
PROMPTS = ["the quick brown fox", "lazy dog"]


@pytest.fixture(scope="module")
def odd_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a token more."""
    root = tmp_path_factory.mktemp("odd") / "odd-llama"
    shutil.copytree(tiny_dir, root)
    config = json.loads((root / "config.json").read_text()) | {"vocab_size": 321}
    (root / "config.json").write_text(json.dumps(config))
    return root


def drawn(root: Path, seed: int) -> Any:
    config = json.loads((root / "config.json").read_text())
    family = family_for(config)
    rng = np.random.default_rng(seed)

    def one(spec: ParamSpec) -> jax.Array:
        x = rng.standard_normal(spec.shape) * 0.25 + spec.init_mean
        return jnp.asarray(x, jnp.float32)

    return jax.tree.map(one, family.specs(family.arch(config), 1), is_leaf=is_spec)


@jax.jit
def gradients(params: Any) -> Any:
    return jax.grad(lambda p: sum(jnp.sum(x * x) for x in jax.tree.leaves(p)))(params)


@pytest.fixture(scope="module")
def train() -> Any:
    """A step of descent that takes its parameters' buffers, as trainers compile it."""

    def step(params: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients(params))

    return jax.jit(step, donate_argnums=0)


@pytest.fixture(scope="module")
def llm(odd_dir: Path) -> Iterator[LLM]:
    first = drawn(odd_dir, 0)
    with LLM(str(odd_dir), params=first, tensor_parallel_size=2, **OPTIONS) as made:
        for leaf in jax.tree.leaves(first):
            leaf.delete()
        yield made


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_a_training_loop_feeds_the_engine(llm: LLM, odd_dir: Path, train: Any) -> None:
    params = train(train(drawn(odd_dir, 0)))
    before = tokens(llm)
    llm.update_weights(params)
    fed = tokens(llm)
    kept = jax.tree.map(np.array, params)
    train(params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert tokens(llm) == fed != before
    fresh_options = {**OPTIONS, "tensor_parallel_size": 1}
    with LLM(str(odd_dir), params=kept, **fresh_options) as fresh:
        assert tokens(fresh) == fed


def test_cached_prefixes_of_the_old_weights_are_gone(llm: LLM, odd_dir: Path) -> None:
    long = " ".join(["the quick brown fox jumps over the lazy dog"] * 2)
    for seed in (3, 4):
        llm.update_weights(drawn(odd_dir, seed))
        (first,) = llm.generate(long, GREEDY)
        (second,) = llm.generate(long, GREEDY)
        assert not first.num_cached_tokens
        assert second.num_cached_tokens
        assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_a_donated_leaf_is_named_and_the_engine_lives(llm: LLM, odd_dir: Path, train: Any) -> None:
    before = tokens(llm)
    params = drawn(odd_dir, 5)
    train(params)
    with pytest.raises(WeightsError, match=r"params\.embed: .*deleted"):
        llm.update_weights(params)
    wrong = drawn(odd_dir, 5)
    wrong["layers"][1]["o"] = wrong["layers"][1]["o"][:-1]
    with pytest.raises(WeightsError, match=r"params\.layers\.1\.o: shape"):
        llm.update_weights(wrong)
    assert tokens(llm) == before


def test_min_tokens_decides_at_its_border(llm: LLM, odd_dir: Path) -> None:
    """A stop id as the token after ``min_tokens`` outputs ends the answer, and one before them is
    not drawn."""
    llm.update_weights(drawn(odd_dir, 0))
    (out,) = llm.generate(PROMPTS[0], GREEDY)
    plain = list(out.outputs[0].token_ids)
    at = next(i for i in range(3, len(plain)) if plain[i] not in plain[:i])

    def stopped(min_tokens: int) -> Any:
        params = SamplingParams(
            temperature=0,
            max_tokens=12,
            ignore_eos=True,
            stop_token_ids=(plain[at],),
            min_tokens=min_tokens,
        )
        return llm.generate(PROMPTS[0], params)[0].outputs[0]

    for min_tokens in (at - 1, at):
        assert stopped(min_tokens).finish_reason == "stop"
        assert list(stopped(min_tokens).token_ids)[:at] == plain[:at]
        assert len(stopped(min_tokens).token_ids) <= at + 1
    late = list(stopped(at + 1).token_ids)
    assert late[:at] == plain[:at]
    assert len(late) > at
    assert late[at] != plain[at]
