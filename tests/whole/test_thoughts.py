"""Whoever asks for a structure gets one: it makes no model think, and a thought leaves it room.

The shipped model thinks before sums and answers most else at once. What it does is compared with what it
does without the structure, so that other weights change nothing here.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import httpx
import jsonschema
import pytest

from jserve import LLM, SamplingParams, build
from jserve.outputs import RequestOutput
from jserve.sampling import StructuredOutputs
from tests.whole.test_serve import Server
from tests.whole.test_structured import SHIPPED

SHORT = "You are a helpful AI assistant that gives a short answer."
PROMPTS = [
    [
        {"role": "system", "content": SHORT},
        {"role": "user", "content": "What is the capital of Bulgaria?"},
    ],
    [{"role": "user", "content": "Hello! Who are you?"}],
    [{"role": "user", "content": "Tell me about the red bicycle."}],
    [{"role": "user", "content": "What is 47 + 38?"}],
    [{"role": "user", "content": "What is 12 + 30?"}],
]
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "n"],
    "additionalProperties": False,
}
STRUCTURES = [
    StructuredOutputs(json=CITY),
    StructuredOutputs(json_object=True),
    StructuredOutputs(regex="[A-Z][a-z]{3,9}"),
    StructuredOutputs(choice=("Sofia", "Oslo", "85")),
    StructuredOutputs(grammar='root ::= "yes" | "no"'),
    StructuredOutputs(
        structural_tag={
            "structures": [{"begin": "<tool_call>", "schema": CITY, "end": "</tool_call>"}],
            "triggers": ["<tool_call>"],
        }
    ),
]
DRAWS = [(0.0, None), *((1.0, seed) for seed in range(6))]


@pytest.fixture(scope="module")
def llm():
    with LLM(str(build.shipped()), **SHIPPED) as made:
        yield made


def answers(llm: LLM, max_tokens: int, **params: Any) -> list[RequestOutput]:
    """Of every prompt at every draw."""
    every = [(p, t, seed) for p in PROMPTS for t, seed in DRAWS]
    asked = [
        SamplingParams(temperature=t, seed=seed, max_tokens=max_tokens, **params)
        for _, t, seed in every
    ]
    return llm.chat([p for p, _, _ in every], asked, use_tqdm=False)


@pytest.fixture(scope="module")
def free(llm: LLM) -> list[list[int]]:
    """What is said without a structure: some of it begins with a thought, some does not."""
    said = [list(out.outputs[0].token_ids) for out in answers(llm, 60)]
    assert {begins(llm, ids) for ids in said} == {True, False}, "one of the two is not judged below"
    return said


def begins(llm: LLM, ids: list[int]) -> bool:
    return ids[:1] == [tag(llm, "<think>")]


def tag(llm: LLM, text: str) -> int:
    (found,) = llm.get_tokenizer().encode(text, add_special_tokens=False)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=() if spec.json or spec.choice else pytest.mark.slow)
        for spec in STRUCTURES
    ],
    ids=lambda spec: spec.given[0],
)
def test_a_structure_changes_no_thought_and_begins_none(llm: LLM, free, spec) -> None:
    close, most = tag(llm, "</think>"), 60
    for plain, out in zip(free, answers(llm, most, structured_outputs=spec), strict=True):
        said = list(out.outputs[0].token_ids)
        assert begins(llm, said) == begins(llm, plain)
        if begins(llm, said):
            n = said.index(close)
            assert n < most // 2, "the other half is the structure's"
            # A thought that was cut ends with a line break of ours.
            assert said[: n - 1] == plain[: n - 1]
            said = said[n + 1 :]
        content = llm.get_tokenizer().decode(said).strip()
        assert content
        if spec.choice or spec.grammar:
            assert content in (spec.choice or ("yes", "no"))
        if spec.json and out.outputs[0].finish_reason == "stop":
            jsonschema.validate(json.loads(content), CITY)
        if spec.regex:
            assert re.fullmatch(spec.regex, content)
        if spec.json_object:
            assert content.startswith("{")


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0, 1, 5, 12])
def test_a_thought_that_is_cut_has_exactly_its_budget(llm: LLM, free, budget) -> None:
    close = tag(llm, "</think>")
    n_cut = 0
    for plain, out in zip(free, answers(llm, 60, thinking_token_budget=budget), strict=True):
        said = list(out.outputs[0].token_ids)
        assert begins(llm, said) == begins(llm, plain)
        if begins(llm, said):
            n = said.index(close) - 1
            n_drawn = max(0, budget - 1)
            assert n <= budget
            assert said[: 1 + min(n, n_drawn)] == plain[: 1 + min(n, n_drawn)]
            n_cut += n == budget
    assert n_cut


FORMAT = {"type": "json_schema", "schema": CITY, "name": "c"}
FUNCTION = {"name": "answer", "description": "Answer.", "parameters": CITY}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "answer"}}
ASKED: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": NAMED},
    ],
    "/v1/responses": [
        {"text": {"format": FORMAT}},
        {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    ],
    "/v1/messages": [
        {"output_config": {"format": {"type": "json_schema", "schema": CITY}}},
        {
            "tools": [{"name": "answer", "input_schema": CITY}],
            "tool_choice": {"type": "any"},
        },
    ],
}


def asked(path: str, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    *system, user = messages
    if path == "/v1/chat/completions":
        return {"messages": messages, "max_tokens": 100, **fields}
    said = system[0]["content"] if system else None
    if path == "/v1/responses":
        return {"input": user["content"], "instructions": said, "max_output_tokens": 100, **fields}
    head = {"system": said} if said else {}
    return {"messages": [user], **head, "max_tokens": 100, **fields}


def n_thought(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    details = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    return details.get("reasoning_tokens", 0) + details.get("thinking_tokens", 0)


def structures_of(answer: dict[str, Any]) -> list[Any]:
    """What of the answer has the structure: content that is JSON, arguments of calls."""
    if "choices" in answer:
        message = answer["choices"][0]["message"]
        calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
        return [json.loads(text) for text in calls or [message["content"]]]
    parts = answer.get("output") or answer["content"]
    found = [part["input"] for part in parts if part["type"] == "tool_use"]
    texts = [part["arguments"] for part in parts if part["type"] == "function_call"]
    texts += [part["text"] for part in parts if part["type"] == "text"]
    for part in parts:
        if part["type"] == "message":
            texts += [inner["text"] for inner in part["content"]]
    return found + [json.loads(text) for text in texts]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_dialect_gives_the_structure(tmp_path) -> None:
    """Also where the model is not asked for a sum and would not have thought."""
    server = Server(build.shipped(), tmp_path / "log", **SHIPPED)
    try:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            n_at_once = 0
            for path, messages, t in itertools.product(ASKED, (PROMPTS[0], PROMPTS[3]), (0.0, 1.0)):
                for fields in ({}, *ASKED[path]):
                    body = asked(path, messages, temperature=t, seed=3, **fields)
                    body["model"] = build.shipped().name
                    done = http.post(path, json=body)
                    assert done.status_code == 200, done.text
                    answer = done.json()
                    n = n_thought(answer)
                    if not fields:
                        thinks, n_at_once = n > 0, n_at_once + (n == 0)
                    elif "tools" not in fields:  # tools make another prompt
                        assert (n > 0) == thinks, (path, fields, done.text)
                    if fields:
                        assert n < 50, "half of the tokens are the structure's"
                        if {"type": "json_object"} in fields.values():  # it may be cut anywhere
                            assert answer["choices"][0]["message"]["content"].startswith("{")
                        else:
                            jsonschema.validate(structures_of(answer)[0], CITY)
            assert n_at_once, "every question was thought about"
            text = {"model": build.shipped().name, "prompt": "JSON:", "max_tokens": 100}
            done = http.post("/v1/completions", json=text | ASKED["/v1/chat/completions"][1])
            jsonschema.validate(json.loads(done.json()["choices"][0]["text"]), CITY)
    finally:
        server.stop()
