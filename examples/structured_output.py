"""An answer that is JSON of a given schema, whatever the model would have written.

python examples/structured_output.py [URL]
"""

import json
import sys

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Lima", "Kyoto"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def main(url: str = "http://127.0.0.1:8000") -> None:
    answer = OpenAI(base_url=f"{url}/v1", api_key="none").chat.completions.create(
        model="jserve-mini",
        messages=[{"role": "user", "content": "Plan a trip."}],
        response_format={"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}},
        max_tokens=64,
        temperature=0,
    )
    trip = json.loads(answer.choices[0].message.content or "")
    print(f"{trip['days']} days in {trip['city']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
