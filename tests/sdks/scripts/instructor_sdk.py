"""instructor: a pydantic model from chat, in the modes that speak OpenAI's fields."""

from __future__ import annotations

import sys

import instructor
import openai
from pydantic import BaseModel, Field

url, model = sys.argv[1:3]


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


for mode in (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON_SCHEMA,
):
    client = instructor.from_openai(
        openai.OpenAI(base_url=url + "/v1", api_key="none", timeout=120), mode=mode
    )
    person = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Anna is 30 years old. Extract name and age."}],
        response_model=Person,
        max_retries=0,
        max_tokens=120,
        temperature=0,
    )
    assert isinstance(person, Person), mode
print("ok")
