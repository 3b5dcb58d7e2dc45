"""A step feature that a program registers: from the request through the buffer to the output, whatever
else runs in the step; examples/step_feature.py is the feature."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jserve import LLM, SamplingParams
from jserve.errors import BadRequest, ConfigError
from jserve.model import features
from jserve.model.features import MASK, register_feature
from tests.whole.conftest import SMALL_OPTIONS

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "step_feature.py"
V = 320
PROMPT = "the fox the fox the fox the"


@pytest.fixture(scope="module")
def llm(tiny_dir: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "_REGISTERED", {})
        register_feature(runpy.run_path(str(EXAMPLE))["ENTROPY"])
        options = {"speculative": {"method": "ngram"}, "max_logprob_token_ids": V}
        with LLM(str(tiny_dir), **SMALL_OPTIONS, **options) as made:
            yield made


def params(at: Any = None, **rest: Any) -> SamplingParams:
    asked = {} if at is None else {"extra_args": {"entropy": at}}
    return SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, **asked, **rest)


def ran(llm: LLM, *asked: SamplingParams) -> list[Any]:
    outs = llm.generate([PROMPT] * len(asked), list(asked), use_tqdm=False)
    return [out.outputs[0] for out in outs]


def entropies(choice: Any, at: float) -> np.ndarray:
    """Nats, from the log-probabilities of the whole vocabulary."""
    logp_nV = np.array([[entry[i].logprob for i in range(V)] for entry in choice.logprobs])
    logp_nV = logp_nV / at
    logp_nV -= np.log(np.exp(logp_nV).sum(axis=1, keepdims=True))
    return -(np.exp(logp_nV) * logp_nV).sum(axis=1)


@pytest.mark.slow
def test_one_value_for_each_token(llm: LLM) -> None:
    [choice] = ran(llm, params(0.05, logprob_token_ids=tuple(range(V))))
    assert len(choice.extra["entropy"]) == len(choice.token_ids) == 16
    assert choice.extra["entropy"] == pytest.approx(entropies(choice, 0.05), abs=1e-3)
    assert np.ptp(choice.extra["entropy"]) > 1e-3


@pytest.mark.slow
def test_each_row_gets_its_own(llm: LLM) -> None:
    alone = [ran(llm, params(at))[0] for at in (1, 0.25)]
    together = ran(llm, params(1), params(), params(0.25))
    assert [c.token_ids for c in together] == [alone[0].token_ids] * 3
    assert together[0].extra["entropy"] == pytest.approx(alone[0].extra["entropy"], abs=1e-5)
    assert together[1].extra == {}
    assert together[2].extra["entropy"] == pytest.approx(alone[1].extra["entropy"], abs=1e-5)
    assert alone[0].extra["entropy"] != pytest.approx(alone[1].extra["entropy"], abs=1e-3)


@pytest.mark.slow
def test_with_a_grammar_that_forces_tokens(llm: LLM) -> None:
    from jserve import StructuredOutputs

    [choice] = ran(llm, params(1, structured_outputs=StructuredOutputs(regex="the quick brown f")))
    assert choice.text.startswith("the quick")
    assert len(choice.extra["entropy"]) == len(choice.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra_args", "field"),
    [
        ({"entropy": "hot"}, "extra_args.entropy"),
        ({"entropy": 0.0}, "extra_args.entropy"),
        ({"mask": 1}, "extra_args.mask"),
        ({"surprise": True}, "extra_args.surprise"),
    ],
)
def test_what_no_program_has_or_takes_is_refused(llm: LLM, extra_args: Any, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        llm.generate(PROMPT, SamplingParams(extra_args=extra_args), use_tqdm=False)
    assert caught.value.field == field


def test_names_are_strings() -> None:
    with pytest.raises(BadRequest) as caught:
        SamplingParams(extra_args={1: 2})  # type: ignore[dict-item]
    assert caught.value.field == "extra_args"


def test_features_of_every_engine_are_not_replaced() -> None:
    with pytest.raises(ConfigError) as caught:
        register_feature(MASK)
    assert caught.value.field == "name"
