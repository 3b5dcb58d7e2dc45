"""What clients may ask for: bounds, wording of refusals, the style of JSON, the cache."""

from __future__ import annotations

import contextlib
import json
import time

import msgspec
import numpy as np
import pytest

from jserve.engine.wire import Submit, ToEngine, pack, take_frames
from jserve.errors import BadRequest
from jserve.grammar.compiler import GrammarCompiler
from jserve.grammar.spec import MAX_BYTES, MAX_DEPTH, lowered
from jserve.sampling import StructuredOutputs
from tests.grammar.kit import CITY, compiler, ids, request, thinking


def accepts(spec: StructuredOutputs, said: str) -> bool:
    """Whether the whole of ``said`` satisfies ``spec``, token by token under its masks."""
    matcher = compiler().compile(spec).matcher.deep_copy()
    tokens = ids(said)
    return matcher.try_consume_tokens(list(tokens)) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (StructuredOutputs(json_object=True), '{"a": [1, 2]}', "[1]"),
        (StructuredOutputs(json={"type": "integer"}), "12", "1.5"),
        (StructuredOutputs(json='{"type": "integer"}'), "12", "x"),
        (StructuredOutputs(regex="^[a-c]+$"), "abc", "abd"),
        (StructuredOutputs(regex=r"a\$"), "a$", "a"),
        (StructuredOutputs(choice=("red", 'b"ue')), 'b"ue', "bue"),
        (StructuredOutputs(grammar='start: "x" NUM\nNUM: /[0-9]+/'), "x12", "x"),
        (StructuredOutputs(grammar='root ::= "x" [0-9]+'), "x12", "x"),
        (
            StructuredOutputs(
                structural_tag={
                    "structures": [
                        {
                            "begin": "<f>",
                            "schema": {"type": "object", "required": ["a"]},
                            "end": "</f>",
                        }
                    ],
                    "triggers": ["<f"],
                }
            ),
            'the car <f>{"a": 1}</f> red',
            "the car <f>{}</f>",
        ),
    ],
)
def test_every_kind_accepts_and_refuses(spec, good, bad):
    assert accepts(spec, good)
    assert not accepts(spec, bad)


@pytest.mark.parametrize(
    ("changes", "good", "bad"),
    [
        ({}, '{"a": 1, "b": 2}', '{"a":1,"b":2}'),
        ({"disable_any_whitespace": True}, '{"a":1,"b":2}', '{"a": 1, "b": 2}'),
        ({"whitespace_pattern": "[ ]{0,2}"}, '{ "a":1 ,"b":  2}', '{"a":\n1, "b": 2}'),
    ],
)
def test_white_space_is_that_of_json_dumps_or_as_asked(changes, good, bad):
    spec = StructuredOutputs(json={"type": "object"}, **changes)
    assert accepts(spec, good)
    assert not accepts(spec, bad)


def test_objects_can_be_closed():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert accepts(StructuredOutputs(json=schema), '{"a": 1, "b": 2}')
    closed = StructuredOutputs(json=schema, disable_additional_properties=True)
    assert not accepts(closed, '{"a": 1, "b": 2}')
    assert accepts(closed, '{"a": 1}')
    tags = {"structures": [{"begin": "<", "schema": schema, "end": ">"}], "triggers": ["<"]}
    assert accepts(StructuredOutputs(structural_tag=tags), '<{"a": 1, "b": 2}>')
    closed = StructuredOutputs(structural_tag=tags, disable_additional_properties=True)
    assert not accepts(closed, '<{"a": 1, "b": 2}>')
    assert accepts(closed, '<{"a": 1}>')


@pytest.mark.parametrize("kind", [{"regex": "a"}, {"choice": ("a",)}, {"grammar": 'start: "a"'}])
@pytest.mark.parametrize(
    "option",
    [
        {"whitespace_pattern": " "},
        {"disable_any_whitespace": True},
        {"disable_additional_properties": True},
    ],
)
def test_how_json_is_written_cannot_be_said_where_there_is_none(kind, option):
    with pytest.raises(BadRequest) as caught:
        StructuredOutputs(**kind, **option)
    assert caught.value.field == f"structured_outputs.{next(iter(option))}"
    StructuredOutputs(**kind, **dict.fromkeys(option))


S = {"type": "string"}
REFUSED = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": S},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 2}},
    "not": {"not": S},
    "if": {"if": S, "then": S},
    "$dynamicRef": {"$dynamicRef": "#x"},
    "oneOf": {"oneOf": [S, {"type": "string", "minLength": 3}]},
    "idn-email": {"type": "string", "format": "idn-email"},
    "strin": {"type": "strin"},
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("nested", [False, True])
def test_a_schema_that_cannot_be_enforced_is_refused_by_keyword(name, nested):
    schema = {"type": "object", "properties": {"x": REFUSED[name]}} if nested else REFUSED[name]
    with pytest.raises(BadRequest) as caught:
        compiler().compile(StructuredOutputs(json=schema))
    assert caught.value.field == "structured_outputs.json"
    assert name in caught.value.message
    assert len(caught.value.message) <= 300


@pytest.mark.parametrize("name", ["uniqueItems", "oneOf"])
def test_a_schema_cannot_ask_not_to_be_enforced(name):
    schema = REFUSED[name] | {"x-guidance": {"lenient": True, "coerce_one_of": True}}
    with pytest.raises(BadRequest, match=name):
        compiler().compile(StructuredOutputs(json=schema))
    tags = {"structures": [{"begin": "<", "schema": schema, "end": ">"}], "triggers": ["<"]}
    with pytest.raises(BadRequest, match=name):
        compiler().compile(StructuredOutputs(structural_tag=tags))


def deep(n: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(n):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("spec", "field", "code"),
    [
        ({"json": deep(MAX_DEPTH + 1)}, "json", "grammar_too_large"),
        ({"json": {"enum": list(range(21_000))}}, "json", "grammar_too_large"),
        ({"json": {"title": "x" * MAX_BYTES}}, "json", "grammar_too_large"),
        ({"json": "{" * 5}, "json", "invalid_schema"),
        ({"json": "[1]"}, "json", "invalid_schema"),
        ({"json": {"$ref": "#"}}, "json", "invalid_schema"),
        ({"json": {"$ref": "http://127.0.0.1:1/x"}}, "json", "invalid_schema"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "json", "invalid_schema"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "json", "invalid_schema"),
        ({"regex": "(a"}, "regex", "invalid_schema"),
        ({"json": {}, "whitespace_pattern": "(a"}, "whitespace_pattern", "invalid_schema"),
        ({"regex": "a" * (MAX_BYTES + 1)}, "regex", "grammar_too_large"),
        ({"regex": "\ud800"}, "regex", "invalid_schema"),
        ({"grammar": "start: nowhere"}, "grammar", "invalid_schema"),
        ({"grammar": "root ::= ("}, "grammar", "invalid_schema"),
        ({"choice": tuple("x" * n for n in range(1, 5000))}, "choice", "grammar_too_large"),
        ({"structural_tag": {"structures": []}}, "structural_tag", "invalid_schema"),
        ({"structural_tag": {"structures": [3], "triggers": ["a"]}}, "structural_tag", None),
    ],
)
def test_bombs_and_broken_texts_are_refused_by_field(spec, field, code):
    with pytest.raises(BadRequest) as caught:
        compiler().compile(StructuredOutputs(**spec))
    assert caught.value.field == f"structured_outputs.{field}"
    assert code is None or caught.value.code == code
    assert "passwd" not in caught.value.message or len(caught.value.message) < 200


@pytest.mark.parametrize("regex", ["(a+)+b", "(.*a){25}", "a{1,100000}", "((a{1,99}){1,99}){1,99}"])
def test_regex_bombs_compile_or_are_refused_quickly(regex):
    began = time.monotonic()
    with contextlib.suppress(BadRequest):
        compiler().compile(StructuredOutputs(regex=regex))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"json": {}, "regex": "a"},
        {"regex": 3},
        {"choice": ()},
        {"choice": ("a", "")},
        {"json": 3},
        {"grammar": ["a"]},
        {"structural_tag": 5},
        {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
    ],
)
def test_exactly_one_structure_of_the_right_type(values):
    with pytest.raises(BadRequest) as caught:
        StructuredOutputs(**values)
    assert (caught.value.field or "").startswith("structured_outputs")


def test_the_cache_is_bounded_in_bytes_and_keeps_what_is_used():
    small = GrammarCompiler(compiler().tokenizer, cache_bytes=300_000)
    specs = [StructuredOutputs(regex=f"[a-{c}]x") for c in "bcdefghij"]
    small.compile(specs[0])
    for spec in specs[1:]:
        small.compile(spec)
        small.compile(specs[0])
    assert small.n_cached < 6
    assert small.known(specs[0]) is not None
    assert small.known(specs[1]) is None
    assert small.n_misses == len(specs)


def test_the_wire_carries_what_the_client_wrote():
    asked = request("a", CITY, thinking=thinking(), thinking_token_budget=5)
    (frame,) = take_frames(bytearray(pack(Submit(request=asked))))
    back = msgspec.msgpack.Decoder(ToEngine).decode(frame)
    assert back.request == asked
    assert lowered(back.request.params.structured_outputs) == lowered(CITY)
    choice = StructuredOutputs(choice=("a", "b"))
    (frame,) = take_frames(bytearray(pack(Submit(request=request("b", choice)))))
    assert (
        msgspec.msgpack.Decoder(ToEngine).decode(frame).request.params.structured_outputs == choice
    )


def test_json_is_compact_where_it_says_so():
    assert json.loads(lowered(StructuredOutputs(json={"type": "object"})))
    assert np.count_nonzero(compiler().compile(StructuredOutputs(json_object=True)).mask_W)
