"""The model that ships: the same greedy tokens as transformers, in float32, for it and its draft."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jserve import LLM, SamplingParams, build
from jserve.sampling import StructuredOutputs
from jserve.types import Request

PROMPTS = [
    [{"role": "user", "content": "Hello! Who are you?"}],
    [{"role": "user", "content": "What is 12 + 30?"}],
    [
        {"role": "system", "content": "You are Ada, a helpful assistant."},
        {
            "role": "user",
            "content": "Mira lives in Oslo and has a red bicycle. Where does Mira live?",
        },
    ],
]
OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "max_model_len": 512,
    "prompt_logprobs": False,
    "compile_cache": "",
}


@pytest.mark.slow
def test_kv_of_8_bits_moves_the_shipped_model_little() -> None:
    """What it says greedily, and how likely it finds that: in bf16, over both ways to keep KV."""
    options: dict = OPTIONS | {"dtype": "bfloat16", "prompt_logprobs": True}
    ask, score = (SamplingParams(temperature=0, max_tokens=n) for n in (48, 1))
    said, likely, texts = [], [], []
    for kept in ("auto", "fp8_e4m3"):
        with LLM(kv_cache_dtype=kept, **options) as llm:
            answers = llm.chat(PROMPTS, ask)
            said.append([out.outputs[0].token_ids for out in answers])
            texts = texts or [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in answers]
            scored = llm.generate(texts, replace(score, prompt_logprobs=0))
            found = [
                entry[token].logprob
                for out in scored
                for token, entry in zip(
                    out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True
                )
            ]
            likely.append(np.array(found))
    assert sum(a == b for a, b in zip(*said, strict=True)) >= 2
    assert 1e-4 < np.abs(likely[0] - likely[1]).mean() < 0.05
    assert np.exp(-likely[1].mean()) == pytest.approx(np.exp(-likely[0].mean()), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jserve-mini", "jserve-mini-draft"])
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = str(build.shipped(name))
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    params = SamplingParams(temperature=0, max_tokens=48)
    with LLM(directory, **OPTIONS) as llm:
        outputs = llm.chat(PROMPTS, params)
        for messages, out in zip(PROMPTS, outputs, strict=True):
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            assert out.prompt_token_ids == ids
            told = model.generate(
                torch.tensor([ids]), max_new_tokens=48, do_sample=False, pad_token_id=0
            )[0, len(ids) :].tolist()
            got = out.outputs[0].token_ids
            assert got == told[: len(got)]
            assert len(told) - len(got) <= 1  # transformers keeps the end-of-turn token


@pytest.mark.slow
def test_an_answer_goes_on_behind_any_of_its_tokens() -> None:
    """In float32, as another engine would after the first one died, with what depends on the tokens said."""
    asked = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.95, "seed": 3, "logprobs": 2},
        {"temperature": 0.8, "seed": 4, "presence_penalty": 0.6, "repetition_penalty": 1.1},
        {
            "temperature": 1.0,
            "seed": 5,
            "structured_outputs": StructuredOutputs(regex="(yes|no), [a-z ]{5,40}"),
        },
        {"temperature": 1.0, "seed": 6, "thinking_token_budget": 9},
    ]
    with LLM(**OPTIONS) as llm:
        for fields in asked:
            params = SamplingParams(max_tokens=32, **fields)
            job = llm._prompts.request(llm._prompts.dialogue(PROMPTS[1], {}), params)
            whole = _said(llm, job.request)
            for n in range(0, len(whole), 5):
                again = replace(job.request, attempt=1, said=(tuple(whole[:n]),))
                assert [*whole[:n], *_said(llm, again)] == whole, f"{fields}, cut at {n}"


def _said(llm: LLM, request: Request) -> list[int]:
    llm._engine.submit(request)
    return [token for out in llm._engine.drain() for token in out.token_ids]
