"""langchain-openai: invoke, stream, batch, tools, structured output."""

from __future__ import annotations

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

url, model = sys.argv[1:3]
options = {"base_url": url + "/v1", "api_key": "none", "model": model, "max_retries": 0}
chat = ChatOpenAI(**options, temperature=0, max_tokens=80, timeout=120, stream_usage=True)


class Sum(BaseModel):
    """Two numbers."""

    a: int = Field(description="the first")
    b: int = Field(description="the second")


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"clear in {city}"


said = chat.invoke("What is 12 + 30?")
assert said.content
assert said.usage_metadata["output_tokens"] > 0
pieces = list(chat.stream("What is 12 + 30?"))
assert "".join(p.content for p in pieces) == said.content
assert len(chat.batch(["a", "b", "c"])) == 3
assert isinstance(chat.with_structured_output(Sum).invoke("12 + 30"), Sum)
for method in ("json_schema", "function_calling"):
    assert isinstance(chat.with_structured_output(Sum, method=method).invoke("12 + 30"), Sum)
armed = chat.bind_tools([get_weather], tool_choice="any")
asked = HumanMessage("What is the weather in Oslo?")
called = armed.invoke([asked])
assert called.tool_calls[0]["name"] == "get_weather"
told = ToolMessage(
    get_weather.invoke(called.tool_calls[0]["args"]), tool_call_id=called.tool_calls[0]["id"]
)
assert chat.bind_tools([get_weather]).invoke([asked, called, told]) is not None
assert OpenAI(**options, max_tokens=8).invoke("Once upon")
print("ok")
