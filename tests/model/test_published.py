"""Published config.json files are accepted as they are, and tiny models with their keys are served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jserve import LLM, SamplingParams
from jserve.model.families import ARCHITECTURES, family_for
from jserve.model.hf_text import text_part
from tests.model.published import LAYERS, PUBLISHED, resized

MINI = Path(__file__).parents[2] / "checkpoints" / "jserve-mini"


def test_there_is_one_of_every_architecture() -> None:
    assert set(PUBLISHED) == set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_accepted_as_it_is(architecture: str) -> None:
    config = PUBLISHED[architecture]
    arch = family_for(config).arch(config)
    text = text_part(config)
    assert (text["num_hidden_layers"], text["hidden_size"]) == (arch.L, arch.D)
    assert family_for(config).arch(resized(config)).L == LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("architecture", PUBLISHED)
def test_served_with_dummy_weights(architecture: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(resized(PUBLISHED[architecture])))
    options = {"load_format": "dummy", "tokenizer": str(MINI), "max_model_len": 64}
    small = {"max_num_seqs": 1, "max_num_batched_tokens": 32, "dtype": "float32"}
    with LLM(str(tmp_path), **options, **small) as llm:
        [out] = llm.generate("One, two,", SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(out.outputs[0].token_ids) == 8
