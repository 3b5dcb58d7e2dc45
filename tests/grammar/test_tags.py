"""Structural tags of today: every type of format allows what it says, and nothing else."""

from __future__ import annotations

import json

import pytest

from jserve.errors import BadRequest
from jserve.grammar.compiler import GrammarCompiler
from jserve.sampling import StructuredOutputs
from tests.grammar.kit import compiler
from tests.grammar.test_spec import accepts

INT = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}


def text(value: str) -> dict:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: dict, end: str | list[str]) -> dict:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def spec(format: dict) -> StructuredOutputs:
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": format})


CALLS = {
    "triggers": ["<f=", "<g="],
    "tags": [tag("<f=a>", INT, "</f>"), tag("<f=b>", ANY, "</f>"), tag("<g=>", text("x"), "</g>")],
}
SEPARATED = {"tags": [tag("[", INT, "]"), tag("(", text("a"), ")")], "separator": ","}

CASES = [
    (text('a"b\n/'), ['a"b\n/'], ["", "a", 'a"b\n/ ']),
    (INT, ["12"], ["", "a", "1 2"]),
    ({"type": "json_schema", "json_schema": True}, ['{"a": 1}', "3"], ["x"]),
    ({"type": "regex", "pattern": "^a/b[0-9]{2}\\/$"}, ["a/b12/"], ["a/b1/", "a/b12"]),
    ({"type": "grammar", "grammar": 'root ::= x "!"\nx ::= "a" | "{" x "}"'}, ["{{a}}!"], ["{a!"]),
    (ANY, ["", "any <f=a> thing\n"], []),
    ({**ANY, "excludes": ["<no>", "//"]}, ["", "<n o> /"], ["a <no>", "a//b"]),
    ({"type": "sequence", "elements": [text("A: "), INT, ANY]}, ["A: 1 rest"], ["1", "A: x"]),
    ({"type": "or", "elements": [text("yes"), INT]}, ["yes", "7"], ["no", "yes7"]),
    ({"type": "optional", "content": text("a")}, ["", "a"], ["aa"]),
    ({"type": "star", "content": text("ab")}, ["", "abab"], ["aba"]),
    ({"type": "plus", "content": text("ab")}, ["ab", "abab"], [""]),
    ({"type": "repeat", "min": 1, "max": 2, "content": text("a")}, ["a", "aa"], ["", "aaa"]),
    ({"type": "repeat", "min": 2, "max": -1, "content": text("a")}, ["aa", "aaaaa"], ["a"]),
    (tag("<t>", ANY, "</t>"), ["<t>a < b </t>"], ["<t>a", "<t></t>x", "x<t></t>"]),
    (tag("<t>", INT, ["</t>", "</u>"]), ["<t>1</t>", "<t>1</u>"], ["<t>1", "<t>1</v>"]),
    (tag("<t>", ANY, ["</t>", "</u>"]), ["<t>a</t>", "<t>b</u>"], ["<t>a</t>b</u>"]),
    (tag("say ", ANY, ""), ["say what you want"], ["what"]),
    (
        tag("<o>", {"type": "sequence", "elements": [text("1"), tag("<i>", ANY, "</i>")]}, "</o>"),
        ["<o>1<i> </o> </i></o>"],
        ["<o>1<i></i>"],
    ),
    (
        {"type": "triggered_tags", **CALLS},
        ["", "hi", "x <f=a>1</f> y <f=b>z</f><g=>x</g> < f", "<f=a>1</f>"],
        ["<f=c>", "a<f=a>b</f>", "<f=a>1", "<g=>y"],
    ),
    (
        {"type": "triggered_tags", **CALLS, "at_least_one": True},
        ["<f=a>1</f> and <g=>x</g>."],
        ["", "hi", "hi <f=a>1</f>"],
    ),
    (
        {"type": "triggered_tags", **CALLS, "stop_after_first": True},
        ["", "hi", "hi <g=>x</g>"],
        ["<g=>x</g> "],
    ),
    (
        {"type": "triggered_tags", **CALLS, "at_least_one": True, "stop_after_first": True},
        ["<g=>x</g>"],
        ["", "a", "<g=>x</g>."],
    ),
    (
        {"type": "triggered_tags", **CALLS, "excludes": ["bad"]},
        ["ba d <f=b>bad</f> ba"],
        ["bad", "<g=>x</g>bad"],
    ),
    (
        tag("<o>", {"type": "triggered_tags", **CALLS}, "</o>"),
        ["<o>a<g=>x</g>b</o>", "<o></o>"],
        ["<o>a</o>b", "<o><g=>x"],
    ),
    (
        {"type": "tags_with_separator", **SEPARATED},
        ["", "[1]", "[1],(a),[2]"],
        ["[1](a)", "[1],", "x"],
    ),
    ({"type": "tags_with_separator", **SEPARATED, "at_least_one": True}, ["(a)"], ["", "(a),"]),
    (
        {"type": "tags_with_separator", **SEPARATED, "stop_after_first": True},
        ["", "[3]"],
        ["[3],[3]"],
    ),
    (
        {"type": "dispatch", "rules": [["<f>", INT], ["<g>", text("x")]]},
        ["a <f>3 b <g>x", ""],
        ["<f>x", "<g>y"],
    ),
    ({"type": "dispatch", "rules": [["<f>", INT]], "loop": False}, ["a <f>3", "a"], ["<f>3<f>3"]),
]


@pytest.mark.parametrize(("format", "good", "wrong"), CASES)
def test_a_format_allows_what_it_says(format, good, wrong):
    for words in good:
        assert accepts(spec(format), words), words
    for words in wrong:
        assert not accepts(spec(format), words), words


def test_as_json_text_and_with_the_style_of_json():
    format = {"type": "json_schema", "json_schema": {"type": "array", "items": {"type": "integer"}}}
    tight = StructuredOutputs(
        structural_tag=json.dumps({"format": format}), disable_any_whitespace=True
    )
    assert accepts(tight, "[1,2]")
    assert not accepts(tight, "[1, 2]")
    assert accepts(spec(format), "[1, 2]")


@pytest.mark.parametrize(
    ("format", "words"),
    [
        (3, "format must be an object with a type"),
        ({"value": "x"}, "format must be an object with a type"),
        ({"type": "token", "token": 3}, "format is of type 'token', which is not supported"),
        (tag("<", {"type": "any_tokens"}, ">"), "format.content is of type 'any_tokens'"),
        ({**tag("<", ANY, ">"), "end": {"type": "token", "token": 3}}, "end is of type 'token'"),
        ({**INT, "style": "qwen_xml"}, "format.style 'qwen_xml'"),
        ({**INT, "any_order": True}, "format.any_order"),
        ({"type": "json_schema"}, "format.json_schema is missing"),
        (
            {"type": "sequence", "elements": [ANY, text("x")]},
            r"elements\[0\] \(any_text\) must come last",
        ),
        (
            {"type": "star", "content": {"type": "triggered_tags", **CALLS}},
            r"\(triggered_tags\) must",
        ),
        ({"type": "or", "elements": []}, "format.elements must be a list"),
        ({"type": "repeat", "min": 3, "max": 2, "content": INT}, "0 <= min <= max"),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": [text("x")]},
            r"tags\[0\] must be a tag",
        ),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": [tag("x", INT, "")]}, "exactly one"),
        (
            {"type": "triggered_tags", "triggers": [], "tags": [tag("x", INT, "")]},
            "must not be empty",
        ),
        ({"type": "dispatch", "rules": [["<f>"]]}, r"rules\[0\] must be"),
        ({"type": "regex", "pattern": "a", "excludes": ["b"]}, "format.excludes"),
    ],
)
def test_what_cannot_be_held_to_is_refused_by_its_type(format, words):
    with pytest.raises(BadRequest, match=words) as caught:
        compiler().compile(spec(format))
    assert caught.value.field == "structured_outputs.structural_tag"


def test_neither_today_nor_before():
    with pytest.raises(BadRequest, match="needs format, or structures and triggers"):
        compiler().compile(StructuredOutputs(structural_tag={"triggers": ["a"]}))


def test_a_deep_format_is_refused_before_it_is_read():
    format: dict = text("x")
    for _ in range(80):
        format = {"type": "optional", "content": format}
    with pytest.raises(BadRequest) as caught:
        GrammarCompiler.compile(compiler(), spec(format))
    assert caught.value.code == "grammar_too_large"
