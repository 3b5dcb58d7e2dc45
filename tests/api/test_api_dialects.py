"""Every dialect tells the same answer, streamed as whole, however the engine cuts its output."""

from __future__ import annotations

import asyncio
import copy
import json

from hypothesis import given, settings, strategies as st

from jserve.types import Finish
from tests.api.talk import CHATML, FORMATS, TIME, WEATHER, Script, talking

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = [{"role": "user", "content": "hi"}]
CALLS = {
    "hermes": '<tool_call>\n{"name": "time", "arguments": {"a": "é🙂"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "time", "arguments": {"a": "é🙂"}}, {"name": "f", "arguments": {}}]',
    "llama3": '<|python_tag|>{"name": "time", "parameters": {"a": "é🙂"}}',
}
MORE = {
    "openai": (
        "<|channel|>",
        '<|channel|>commentary to=functions.time<|message|>{"a": "é🙂"}<|call|>',
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>",
        '<｜tool▁call▁begin｜>time<｜tool▁sep｜>{"a": "é🙂"}<｜tool▁call▁end｜>',
    ),
    "cohere_command": (
        "<|START_ACTION|>",
        '<|START_ACTION|>[{"tool_name": "time", "parameters": {"a": "é🙂"}}]<|END_ACTION|>',
    ),
    "llama4_pythonic": ("<|python_start|>", '<|python_start|>[time(a="é🙂")]<|python_end|>'),
}
"""What a template shows of a format, and a call."""
TEMPLATES = FORMATS | {kind: "{# " + sign + " #}" + CHATML for kind, (sign, _) in MORE.items()}
CALLS |= {kind: call for kind, (_, call) in MORE.items()}
THOUGHTS = ("", "<think>\nhm, <b>\n</think>\n\n", "<think></think>", "<think>never ends")


def tools_of(path: str) -> list[dict]:
    functions = [WEATHER["function"], TIME["function"]]
    if path == CHAT:
        return [WEATHER, TIME]
    if path == RESPONSES:
        return [{"type": "function", **f} for f in functions]
    return [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]


def body_of(path: str, calls: bool) -> dict:
    body: dict = {"model": "tiny", "max_tokens": 500, "messages": USER}
    if path == RESPONSES:
        body = {"model": "tiny", "max_output_tokens": 500, "input": USER}
    return body | ({"tools": tools_of(path)} if calls else {})


def plain_chat(message: dict, finish: str, usage: dict) -> dict:
    """A chat answer without what no other dialect has."""
    return {
        "reasoning": message.get("reasoning") or "",
        "content": message.get("content") or "",
        "calls": [
            (c["function"]["name"], c["function"]["arguments"])
            for c in message.get("tool_calls") or []
        ],
        "finish": finish,
        "tokens": (usage["prompt_tokens"], usage["completion_tokens"]),
    }


def chat_whole(body: dict) -> dict:
    (choice,) = body["choices"]
    return plain_chat(choice["message"], choice["finish_reason"], body["usage"])


def chat_stream(events: list) -> dict:
    message: dict = {"content": "", "reasoning": "", "tool_calls": []}
    finish, usage = None, None
    for event in events[:-1]:
        usage = event["usage"] or usage
        for choice in event["choices"]:
            finish = choice["finish_reason"] or finish
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls") or []:
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
                    message["tool_calls"][-1]["function"]["name"] = call["function"]["name"]
                at = message["tool_calls"][call["index"]]["function"]
                at["arguments"] += call["function"]["arguments"]
    assert events[-1] == "[DONE]"
    return plain_chat(message, finish, usage)


def message_stream(events: list) -> dict:
    """Anthropic's accumulation, and the order of its events."""
    message: dict = {}
    open_index, closed = None, 0
    for event in events:
        match event["type"]:
            case "message_start":
                assert not message
                message = copy.deepcopy(event["message"])
                assert message["content"] == []
                assert message["usage"]["output_tokens"] == 0
            case "content_block_start":
                assert open_index is None
                open_index = event["index"]
                assert open_index == closed == len(message["content"])
                message["content"].append(copy.deepcopy(event["content_block"]))
                arguments = ""
            case "content_block_delta":
                assert event["index"] == open_index
                block, delta = message["content"][-1], event["delta"]
                kind = block["type"]
                if kind == "tool_use":
                    assert delta["type"] == "input_json_delta"
                    arguments += delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    assert name == kind or (kind, name) == ("thinking", "signature")
                    block[name] += delta[name]
            case "content_block_stop":
                assert event["index"] == open_index
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = loaded(arguments)
                open_index, closed = None, closed + 1
            case "message_delta":
                assert open_index is None
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case "message_stop":
                assert event is events[-1]
    return message


def loaded(arguments: str) -> dict:
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def anonymous_message(message: dict) -> dict:
    """Without ids, which are fresh in every answer."""
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return message | {"id": "", "content": blocks}


def response_stream(events: list) -> dict:
    """The response of the last event, after its parts were put together from the deltas."""
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1]["response"]
    assert events[-1]["type"] == f"response.{final['status']}"
    items: list[dict] = []
    expected = "added"
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items) - (kind != "output_item.added")
        if kind == "output_item.added":
            assert expected == "added"
            assert event["item"]["status"] == "in_progress"
            items.append({"id": event["item"]["id"], "text": "", "parts": 0})
            expected = "part" if event["item"]["type"] != "function_call" else "delta"
        elif kind == "content_part.added":
            assert expected == "part"
            assert event["part"]["text"] == ""
            expected = "delta"
        elif kind.endswith(".delta"):
            assert expected == "delta"
            assert event["item_id"] == items[-1]["id"]
            assert event["delta"]
            items[-1]["text"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == items[-1]["text"]
            expected = "part done"
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == items[-1]["text"]
            expected = "done"
        elif kind == "content_part.done":
            assert expected == "part done"
            assert event["part"]["text"] == items[-1]["text"]
            expected = "done"
        else:
            assert (kind, expected) == ("output_item.done", "done")
            assert event["item"] == final["output"][len(items) - 1]
            expected = "added"
    assert len(final["output"]) == len(items)
    return final


def anonymous_response(response: dict) -> dict:
    items = [
        {k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]
    ]
    return response | {"id": "", "created_at": 0, "completed_at": 0, "output": items}


def from_message(message: dict) -> dict:
    """What chat would have said."""
    blocks = message["content"]
    finish = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
    usage = message["usage"]
    return {
        "reasoning": "".join(b["thinking"] for b in blocks if b["type"] == "thinking"),
        "content": "".join(b["text"] for b in blocks if b["type"] == "text"),
        "calls": [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"],
        "finish": finish[message["stop_reason"]],
        "tokens": (
            usage["input_tokens"] + usage["cache_read_input_tokens"],
            usage["output_tokens"],
        ),
    }


def from_response(response: dict) -> dict:
    found: dict = {"reasoning": "", "content": "", "calls": []}
    for item in response["output"]:
        if item["type"] == "function_call":
            found["calls"].append((item["name"], item["arguments"]))
        else:
            name = "reasoning" if item["type"] == "reasoning" else "content"
            found[name] += item["content"][0]["text"]
    usage = response["usage"]
    calls = found["calls"] and response["status"] == "completed"
    finish = "length" if response["status"] == "incomplete" else "tool_calls" if calls else "stop"
    return found | {"finish": finish, "tokens": (usage["input_tokens"], usage["output_tokens"])}


@settings(max_examples=50, deadline=None)
@given(
    kind=st.sampled_from(sorted(TEMPLATES)),
    thought=st.sampled_from(THOUGHTS),
    words=st.lists(st.sampled_from(["Hé ", "🙂", " <b>", "\n", "CALL", "[", "{"]), max_size=6),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    end=st.sampled_from([Finish.STOP, Finish.LENGTH]),
    calls=st.booleans(),
    n_cached=st.integers(0, 3),
)
def test_all_dialects_tell_one_answer(kind, thought, words, cuts, end, calls, n_cached):
    parsed = thought + "".join(CALLS[kind] if word == "CALL" else word for word in words)

    async def run():
        script = Script((parsed,))
        script.end, script.n_cached = end, n_cached
        async with talking(script, TEMPLATES[kind]) as srv:

            async def both(path: str, **more) -> tuple[dict, list]:
                body = body_of(path, calls)
                script.cuts = (1000,)
                status, whole, _ = await srv.post(path, body)
                assert status == 200, whole
                script.cuts = tuple(cuts)
                return whole, await srv.events(path, body | more)

            whole, events = await both(CHAT, stream_options={"include_usage": True})
            chat = chat_whole(whole)
            assert chat_stream(events) == chat
            whole, events = await both(MESSAGES)
            assert anonymous_message(message_stream(events)) == anonymous_message(whole)
            message = from_message(whole)
            whole, events = await both(RESPONSES)
            assert anonymous_response(response_stream(events)) == anonymous_response(whole)
            assert from_response(whole) == chat
            chat["calls"] = [(name, loaded(arguments)) for name, arguments in chat["calls"]]
            assert message == chat

    asyncio.run(run())


async def test_events_are_framed_as_each_dialect_has_them():
    async with talking(Script(("red car",))) as srv:
        for path, named, done in (
            (CHAT, False, True),
            (MESSAGES, True, False),
            (RESPONSES, True, False),
        ):
            body = body_of(path, calls=False) | {"stream": True}
            async with srv.http.post(srv.url + path, json=body) as r:
                assert r.headers["Content-Type"] == "text/event-stream; charset=utf-8"
                blocks = (await r.text()).strip().split("\n\n")
            assert (blocks[-1] == "data: [DONE]") is done
            for block in blocks[: -1 if done else None]:
                name, _, data = block.rpartition("\n")
                event = json.loads(data.removeprefix("data: "))
                assert name == (f"event: {event['type']}" if named else "")
