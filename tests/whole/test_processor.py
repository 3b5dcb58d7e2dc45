"""Logits processors: rows that ask draw from the logits that the function gives, beside rows that do not."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve import (
    LLM,
    RowView,
    SamplingParams,
    StructuredOutputs,
    logits_processor,
    row_state,
    sampler,
)
from jserve.errors import BadRequest, ConfigError, NothingAllowed
from jserve.model import features
from jserve.model.features import register_feature
from jserve.model.hand import step_model
from jserve.model.step import make_step
from jserve.model.view import Bucket, buffer_size
from tests.whole.conftest import SMALL_OPTIONS

PROMPT = " ".join(["the quick brown fox jumps over the lazy dog"] * 3)


def only(logits_V: jax.Array, row: RowView) -> jax.Array:
    """Nothing but the token whose id is the position, plus what is asked."""
    wanted = row.position + row.numbers["plus"].astype(jnp.int32)
    return jnp.where(jnp.arange(logits_V.shape[0]) == wanted, 0.0, -jnp.inf)


def unlike(logits_V: jax.Array, row: RowView) -> jax.Array:
    """The token before is less likely."""
    at = jnp.arange(logits_V.shape[0]) == row.token
    return jnp.where(at, logits_V - row.numbers["by"], logits_V)


def once(logits_V: jax.Array, row: RowView) -> jax.Array:
    """No token twice."""
    assert row.state is not None
    return jnp.where(row.state, -jnp.inf, logits_V)


def fixed(logits_V: jax.Array, row: RowView) -> jax.Array:
    """4 for one token, less for another, nothing for the rest, whatever the model says."""
    at_V, numbers = jnp.arange(logits_V.shape[0]), row.numbers
    two_V = jnp.where(at_V == numbers["two"].astype(jnp.int32), numbers["by"], -1e9)
    return jnp.where(at_V == numbers["one"].astype(jnp.int32), 4.0, two_V)


@pytest.fixture(scope="module")
def llm(tiny_dir: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "_REGISTERED", {})
        register_feature(logits_processor("only", only, plus=1.0))
        register_feature(logits_processor("unlike", unlike, by=0.0))
        register_feature(logits_processor("fixed", fixed, one=0.0, two=0.0, by=0.0))
        register_feature(logits_processor("halves", lambda x_V, row: x_V / 2))
        seen = row_state(np.zeros(320, bool), lambda seen_V, token: seen_V.at[token].set(True))
        register_feature(logits_processor("once", once, state=seen))
        register_feature(
            sampler("mine", lambda x_V, key, row: jax.random.categorical(key, x_V / 0.5))
        )
        options = {**SMALL_OPTIONS, "max_num_seqs": 4}
        with LLM(
            str(tiny_dir), **options, dtype="float32", speculative={"method": "ngram"}
        ) as engine:
            yield engine


def params(temperature: float = 0.0, structured: Any = None, **extra: Any) -> SamplingParams:
    return SamplingParams(
        structured_outputs=structured,
        temperature=temperature,
        seed=5,
        max_tokens=12,
        ignore_eos=True,
        logprobs=0,
        extra_args=extra,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bias_and_penalties_act_on_what_it_gives(llm: LLM) -> None:
    """They come after it: were it the other way around, the processor, which looks at nothing, would undo them."""
    first, second = llm.generate([PROMPT], params(), use_tqdm=False)[0].prompt_token_ids[:2]
    assert first != second

    def drawn(**fields: Any) -> int:
        numbers = {"fixed": {"one": first, "two": 7, "by": 3.0}}
        asked = dataclasses.replace(params(**numbers), max_tokens=1, **fields)
        return llm.generate([PROMPT], asked, use_tqdm=False)[0].outputs[0].token_ids[0]

    assert drawn() == first, "its logit is 4, that of token 7 is 3"
    assert drawn(repetition_penalty=2.0) == 7, "the first is of the prompt: 4 / 2"
    assert drawn(logit_bias={7: 1.5}) == 7, "3 + 1.5"
    assert drawn(presence_penalty=1.5) == first, "no token of the prompt counts"
    assert drawn(allowed_token_ids=[7, 9]) == 7
    assert drawn(bad_words=[llm.tokenizer.decode([first])]) == 7


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_masks_and_truncation_act_on_what_it_gives(llm: LLM) -> None:
    """The processor, which looks at nothing, would lift a mask that came before it, and give all tokens back."""
    first, eos = llm.generate([PROMPT], params(), use_tqdm=False)[0].prompt_token_ids[0], 2

    def drawn(one: int = first, by: float = 3.0, **fields: Any) -> int:
        asked = params(fixed={"one": one, "two": 7, "by": by})
        asked = dataclasses.replace(asked, **{"max_tokens": 1, **fields})
        return llm.generate([PROMPT], asked, use_tqdm=False)[0].outputs[0].token_ids[0]

    digit = drawn(structured_outputs=StructuredOutputs(regex="[0-9]"))
    assert llm.tokenizer.decode([digit]).isdigit()
    assert drawn(one=eos, ignore_eos=False) == eos
    assert drawn(one=eos, ignore_eos=False, min_tokens=1) == 7
    near = {"by": 3.9, "temperature": 1.0}
    assert {drawn(**near, seed=s) for s in range(12)} == {first, 7}, "both are likely"
    for cut in ({"top_k": 1}, {"min_p": 0.95}, {"top_p": 0.5}):
        assert {drawn(**near, **cut, seed=s) for s in range(12)} == {first}, cut


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rows_that_ask_draw_from_what_it_gives(llm: LLM) -> None:
    asked = [
        params(),
        params(only={"plus": 7}),
        params(only=3, unlike=0.0),
        params(1.0, only=True),
        params(0.5),
        params(0.25, halves=True),
        params(unlike=1e9),
    ]
    outs = llm.generate([PROMPT] * len(asked), asked, use_tqdm=False)
    assert llm._engine.runner.programs.late_compiles == 0  # type: ignore[attr-defined]
    first = len(outs[0].prompt_token_ids)
    tokens = [list(out.outputs[0].token_ids) for out in outs]
    assert tokens[1] == list(range(first + 7, first + 19))
    assert tokens[2] == list(range(first + 3, first + 15))
    assert tokens[3] == list(range(first + 1, first + 13))
    assert tokens[5] == tokens[4], "half the logits at half the temperature"
    assert all(one != two for one, two in zip(tokens[6], tokens[6][1:], strict=False))
    alone = [llm.generate([PROMPT], each, use_tqdm=False)[0] for each in asked]
    assert [list(out.outputs[0].token_ids) for out in alone] == tokens
    raw = outs[1].outputs[0].logprobs[0][tokens[1][0]].logprob
    assert raw < -1.0, "log-probabilities are the model's"
    assert outs[1].outputs[0].extra == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_state_and_a_key_are_the_same_after_a_recompute_and_behind_forced_tokens(
    llm: LLM,
) -> None:
    """A state is folded anew, of all tokens so far."""
    asked = params(1.0, once=True, mine=True)
    [whole] = llm.generate([PROMPT], asked, use_tqdm=False)
    tokens = list(whole.outputs[0].token_ids)
    assert len({*tokens}) == len(tokens) == 12
    text = ""
    for i, piece in enumerate(llm.stream(PROMPT, asked)):
        text += piece
        if i in (4, 7):
            llm._engine.swap(lambda: None)  # type: ignore[attr-defined]
    assert text == whole.outputs[0].text
    digits = StructuredOutputs(regex="(quick|lazy)-[0-9]{6}")  # no letter twice
    guided = params(1.0, once=True, mine=True, structured=digits)
    [out] = llm.generate([PROMPT], guided, use_tqdm=False)
    ids = out.outputs[0].token_ids
    assert len({*ids}) == len(ids)
    assert re.fullmatch("(quick|lazy)-[0-9]+", out.outputs[0].text)


@pytest.mark.slow
def test_a_processor_that_leaves_nothing_is_named(llm: LLM) -> None:
    banned = dataclasses.replace(params(only={"plus": 7}), allowed_token_ids=(1, 2))
    with pytest.raises(NothingAllowed, match="step feature only leaves no token") as caught:
        llm.generate([PROMPT, PROMPT], [params(), banned], use_tqdm=False)
    assert caught.value.field == "extra_args.only"
    assert len(llm.generate([PROMPT], params(), use_tqdm=False)[0].outputs[0].token_ids) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    ["x", [1.0], {"minus": 1.0}, {"plus": "1"}, {"plus": float("nan")}, {"plus": 1e39}, False],
)
def test_what_is_asked_is_checked(llm: LLM, asked: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        llm.generate("x", SamplingParams(extra_args={"only": asked}))
    assert caught.value.field == "extra_args.only"


def test_what_is_registered_is_checked(tiny_dir: Path) -> None:
    wrong: list[dict[str, Any]] = [{f"n{i}": 0.0 for i in range(9)}, {"a": float("inf")}]
    for numbers in wrong:
        with pytest.raises(ConfigError) as caught:
            logits_processor("many", only, **numbers)
        assert caught.value.field == "many"
    model = step_model(json.loads((tiny_dir / "config.json").read_text()))

    def trace(feature: Any, of: Any = model) -> None:
        bucket = Bucket(D=2, P=0, F=0, features=(feature,))
        buf = jax.ShapeDtypeStruct((buffer_size(of.fields(bucket)),), jnp.int32)
        jax.eval_shape(make_step(of, bucket), of.abstract_params(), of.abstract_state(), buf)

    trace(logits_processor("same", lambda x_V, row: x_V))
    with pytest.raises(ConfigError, match="logits a row"):
        trace(logits_processor("short", lambda x_V, row: x_V[1:]))
