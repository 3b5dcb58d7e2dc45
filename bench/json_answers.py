"""How well the shipped model finishes JSON: ten everyday schemas, three hundred requests.

It owns the schemas and the prompts. A request is good if it ends by itself and its text validates; the requests go
through the real engine with a grammar, at temperature 1, each with a seed of its own.

    python -m bench.json_answers [MODEL_DIR] [--requests 300] [--thinking] [--json FILE]

Exit code 0: at least 95 % are good; 1: fewer.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

from bench import report
from bench.probe import record
from jserve import LLM, SamplingParams
from jserve.sampling import StructuredOutputs

MAX_TOKENS = 300
ENOUGH = 0.95
TEXT, WHOLE, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
FLAG, WORDS = {"type": "boolean"}, {"type": "array", "items": {"type": "string"}}


def fields(_required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """An object with these properties; all are required unless some are named."""
    needed = list(_required or properties)
    return {"type": "object", "properties": properties, "required": needed}


def closed(**properties: Any) -> dict[str, Any]:
    return {**fields(**properties), "additionalProperties": False}


SCHEMAS: dict[str, dict[str, Any]] = {
    "person": closed(name=TEXT, age=WHOLE, city=TEXT),
    "address": closed(street=TEXT, city=TEXT, zip=TEXT, country=TEXT),
    "product": fields(name=TEXT, price=NUMBER, in_stock=FLAG),
    "calendar event": closed(
        title=TEXT, date={"type": "string", "format": "date"}, start=TEXT, location=TEXT
    ),
    "order": closed(
        customer=TEXT,
        items={"type": "array", "items": closed(product=TEXT, quantity=WHOLE, price=NUMBER)},
        total=NUMBER,
    ),
    "movie review": closed(
        movie=TEXT, rating={"enum": ["bad", "fair", "good", "great"]}, summary=TEXT, spoilers=FLAG
    ),
    "settings": fields(
        ("dark_mode", "volume"), dark_mode=FLAG, volume=WHOLE, notifications=FLAG, language=TEXT
    ),
    "user profile": closed(
        id=WHOLE, profile=closed(first_name=TEXT, last_name=TEXT, verified=FLAG), tags=WORDS
    ),
    "contact": closed(name=TEXT, email={"type": "string", "format": "email"}, phone=TEXT),
    "weather report": fields(city=TEXT, temperature=NUMBER, conditions=WORDS, rain=FLAG),
}
TOLD: dict[str, tuple[str, ...]] = {
    "person": (
        "Anna is 34 years old and lives in Oslo.",
        "My brother Ben just turned 12. He lives with us in Leeds.",
        "Sarah, 51, moved from Paris to Rome last year.",
    ),
    "address": (
        "Please send it to 12 Park Lane, Dublin 4021, Ireland.",
        "We live at 7 Mill Road in Ghent, Belgium. The postcode is 9000.",
        "The office is on 88 High Street.",
    ),
    "product": (
        "The red kettle costs 24.99 euros and is in stock.",
        "Our new backpack is sold out. It was 59 dollars.",
        "A set of six mugs for 18.50.",
    ),
    "calendar event": (
        "The concert is on 2026-05-14 at 19:30 in the library.",
        "Lunch with Maria tomorrow at noon in the cafe.",
        "The team meeting moves to Friday at 9 in room 4.",
    ),
    "order": (
        "Tom ordered 3 lamps for 20 euros each and 2 chairs for 45 euros each.",
        "I would like two pizzas and a bottle of water, please. Emma",
        "Send 12 pencils to David Hill.",
    ),
    "movie review": (
        "The Long Winter is a great film. I cried at the end, when the bear dies.",
        "I fell asleep after ten minutes. The Blue Car is just boring.",
        "Star Harbour was fine.",
    ),
    "settings": (
        "Turn the volume down to 3 and use the dark theme.",
        "I don't want any notifications. Set the language to German.",
        "Make it brighter, please.",
    ),
    "user profile": (
        "User 4711 is John Smith. He is verified and likes chess and tennis.",
        "Lucy Brown just signed up.",
        "Please add Omar Khan, id 15, not verified, with the tags new and student.",
    ),
    "contact": (
        "You can reach Nina at nina@example.org or call 555-0142.",
        "Call Mr Baker under 88213, he has no email.",
        "Write to peter.hill@mail.com.",
    ),
    "weather report": (
        "It is 17 degrees and cloudy in Lisbon, with no rain.",
        "Snow and wind in Bergen, minus 4 degrees.",
        "What a lovely sunny day in Cairo!",
    ),
}
WISHES = (
    "Describe a {schema}.",
    "Give me a {schema} as JSON.",
    "Make up a {schema}, please.",
    "I need an example of a {schema}.",
)
UNRELATED = (
    "Hello, how are you today?",
    "What is 12 + 30?",
    "Tom has a red ball. Anna has a blue ball. Who has the red ball?",
    "Write a poem about the sea.",
    "Why is the sky blue?",
    "Translate 'good morning' into French.",
    "The cat sat on the mat.",
    "How do I bake bread at home without an oven?",
)


def prompts() -> list[tuple[str, str]]:
    """(schema's name, what the user says): texts about it, wishes for one, and other things."""
    said = []
    for name in SCHEMAS:
        own = (*TOLD[name], *(wish.format(schema=name) for wish in WISHES), *UNRELATED)
        said += [(name, text) for text in own]
    return said


def fault(schema: dict[str, Any], text: str, finish: str | None) -> str:
    """Why an answer is not good; empty if it is."""
    if finish != "stop":
        return f"ended by {finish}"
    try:
        jsonschema.validate(
            json.loads(text), schema, format_checker=jsonschema.FormatChecker(("date", "email"))
        )
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return ""


def run(model: str, n_requests: int, thinking: bool = False) -> dict[str, Any]:
    """{"good", "requests", "by_schema", "faults", "mean_tokens"} over requests of seeds 0, 1, ..."""
    asked = prompts()
    jobs = [asked[i * 7 % len(asked)] for i in range(n_requests)]
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=MAX_TOKENS,
            seed=i,
            structured_outputs=StructuredOutputs(json=SCHEMAS[name]),
        )
        for i, (name, _) in enumerate(jobs)
    ]
    dialogues = [[{"role": "user", "content": text}] for _, text in jobs]
    with LLM(model, max_num_seqs=16, max_model_len=1024, prompt_logprobs=False) as llm:
        template = {"enable_thinking": thinking}
        outputs = llm.chat(dialogues, params, use_tqdm=False, chat_template_kwargs=template)
    said = [output.outputs[0] for output in outputs]
    faults = [
        fault(SCHEMAS[name], choice.text, choice.finish_reason)
        for (name, _), choice in zip(jobs, said, strict=True)
    ]
    return {
        "requests": n_requests,
        "good": faults.count("") / n_requests,
        "by_schema": _shares(jobs, faults),
        "mean_tokens": round(sum(len(choice.token_ids) for choice in said) / n_requests, 1),
        "faults": [
            {"schema": name, "prompt": text, "fault": found, "said": choice.text[:200]}
            for (name, text), found, choice in zip(jobs, faults, said, strict=True)
            if found
        ],
    }


def _shares(jobs: list[tuple[str, str]], faults: list[str]) -> dict[str, str]:
    good = Counter(name for (name, _), found in zip(jobs, faults, strict=True) if not found)
    count = Counter(name for name, _ in jobs)
    return {name: f"{good[name]}/{count[name]}" for name in SCHEMAS}


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.json_answers", description=__doc__)
    parser.add_argument(
        "model", nargs="?", default="", help="directory; the shipped model if absent"
    )
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument(
        "--thinking", action="store_true", help="let the model think if it wants to"
    )
    parser.add_argument("--json", type=Path, help="result file to write, with every fault")
    args = parser.parse_args()
    found = run(args.model, args.requests, args.thinking)
    if args.json:
        options = {"model": args.model or "jserve-mini", "thinking": args.thinking}
        report.write(record("json_answers", options, [found]), args.json)
    for name, share in found["by_schema"].items():
        print(f"{name:16} {share}")
    print(f"{found['good']:.1%} of {found['requests']} end by themselves and validate")
    print(f"{found['mean_tokens']} tokens each")
    return 0 if found["good"] >= ENOUGH else 1


if __name__ == "__main__":
    raise SystemExit(main())
