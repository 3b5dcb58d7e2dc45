"""Multimodal checkpoints of Gemma 3 and Llama 4, as transformers writes them, through both doors: their text is served,
an image is refused by name, experts are counted."""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from jserve import LLM, SamplingParams
from jserve.errors import BadRequest
from tests.model.more_cases import MORE
from tests.whole.conftest import SMALL_OPTIONS
from tests.whole.test_serve import Server

CASES = {"gemma3": "gemma3-of-a-multimodal-one", "llama4": "llama4-of-a-multimodal-one"}
OPTIONS = SMALL_OPTIONS | {"load_format": "auto", "dtype": "float32"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
DIALOGUE = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]}]
PROMPT = "the quick brown fox"
N = 24


@pytest.fixture(scope="module", params=CASES)
def written(request: Any, tiny_dir: Path, tmp_path_factory: Any) -> tuple[str, Path, Any]:
    """(family, directory, transformers' model)."""
    from tests.model import hf

    architecture, switches = MORE[CASES[request.param]]
    sizes = {"vocab_size": 320, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    model, _ = hf.tiny(architecture, **sizes | {"max_position_embeddings": 256} | switches)
    path = tmp_path_factory.mktemp("multimodal") / request.param
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_dir / name, path)
    return request.param, path, model


def greedy(model: Any, ids: list[int]) -> list[int]:
    from tests.model import hf

    return hf.greedy(model, ids, N)[1]


@pytest.mark.slow
def test_the_text_is_served_and_an_image_refused(written: tuple[str, Path, Any]) -> None:
    _, path, model = written
    asked = SamplingParams(temperature=0, max_tokens=N, ignore_eos=True)
    with LLM(str(path), **OPTIONS) as llm:
        [out] = llm.generate(PROMPT, asked, use_tqdm=False)
        assert out.outputs[0].token_ids == greedy(model, out.prompt_token_ids)
        with pytest.raises(BadRequest, match="image_url") as caught:
            llm.chat([DIALOGUE], asked)
        assert caught.value.field == "messages[0].content[1]"
        [said] = llm.chat([[{"role": "user", "content": "What is it?"}]], asked, use_tqdm=False)
        assert said.outputs[0].token_ids == greedy(model, said.prompt_token_ids)


@pytest.mark.slow
def test_the_same_over_http_with_the_load_of_experts(
    written: tuple[str, Path, Any], tmp_path: Path
) -> None:
    family, path, model = written
    more = {"expert_load_metrics": True, "eplb_step_interval": 4} if family == "llama4" else {}
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    server = Server(path, tmp_path / "log", **OPTIONS | {"compile_cache": cache} | more)
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        body = {"ignore_eos": True, "return_token_ids": True}
        asked: Any = {"model": family, "temperature": 0, "max_tokens": N, "extra_body": body}
        choice: Any = client.completions.create(prompt=PROMPT, **asked).choices[0]
        assert choice.token_ids == greedy(model, choice.prompt_token_ids)
        with pytest.raises(openai.BadRequestError, match="image_url") as caught:
            client.chat.completions.create(messages=DIALOGUE, **asked)
        assert caught.value.param == "messages[0].content[1]"
        check_experts(server.url, counted=bool(more))
    finally:
        assert server.stop() == 0


def check_experts(url: str, *, counted: bool) -> None:
    metrics = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
    told = json.load(urllib.request.urlopen(f"{url}/v1/dashboard", timeout=30))["experts"]
    assert ("jserve:expert_load_total" in metrics) == counted
    assert (told is not None) == counted
    if counted:
        assert 0 < told["hottest"] <= 1 <= told["fullest"] <= told["worst"]
        assert (
            f'jserve:expert_load_hottest_share{{model_name="llama4"}} {told["hottest"]}' in metrics
        )
