"""The anthropic SDK: messages, stream, tools, count_tokens, errors."""

from __future__ import annotations

import sys

import anthropic

url, model = sys.argv[1:3]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
USER = [{"role": "user", "content": "What is 12 + 30?"}]

whole = client.messages.create(
    model=model,
    messages=USER,
    max_tokens=200,
    extra_body={"temperature": 0},
    system="You are terse.",
)
(block, *_) = [b for b in whole.content if b.type == "text"]
assert whole.role == "assistant"
assert whole.stop_reason in ("end_turn", "max_tokens")
assert whole.usage.output_tokens > 0
with client.messages.stream(
    model=model,
    messages=USER,
    max_tokens=200,
    extra_body={"temperature": 0},
    system="You are terse.",
) as stream:
    streamed = "".join(stream.text_stream)
    final = stream.get_final_message()
assert streamed == block.text
assert final.usage.output_tokens == whole.usage.output_tokens
assert client.messages.count_tokens(model=model, messages=USER).input_tokens > 0
called = client.messages.create(
    model=model,
    messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
    max_tokens=120,
    extra_body={"temperature": 0},
    tools=[
        {
            "name": "get_weather",
            "description": "Get the weather in a city.",
            "input_schema": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 30}},
                "required": ["city"],
            },
        }
    ],
    tool_choice={"type": "any"},
)
assert called.stop_reason == "tool_use"
assert any(b.type == "tool_use" and "city" in b.input for b in called.content)
try:
    client.messages.create(model=model, messages=USER, max_tokens=4, extra_body={"temperature": 9})
except anthropic.BadRequestError as error:
    assert error.body["error"]["message"]  # noqa: PT017
else:
    raise AssertionError("temperature 9 was accepted")
print("ok", anthropic.__version__)
