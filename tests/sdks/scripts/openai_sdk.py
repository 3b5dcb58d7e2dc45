"""The openai SDK (2.x and 3.x): chat, stream, tools, structured output, completions, errors, responses."""

from __future__ import annotations

import json
import sys

import openai
from pydantic import BaseModel

url, model = sys.argv[1:3]
client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)
USER = [{"role": "user", "content": "What is 12 + 30?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Sum(BaseModel):
    a: int
    b: int


assert [m.id for m in client.models.list()] == [model]
assert client.models.retrieve(model).id == model

whole = client.chat.completions.create(model=model, messages=USER, temperature=0, max_tokens=200)
text = whole.choices[0].message.content
assert text
assert whole.choices[0].finish_reason == "stop"
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

pieces, usage, ends = [], None, []
for chunk in client.chat.completions.create(
    model=model,
    messages=USER,
    temperature=0,
    max_tokens=200,
    stream=True,
    stream_options={"include_usage": True},
):
    usage = chunk.usage or usage
    for choice in chunk.choices:
        pieces.append(choice.delta.content or "")
        ends += [choice.finish_reason] if choice.finish_reason else []
assert "".join(pieces) == text
assert ends == ["stop"]
assert usage.completion_tokens == whole.usage.completion_tokens

with client.chat.completions.stream(
    model=model, messages=USER, temperature=0, max_tokens=200
) as stream:
    final = stream.get_final_completion()
assert final.choices[0].message.content == text

scored = client.chat.completions.create(
    model=model, messages=USER, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3, n=2
)
assert len(scored.choices) == 2
entry = scored.choices[0].logprobs.content[0]
assert len(entry.top_logprobs) == 3
assert bytes(entry.bytes).decode() == entry.token

parsed = client.chat.completions.parse(
    model=model, messages=USER, response_format=Sum, max_tokens=80, temperature=0
)
assert isinstance(parsed.choices[0].message.parsed, Sum)

asked = {
    "model": model,
    "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
    "tools": [WEATHER],
    "max_tokens": 120,
    "temperature": 0,
}
called = client.chat.completions.create(**asked, tool_choice="required")
assert called.choices[0].finish_reason == "tool_calls"
(call, *_) = called.choices[0].message.tool_calls
assert set(json.loads(call.function.arguments)) == {"city"}
with client.chat.completions.stream(**asked, tool_choice="required") as stream:
    streamed = stream.get_final_completion()
again = streamed.choices[0].message.tool_calls[0].function
assert (again.name, again.arguments) == (call.function.name, call.function.arguments)
answered = client.chat.completions.create(
    **{
        **asked,
        "messages": [
            *asked["messages"],
            called.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear"}'},
        ],
    }
)
assert answered.choices[0].finish_reason in ("stop", "length", "tool_calls")

done = client.completions.create(
    model=model, prompt=["a", "b"], max_tokens=4, logprobs=2, echo=True, temperature=0
)
assert [c.index for c in done.choices] == [0, 1]
assert done.choices[0].logprobs.token_logprobs[0] is None

for wrong, kind in (
    ({"model": "gpt-9"}, openai.NotFoundError),
    ({"temperature": 9}, openai.BadRequestError),
    ({"max_tokens": 10**9}, openai.BadRequestError),
):
    try:
        client.chat.completions.create(**{"model": model, "messages": USER, **wrong})
    except kind as error:
        assert error.body["message"]  # noqa: PT017
        assert error.request_id  # noqa: PT017
    else:
        raise AssertionError(f"{wrong} was accepted")

left = client.chat.completions.create(model=model, messages=USER, stream=True, max_tokens=500)
next(iter(left))
left.close()

QUESTION = {"model": model, "input": "What is 12 + 30?", "temperature": 0}
said = client.responses.create(**QUESTION, max_output_tokens=200)
assert said.status == "completed"
assert said.output_text == text
assert said.incomplete_details is None
with client.responses.stream(**QUESTION, max_output_tokens=200) as events:
    kinds = [event.type for event in events]
    streamed = events.get_final_response()
assert kinds[0] == "response.created"
assert kinds[-1] == "response.completed"
assert streamed.output_text == text
assert streamed.usage.output_tokens == said.usage.output_tokens

# An answer that is cut is not "completed": the SDK's ``get_final_response`` knows no other end, so
# its users read the last event.
cut = client.responses.create(**QUESTION, max_output_tokens=3)
assert cut.status == "incomplete"
assert cut.incomplete_details.reason == "max_output_tokens"
assert cut.usage.output_tokens == 3
with client.responses.stream(**QUESTION, max_output_tokens=3) as events:
    *_, last = events
assert last.type == "response.incomplete"
assert last.response.incomplete_details.reason == "max_output_tokens"
assert last.response.output_text == cut.output_text
assert last.response.usage.output_tokens == 3
print("ok", openai.__version__)
