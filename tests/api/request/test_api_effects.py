"""No field is taken and forgotten: every applied field of every endpoint, set to something good, changes what
the engine is asked or what the client is told."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from msgspec import structs
from tokenizers import Tokenizer, processors

from jserve.api.http.routes import PUBLIC
from jserve.api.ops.support import endpoints
from jserve.text.tokenizer import TextTokenizer
from jserve.types import Request
from tests.api.fake import CHATML
from tests.api.talk import WEATHER, Script, talking
from tests.grammar.kit import tokenizer

TEMPLATE = (
    "{# <tool_call> #}{{ documents }}{{ reasoning_effort }}"
    + CHATML
    + "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
)
SAID = "<think>\nred\n</think>\n\nthe red car"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
USER = [{"role": "user", "content": "how are you"}]
ASSISTANT = {"role": "assistant", "content": "the red"}
FUNCTION = WEATHER["function"]
FLAT = {"type": "function", **FUNCTION}
INPUT_TOOL = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}
JSON = {"type": "json_schema", "schema": SCHEMA}


@dataclass(frozen=True)
class Good:
    """A value of a field, and what must stand beside it for the value to mean anything."""

    value: Any
    beside: dict[str, Any] = field(default_factory=dict)


SCORED = {"logprobs": True}
CUT = {"truncate_prompt_tokens": 3}
TOOLS = {"tools": [WEATHER]}
GOOD: dict[Any, Good] = {
    "stream": Good(True),
    "priority": Good(5),
    "lane": Good("bulk"),
    "ttft_deadline_ms": Good(60000.0),
    "tpot_deadline_ms": Good(60000.0),
    "deadline_ms": Good(60000.0),
    "cache_salt": Good("s"),
    "cache": Good("c"),
    "session": Good("s"),
    "retain": Good([{"end": 2}]),
    "skip_prefix_cache": Good(True),
    "speculative": Good(False),
    "truncate_prompt_tokens": Good(3),
    "truncation_side": Good("right", CUT),
    "request_id": Good("mine"),
    "temperature": Good(0.5),
    "top_p": Good(0.5),
    "top_k": Good(5),
    "min_p": Good(0.5),
    "presence_penalty": Good(0.5),
    "frequency_penalty": Good(0.5),
    "repetition_penalty": Good(1.5),
    "seed": Good(5),
    "stop": Good(["car"]),
    "stop_token_ids": Good([40]),
    "ignore_eos": Good(True),
    "min_tokens": Good(2),
    "include_stop_str_in_output": Good(True),
    "skip_special_tokens": Good(False),
    "logit_bias": Good({"5": 1.0}),
    "allowed_token_ids": Good([5]),
    "bad_words": Good(["red"]),
    "vllm_xargs": Good({"entropy": [1, 0.5]}),
    "custom_params": Good({"sharpen": {"by": 0.5}}),
    "n": Good(2),
    "max_tokens": Good(7),
    "max_completion_tokens": Good(7),
    "max_output_tokens": Good(7),
    "prompt_logprobs": Good(1),
    "logprob_token_ids": Good([5, 6], SCORED),
    ("/v1/completions", "logprob_token_ids"): Good([5, 6], {"logprobs": 1}),
    "stream_options": Good({"include_usage": True}, {"stream": True}),
    "return_token_ids": Good(True),
    "return_tokens_as_token_ids": Good(True, SCORED),
    ("/v1/completions", "return_tokens_as_token_ids"): Good(True, {"logprobs": 1}),
    "add_special_tokens": Good(False),
    "response_format": Good({"type": "json_object"}),
    "structured_outputs": Good({"regex": "a+"}),
    "regex": Good("a+"),
    "ebnf": Good('root ::= "a"'),
    "grammar": Good('root ::= "a"'),
    "json_schema": Good(SCHEMA),
    "structural_tag": Good({"structures": [{"begin": "<", "schema": {}}], "triggers": ["<"]}),
    "messages": Good([*USER, ASSISTANT, *USER]),
    "logprobs": Good(True),
    ("/v1/completions", "logprobs"): Good(1),
    "top_logprobs": Good(2, SCORED),
    ("/v1/responses", "top_logprobs"): Good(2),
    "tools": Good([WEATHER]),
    ("/v1/responses", "tools"): Good([FLAT]),
    ("/v1/messages", "tools"): Good([INPUT_TOOL]),
    ("/v1/messages/count_tokens", "tools"): Good([INPUT_TOOL]),
    "tool_choice": Good("required", TOOLS),
    ("/v1/responses", "tool_choice"): Good("required", {"tools": [FLAT]}),
    ("/v1/messages", "tool_choice"): Good({"type": "any"}, {"tools": [INPUT_TOOL]}),
    ("/v1/messages/count_tokens", "tool_choice"): Good({"type": "none"}, {"tools": [INPUT_TOOL]}),
    ("/tokenize", "tool_choice"): Good("none", TOOLS),
    "parallel_tool_calls": Good(False, TOOLS),
    ("/v1/responses", "parallel_tool_calls"): Good(False, {"tools": [FLAT]}),
    "documents": Good([{"text": "a"}]),
    "reasoning_effort": Good("low"),
    "chat_template_kwargs": Good({"enable_thinking": False}),
    "add_generation_prompt": Good(False),
    "continue_final_message": Good(True, {"messages": [*USER, ASSISTANT]}),
    "thinking_token_budget": Good(5),
    "include_reasoning": Good(False),
    "prompt": Good("who are you"),
    "echo": Good(True),
    "input": Good("who are you"),
    "instructions": Good("be kind"),
    "text": Good({"format": {"type": "json_object"}}),
    "reasoning": Good({"effort": "low"}),
    "include": Good(["message.output_text.logprobs"]),
    "system": Good("be kind"),
    "thinking": Good({"type": "enabled", "budget_tokens": 5}),
    "output_config": Good({"format": JSON}),
    "stop_sequences": Good(["car"]),
    "query": Good("who"),
    "items": Good(["b"]),
    "label_token_ids": Good([5, 6]),
    "apply_softmax": Good(True, {"label_token_ids": [5, 6]}),
    "item_first": Good(True),
    "name": Good("d"),
    "ttl_s": Good(7.0),
    "return_token_strs": Good(True, {"prompt": "a"}),
    "tokens": Good([41]),
}
"""By field; (endpoint, field) where an endpoint differs."""

EXEMPT = {
    "model": "another name of the same model; a wrong one is refused",
    ("/v1/chat/completions", "add_special_tokens"): "only false is taken, which it is anyway",
    ("/v1/messages", "metadata"): "what it holds is a label",
    ("/v1/messages/count_tokens", "output_config"): "checked; no prompt depends on it",
    ("/v1/responses", "stream_options"): "what it holds is without effect, and listed",
    ("/v1/caches", "cache_salt"): "the engine here keeps no caches: tests/kv/test_handles.py",
    ("/v1/caches", "ttl_s"): "the engine here keeps no caches: tests/api/openai/test_api_caches.py",
    (
        "/v1/caches/{name}",
        "ttl_s",
    ): "the engine here keeps no caches: tests/api/openai/test_api_caches.py",
}
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "how are you", "max_tokens": 60},
    "/v1/responses": {"input": "how are you"},
    "/v1/messages": {"messages": USER, "max_tokens": 60},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/score": {"query": "how", "items": ["a"]},
    "/v1/caches": {"name": "c", "messages": USER},
    "/v1/caches/{name}": {"ttl_s": 5.0},
    "/tokenize": {"messages": USER},
    "/detokenize": {"tokens": [40]},
}
CELLS = [
    (path.partition(" ")[2], name)
    for path, rows in endpoints(PUBLIC).items()
    for name, row in rows.items()
    if row["holds"] == "applied"
]


class Asked(Script):
    """Keeps the last request, scores prompts, and remembers what it was to pin."""

    def __init__(self) -> None:
        super().__init__((SAID,))
        self.asked: Any = None

    async def generate(self, request: Request):
        self.asked = replace(request, id="", arrival=0.0)
        for index in range(request.params.n):
            async for output in super().generate(request):
                scores = self._prompt(request) if output.seed else None
                yield structs.replace(output, index=index, prompt_logprobs=scores)

    async def create(self, request, ttl_s):
        self.asked = replace(request, id="", arrival=0.0)
        return await super().create(request, ttl_s)

    async def handles(self, message):
        names = {message.name, getattr(self.asked, "cache", None), "c", "d"} - {None}
        found = await super().handles(message)
        return [structs.replace(info, name=name) for info in found for name in names]


def with_beginning() -> TextTokenizer:
    """The tokenizer of ``tests.grammar.kit``, whose texts begin with a special token if wished."""
    hf = Tokenizer.from_str(tokenizer().hf.to_str())
    mark = "[CALLS]"
    special = [(mark, hf.token_to_id(mark))]
    hf.post_processor = processors.TemplateProcessing(single=f"{mark} $A", special_tokens=special)
    return TextTokenizer(hf)


def good(path: str, name: str) -> Good:
    return GOOD[path, name] if (path, name) in GOOD else GOOD[name]


def test_every_applied_field_has_a_good_value():
    exempt = [c for c in CELLS if c in EXEMPT or c[1] in EXEMPT]
    missing = [c for c in CELLS if c not in exempt and c not in GOOD and c[1] not in GOOD]
    assert not missing
    known = {*CELLS, *(name for _, name in CELLS)}
    assert set(GOOD) | set(EXEMPT) <= known


@pytest.mark.parametrize("path", BASE)
async def test_every_applied_field_changes_something(path):
    script = Asked()
    async with talking(script, TEMPLATE, text=with_beginning()) as srv:
        for where, name in CELLS:
            if where != path or name in EXEMPT or (path, name) in EXEMPT:
                continue
            chosen = good(path, name)
            before = base_for(path, name) | chosen.beside
            first = await told(srv, script, path, before)
            second = await told(srv, script, path, before | {name: chosen.value})
            assert first != second, (path, name)


def base_for(path: str, name: str) -> dict[str, Any]:
    base = dict(BASE[path])
    plain = {"/tokenize": ("prompt", "add_special_tokens", "return_token_strs")}
    plain["/v1/caches"] = ("prompt", "add_special_tokens")
    if name in plain.get(path, ()):
        del base["messages"]
        base["prompt"] = "how are you"
    return base


async def told(srv, script: Asked, path: str, body: dict[str, Any]) -> tuple[Any, str, str | None]:
    """(the request at the engine, the answer, its id where the client named it)"""
    script.asked = None
    async with srv.http.post(srv.url + path.replace("{name}", "c"), json=body) as r:
        text = await r.text()
        assert r.status == 200, (path, body, text)
        id = r.headers["x-request-id"] if "request_id" in body else None
    text = re.sub(r'"(id|item_id|call_id)":"[^"]*"', "", text)
    return script.asked, re.sub(r'"(created\w*|completed_at)":\d+', "", text), id
