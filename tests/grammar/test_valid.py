"""Whatever is drawn under the masks is valid JSON of its schema, by another library's judgement."""

from __future__ import annotations

import json

import jsonschema
import pytest

from jserve.sampling import StructuredOutputs
from tests.grammar.kit import finish, request, run, text, tokens
from tests.whole.schemas import FORMATS, SCHEMAS

OPTIONS = {
    "n_slots": 32,
    "max_rows": 32,
    "max_decode_rows": 32,
    "max_prefill_rows": 16,
    "max_prefill_tokens": 128,
    "n_pages": 2000,
}


def valid(name: str, seeds: range, max_tokens: int = 300) -> tuple[int, int]:
    """(finished, cut by length) of one schema."""
    schema = SCHEMAS[name]
    spec = StructuredOutputs(json=schema)
    asked = [
        request(f"{name}-{seed}", spec, temperature=1.0, seed=seed, max_tokens=max_tokens)
        for seed in seeds
    ]
    outputs = run(*asked, **OPTIONS)
    checks = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    n_finished = 0
    for item in asked:
        end = finish(outputs, item.id)
        assert end in ("stop", "length"), (name, end)
        if end == "stop":
            n_finished += 1
            checks.validate(json.loads(text(tokens(outputs, item.id))))
    return n_finished, len(asked) - n_finished


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_is_kept(name):
    finished, cut = valid(name, range(3))
    assert finished + cut == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_draws_over_all_schemas_are_valid(capsys):
    finished = cut = 0
    for name in SCHEMAS:
        one, other = valid(name, range(100, 124))
        finished, cut = finished + one, cut + other
    with capsys.disabled():
        print(f"\nfake device: {finished} finished and valid, {cut} cut by length")
    assert finished + cut >= 1000
    assert finished > 0.8 * (finished + cut)
