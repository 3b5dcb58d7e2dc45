"""litellm as a client of an OpenAI-style server: whole, streamed, tools, text completion."""

from __future__ import annotations

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

url, model = sys.argv[1:3]
options = {"api_base": url + "/v1", "api_key": "none", "timeout": 120, "num_retries": 0}
USER = [{"role": "user", "content": "What is 12 + 30?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
        },
    },
}
for provider in ("openai", "hosted_vllm"):
    name = f"{provider}/{model}"
    whole = litellm.completion(name, USER, temperature=0, max_tokens=200, **options)
    text = whole.choices[0].message.content
    assert text
    stream = litellm.completion(name, USER, temperature=0, max_tokens=200, stream=True, **options)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == text
    called = litellm.completion(
        name, USER, tools=[TOOL], tool_choice="required", max_tokens=120, **options
    )
    assert called.choices[0].message.tool_calls
done = litellm.text_completion(
    prompt="Once upon", model=f"text-completion-openai/{model}", max_tokens=8, **options
)
assert done.choices[0].text
try:
    litellm.completion(f"openai/{model}", USER, temperature=9, **options)
except litellm.BadRequestError:
    pass
else:
    raise AssertionError("temperature 9 was accepted")
print("ok")
