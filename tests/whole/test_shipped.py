"""The model that ships: the same greedy tokens as transformers, in float32, for it and its draft."""

from __future__ import annotations

import pytest

from jserve import LLM, SamplingParams, build

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
