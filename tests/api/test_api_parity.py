"""A stream adds up to the whole answer, member by member: for every number of choices and every field that
shows something."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from hypothesis import given, settings, strategies as st

from tests.api.talk import FORMATS, TIME, WEATHER, Script, talking
from tests.grammar.kit import tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CALL = '<tool_call>\n{"name": "%s", "arguments": {"city": "Paris"}}\n</tool_call>'
SAID = (
    "red car",
    "<think>\nblue? 🙂\n</think>\n\nthe house",
    f"so: {CALL % 'time'}\n{CALL % 'get_weather'}",
    f"<think>\nhm\n</think>\n\n{CALL % 'get_weather'}",
    "",
)
PASSING = {"id", "created", "object"}


class Choices(Script):
    """Says one text per choice, an output of each in turn; scores prompts."""

    async def generate(self, request):
        runs = [self.one(request, index) for index in range(request.params.n)]
        while runs:
            for run in list(runs):
                output = await anext(run, None)
                if output is None:
                    runs.remove(run)
                else:
                    yield output

    async def one(self, request, index):
        self.records.clear()  # the text to come is the first of ``texts``
        texts, first = self.texts, True
        self.texts = texts[index % len(texts) :]
        run = super().generate(request)
        async for output in run:
            scores = self._prompt(request) if first else None
            self.texts = texts
            yield msgspec.structs.replace(
                output, index=index, seed=7 + index if first else None, prompt_logprobs=scores
            )
            first = False


def grown(old: Any, new: Any) -> Any:
    """``old`` with what ``new`` adds to it."""
    if old is None:
        return new
    if new is None:
        return old
    if isinstance(old, dict):
        return old | {name: grown(old.get(name), value) for name, value in new.items()}
    return old + new


def without_null(value: Any) -> Any:
    """Without null: a chunk leaves out what it has nothing to say about."""
    if isinstance(value, dict):
        return {name: without_null(v) for name, v in value.items() if v is not None}
    return [without_null(v) for v in value] if isinstance(value, list) else value


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of the chunks, in the form of the whole answer."""
    choices: dict[int, dict[str, Any]] = {}
    answer: dict[str, Any] = {}
    for event in events:
        for choice in event.get("choices", []):
            mine = choices.setdefault(choice["index"], {})
            for name, value in choice.items():
                if name == "delta":
                    add_delta(mine.setdefault("message", {}), value)
                elif name in ("text", "logprobs", "token_ids"):
                    mine[name] = grown(mine.get(name), value)
                elif name == "weight_versions":
                    mine[name] = joined(mine.get(name, []), value)
                elif value is not None or name not in mine:
                    mine[name] = value
        rest = {k: v for k, v in event.items() if k not in ("choices", *PASSING)}
        answer |= {k: v for k, v in rest.items() if v is not None or k not in answer}
    return answer | {"choices": [choices[i] for i in sorted(choices)]}


def joined(spans: list[dict[str, Any]], more: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Spans of one version after the other as one."""
    spans = [*spans]
    for span in more:
        if spans and spans[-1]["version"] == span["version"]:
            assert spans[-1]["end"] == span["start"]
            span = spans.pop() | {"end": span["end"]}
        spans.append(span)
    return spans


def add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for step in delta.pop("tool_calls", []):
        calls = message.setdefault("tool_calls", [])
        if step["index"] == len(calls):
            calls.append({"function": {}})
        call = calls[step["index"]]
        call["function"] = grown(call["function"], step["function"])
        call["type"] = step.get("type", call.get("type"))
    for name, value in delta.items():
        message[name] = value if name == "role" else grown(message.get(name), value)


def bare(whole: dict[str, Any]) -> dict[str, Any]:
    """The whole answer without what differs from one answer to the next."""
    answer = {name: value for name, value in whole.items() if name not in PASSING}
    for choice in answer["choices"]:
        message = choice.get("message", {})
        for call in message.get("tool_calls", []):
            assert call.pop("id")
        if message:
            assert message.pop("refusal") is None
            message["content"] = message["content"] or ""
    return answer


shown = st.fixed_dictionaries(
    {
        "n": st.integers(1, 3),
        "return_token_ids": st.booleans(),
        "return_tokens_as_token_ids": st.booleans(),
        "stop": st.sampled_from([None, ["car"], ["zz", "h"]]),
        "include_stop_str_in_output": st.booleans(),
        "seed": st.just(7),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    fields=shown,
    texts=st.lists(st.sampled_from(SAID), min_size=3, max_size=3),
    chunk=st.sampled_from([1, 2, 5, 100]),
    top=st.sampled_from([None, 0, 2]),
    tools=st.booleans(),
    reasoning=st.booleans(),
)
def test_a_chat_adds_up(fields, texts, chunk, top, tools, reasoning):
    asked = fields | {"messages": [{"role": "user", "content": "hi"}]}
    asked |= {} if top is None else {"logprobs": True, "top_logprobs": top}
    asked |= {"tools": [WEATHER, TIME]} if tools else {}
    asked |= {} if reasoning else {"include_reasoning": False}
    whole, events = asyncio.run(both(CHAT, asked, texts, chunk))
    told = added_up(events)
    for choice in told["choices"]:
        choice["message"].setdefault("content", "")
    assert without_null(told) == without_null(bare(whole))
    assert len(told["choices"]) == fields["n"]


@settings(max_examples=40, deadline=None)
@given(
    fields=shown,
    texts=st.lists(st.sampled_from(SAID), min_size=3, max_size=3),
    chunk=st.sampled_from([1, 2, 5, 100]),
    prompts=st.sampled_from(["the red", ["the", "car"], [5, 6, 7], [[5, 6], [7]]]),
    top=st.sampled_from([None, 0, 2]),
    echo=st.booleans(),
    length=st.sampled_from([0, 1, 400]),
)
def test_a_text_adds_up(fields, texts, chunk, prompts, top, echo, length):
    asked = fields | {"prompt": prompts, "logprobs": top, "echo": echo}
    asked["max_tokens"] = length if echo else max(length, 1)
    whole, events = asyncio.run(both(TEXT, asked, texts, chunk))
    told = added_up(events)
    assert without_null(told) == without_null(bare(whole))
    for choice in told["choices"]:
        if top is not None:
            sizes = {len(column) for column in choice["logprobs"].values()}
            assert len(sizes) == 1
        if echo and top is not None:
            assert choice["logprobs"]["token_logprobs"][0] is None
        if echo and isinstance(prompts, str):
            assert choice["text"].startswith(prompts)


async def both(path: str, asked: dict[str, Any], texts: list[str], chunk: int):
    script = Choices(tuple(texts))
    script.chunk = chunk
    async with talking(script, FORMATS["hermes"]) as srv:
        status, whole, _ = await srv.post(path, asked)
        assert status == 200, whole
        events = await srv.events(path, asked | {"stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    return whole, events[:-1]


async def test_an_echo_begins_with_the_named_cache_it_stands_behind():
    head = tuple(tokenizer().encode("the red house", add_special_tokens=False))
    async with talking(Script(("!",))) as srv:
        srv.server.front.prepare.book.made("", "c", head, 60.0)
        asked = {"prompt": " and car", "cache": "c", "echo": True, "logprobs": 0}
        _, body, _ = await srv.post(TEXT, asked)
    (choice,) = body["choices"]
    assert choice["text"] == "the red house and car!"
    assert "".join(choice["logprobs"]["tokens"]).startswith("the red house and car")
