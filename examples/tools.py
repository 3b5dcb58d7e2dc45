"""A tool call and its result: the model says which function it wants, this program runs it.

python examples/tools.py [URL]
"""

import json
import sys
from typing import Any

from openai import OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def main(url: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages: list[Any] = [{"role": "user", "content": "Add 12 and 30."}]
    asked = client.chat.completions.create(
        model="jserve-mini",
        messages=messages,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "add"}},  # or "auto", "required"
        max_tokens=64,
        temperature=0,
    )
    message = asked.choices[0].message
    [call] = message.tool_calls or []
    given = json.loads(call.function.arguments)  # type: ignore[union-attr]
    result = given["a"] + given["b"]
    print(f"add({given['a']}, {given['b']}) = {result}")

    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": str(result)}]
    told = client.chat.completions.create(
        model="jserve-mini", messages=messages, max_tokens=16, temperature=0
    )
    print(told.choices[0].message.content)


if __name__ == "__main__":
    main(*sys.argv[1:])
