"""Grammars of tool calls: every form, forced and announced, with control tokens and without."""

from __future__ import annotations

import pytest

from jserve.grammar.tools import NAME, CallForm, calls_grammar
from jserve.sampling import StructuredOutputs
from tests.grammar.kit import compiler, ids

CALLS = 2
"""The id of [CALLS], a control token of the kit's vocabulary."""
HEAD = f'{{"name": "{NAME}", "arguments": '
HERMES = CallForm(head=("<tool_call>", f"\n{HEAD}"), tail=("}\n", "</tool_call>"), between=("\n",))
LLAMA = CallForm(head=(HEAD,), tail=("}",), between=("; ",), bare=True)
MISTRAL = CallForm(begin=(CALLS, "["), head=(HEAD,), tail=("}",), between=(", ",), end=("]",))
TOOLS = [
    ("f", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    ('g"', {"type": "object", "properties": {}}),
]
F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g\\"", "arguments": {}}'
ONE = {
    "hermes": (HERMES, ids(f"<tool_call>\n{F}\n</tool_call>")),
    "llama3": (LLAMA, ids(F)),
    "mistral": (MISTRAL, (CALLS, *ids(f"[{F}]"))),
}
TWO = {
    "hermes": ids(f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>"),
    "llama3": ids(f"{F}; {G}"),
    "mistral": (CALLS, *ids(f"[{F}, {G}]")),
}
BAD = {
    "hermes": ids(f"<tool_call>\n{F.replace('1', 'true')}\n</tool_call>"),
    "llama3": ids(F.replace("1", "true")),
    "mistral": (CALLS, *ids(f"[{F.replace('1', 'true')}]")),
}


def accepts(form: CallForm, tokens, **options) -> bool:
    grammar = calls_grammar(form, TOOLS, **options)
    matcher = compiler().compile(StructuredOutputs(grammar=grammar)).matcher.deep_copy()
    return matcher.try_consume_tokens(list(tokens)) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("kind", ONE)
def test_required_is_calls_and_nothing_else(kind):
    form, one = ONE[kind]
    assert accepts(form, one, many=True, required=True)
    assert accepts(form, TWO[kind], many=True, required=True)
    assert not accepts(form, TWO[kind], many=False, required=True)
    assert not accepts(form, BAD[kind], many=True, required=True)
    assert not accepts(form, ids("words"), many=True, required=True)
    assert not accepts(form, (), many=True, required=True)


@pytest.mark.parametrize("kind", ONE)
def test_auto_is_words_or_calls_that_fit(kind):
    form, one = ONE[kind]
    for tokens in (one, TWO[kind], ids("the red car"), ids("< red [ car")):
        assert accepts(form, tokens, many=True, required=False)
    assert not accepts(form, BAD[kind], many=True, required=False)
    assert not accepts(form, TWO[kind], many=False, required=False)
    if kind != "llama3":
        assert accepts(form, (*ids("see "), *one), many=True, required=False)
        assert not accepts(form, (*ids("see "), *BAD[kind]), many=True, required=False)


@pytest.mark.parametrize("kind", ["hermes", "mistral"])
def test_an_answer_of_a_schema_may_stand_instead(kind):
    form, one = ONE[kind]
    answer = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    for tokens, good in ((one, True), (ids('{"n": 1}'), True), (ids("words"), False)):
        assert accepts(form, tokens, many=True, required=False, answer=answer) is good


def test_arguments_that_were_not_declared_are_not_made_up():
    extra = ids('<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": 2}}\n</tool_call>')
    assert not accepts(HERMES, extra, many=True, required=True)
