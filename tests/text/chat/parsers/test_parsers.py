"""Thoughts and tool calls read from text: by example, and by every way to cut a text."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings, strategies as st

from jserve.config import ModelOptions
from jserve.errors import ConfigError
from jserve.text.chat.parsers.delta import ParsedDelta
from jserve.text.chat.parsers.reasoning import State, ThoughtParser
from jserve.text.chat.parsers.table import CALL_PARSERS
from jserve.text.chat.speech import AnswerParser, Speech, speech_of
from jserve.text.chat.template import ChatTemplate

C1 = '{"name": "get_weather", "arguments": {"city": "Paris", "deep": {"x": "}\\"{"}}}'
C2 = '{"name": "time", "arguments": {}}'
ARGS = '{"city": "Paris", "n": [1, "}"]}'
BEGIN, END, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


def deepseek(name: str, arguments: str) -> str:
    """A call as the templates of DeepSeek V3 and R1 write it."""
    return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"


CORPUS: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    # text, content, [(name, arguments)]
    "hermes": [
        ("", "", []),
        ("plain words\n", "plain words\n", []),
        ("a < b <tool and <tool_call", "a < b <tool and <tool_call", []),
        (f"<tool_call>\n{C1}\n</tool_call>", "", [("get_weather", C1[37:-1])]),
        (
            f"Let me see.\n<tool_call>\n{C1}\n</tool_call>\n<tool_call>{C2}</tool_call>\n",
            "Let me see.",
            [("get_weather", C1[37:-1]), ("time", "{}")],
        ),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call> ok', "ok", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name":"f","n":12,"arguments":{"a":[1,2]}}', "", [("f", '{"a":[1,2]}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "un', "", [("f", '{"a": "un')]),
        ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
        ('<tool_call>{"nam', '<tool_call>{"nam', []),
        ('x <tool_call>{"a": 1}</tool_call>', 'x <tool_call>{"a": 1}</tool_call>', []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{"name": "f",}</tool_call>', "", [("f", "")]),
    ],
    "llama3": [
        ("plain", "plain", []),
        (' {"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (f"{C2}; {C1}", "", [("time", "{}"), ("get_weather", C1[37:-1])]),
        (f"<|python_tag|>{C2}", "", [("time", "{}")]),
        (f"see <|python_tag|>{C2}", "see", [("time", "{}")]),
        ('{"a": 1} is JSON', '{"a": 1} is JSON', []),
        (" {not json", " {not json", []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("  \n", "  \n", []),
    ],
    "mistral": [
        ("plain [TOOL", "plain [TOOL", []),
        (f"[TOOL_CALLS][{C1}, {C2}]", "", [("get_weather", C1[37:-1]), ("time", "{}")]),
        (f"ok [TOOL_CALLS] [{C2}]", "ok", [("time", "{}")]),
        ('[TOOL_CALLS]f[ARGS]{"a": {"b": 1}}', "", [("f", '{"a": {"b": 1}}')]),
        (
            '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": "]}"}',
            "",
            [("f", '{"a": 1}'), ("g", '{"b": "]}"}')],
        ),
        ("[TOOL_CALLS][3]", "[TOOL_CALLS][3]", []),
        ("[TOOL_CALLS]na", "[TOOL_CALLS]na", []),
        ("ok [TOOL_CALLS]", "ok [TOOL_CALLS]", []),
        ("ok [TOOL_CALLS] \n", "ok [TOOL_CALLS] \n", []),
        ("ok [TOOL_CALLS] na me ", "ok [TOOL_CALLS] na me ", []),
        ("ok [TOOL_CALLS] na\nme", "ok [TOOL_CALLS] na\nme", []),
        ('ok [TOOL_CALLS] [ {"na', 'ok [TOOL_CALLS] [ {"na', []),
        ('[TOOL_CALLS]f{"a":1}[TOOL_CALLS]', "[TOOL_CALLS]", [("f", '{"a":1}')]),
    ],
    "deepseek_v3": [
        ("plain", "plain", []),
        (f"{BEGIN}{deepseek('f', '{}')}{END}", "", [("f", "{}")]),
        (
            f"Let me see.\n{BEGIN}{deepseek('get_weather', ARGS)}\n{deepseek('time', '{}')}{END}",
            "Let me see.",
            [("get_weather", ARGS), ("time", "{}")],
        ),
        (f"{BEGIN}{CALL}function{SEP}f\n```json\n{ARGS[:9]}", "", [("f", ARGS[:9])]),
        (f"{BEGIN}{CALL}function{SEP}f\n```json\nno", f"{CALL}function{SEP}f\n```json\nno", []),
        (f"{CALL}{{}}", f"{CALL}{{}}", []),
        (f"{BEGIN}{CALL}a b{SEP}{{}}", f"{CALL}a b{SEP}{{}}", []),
    ],
    "deepseek_v31": [
        (f"{BEGIN}{CALL}f{SEP}{ARGS}{CALL_END}{END}", "", [("f", ARGS)]),
        (
            f"x {BEGIN}{CALL}f{SEP}{ARGS}{CALL_END}{CALL}g{SEP}{{}}{CALL_END}{END}",
            "x",
            [("f", ARGS), ("g", "{}")],
        ),
    ],
    "phi4_mini_json": [
        (f"functools[{C1}, {C2}]", "", [("get_weather", C1[37:-1]), ("time", "{}")]),
        (f"ok <|tool_call|>[{C2}]<|/tool_call|>", "ok", [("time", "{}")]),
        ("functools and functools[3]", "functools and functools[3]", []),
        ("<|tool_call|>no", "<|tool_call|>no", []),
        ("<|tool_call|> ", "<|tool_call|> ", []),
    ],
    "cohere_command": [
        ("<|START_RESPONSE|>Hello.<|END_RESPONSE|>", "Hello.", []),
        (
            '<|START_ACTION|>[\n  {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
            '  {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
            "",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        ("<|START_ACTION|>no JSON<|END_ACTION|>", "<|START_ACTION|>no JSON", []),
        ('<|START_ACTION|>[{"name": "f"}]', '<|START_ACTION|>[{"name": "f"}]', []),
    ],
    "glm4": [
        ('get_weather\n{"city": "Paris"}', "", [("get_weather", '{"city": "Paris"}')]),
        ('\nf\n{"a": {}}<|assistant|>g\n{}', "", [("f", '{"a": {}}'), ("g", "{}")]),
        ("Hello\nworld {}", "Hello\nworld {}", []),
        ("Yes", "Yes", []),
        ("two words\n{}", "two words\n{}", []),
        ('f\n{"a": 1', "", [("f", '{"a": 1')]),
    ],
    "pythonic": [
        ('[f(a="x", b=[1, {"k": None}])]', "", [("f", '{"a": "x", "b": [1, {"k": null}]}')]),
        (" [f(), m.g(t=true, x=-1.5)]\n", "", [("f", "{}"), ("m.g", '{"t": true, "x": -1.5}')]),
        ("[f(s='it\\'s ) ]', t=\"é\")]", "", [("f", '{"s": "it\'s ) ]", "t": "é"}')]),
        ("[1] says so", "[1] says so", []),
        ("[see here](there)", "[see here](there)", []),
        ("[f(1)]", "[f(1)]", []),
        ("[f(a=open(1))]", "[f(a=open(1))]", []),
        ("[f(a=1e999)]", "[f(a=1e999)]", []),
        ("[f(a=1), 3]", ", 3]", [("f", '{"a": 1}')]),
        ("[f(a=", "[f(a=", []),
        ("see [f()]", "see [f()]", []),
        (C2, "", [("time", "{}")]),
    ],
    "llama4_pythonic": [
        ("<|python_start|>[f(a=1)]<|python_end|>", "", [("f", '{"a": 1}')]),
        (f"ok <|python_start|>{C2}<|python_end|>", "ok", [("time", "{}")]),
        ("<|python_start|>print(1)", "<|python_start|>print(1)", []),
        ("[f(a=1)]", "", [("f", '{"a": 1}')]),
    ],
    "gemma3": [
        ("```tool_code\nf(a=1)\n```", "", [("f", '{"a": 1}')]),
        ("ok\n```tool_code\nf(a=1)\ng()\n```\n", "ok", [("f", '{"a": 1}'), ("g", "{}")]),
        ("```tool_code\nprint(1)\n```", "```tool_code\nprint(1)\n```", []),
        ("```tool_code\nf(a=", "```tool_code\nf(a=", []),
        ("```python\nf(a=1)\n```", "```python\nf(a=1)\n```", []),
        ("[f(a=1)]", "", [("f", '{"a": 1}')]),
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ],
    "openai": [
        ("plain", "plain", []),
        ("<|channel|>final<|message|>Hello.<|return|>", "Hello.", []),
        (
            f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGS}<|call|>",
            "",
            [("f", ARGS)],
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f"
            "<|channel|>commentary json<|message|><|call|>",
            "I look.",
            [("f", "{}")],
        ),
        (
            "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
            "a\nb",
            [],
        ),
        ("<|channel|>fin", "", []),
        ("<|chan or not", "<|chan or not", []),
        ("<|channel|>commentary to=python<|message|>x", "x", []),
    ],
}
THOUGHTS = [
    # text, state, reasoning, answer
    ("<think>\nab\n\ncd\n</think>\n\nok", State.LEAD, "ab\n\ncd", "ok"),
    (" \n<think>a</think>b", State.LEAD, "a", "b"),
    ("no <think>a</think>", State.LEAD, "", "no <think>a</think>"),
    ("<think>a </thin", State.LEAD, "a </thin", ""),
    ("<thin", State.LEAD, "", "<thin"),
    ("a\n</think>\n b ", State.THOUGHT, "a", "b "),
    ("a \n", State.THOUGHT, "a", ""),
    ("</think>", State.THOUGHT, "", ""),
    ("<think>\n\n</think>\n\nx", State.LEAD, "", "x"),
    ("a</think>", State.ANSWER, "", "a</think>"),
]
CASES = [(kind, text) for kind, rows in CORPUS.items() for text, *_ in rows]


def parse(kind: str, pieces: list[str], state: State = State.ANSWER) -> ParsedDelta:
    parser = AnswerParser(ThoughtParser("<think>", "</think>", state), CALL_PARSERS[kind]())
    parsed = ParsedDelta()
    for piece in pieces:
        parsed.add(parser.feed(piece))
    parsed.add(parser.close())
    return parsed


def flat(parsed: ParsedDelta) -> tuple[str, str, list[tuple[str, str]]]:
    calls: dict[int, list[str]] = {}
    for piece in parsed.calls:
        if piece.name is not None:
            assert piece.index not in calls, "a name came twice"
            assert piece.index == len(calls)
            calls[piece.index] = [piece.name, ""]
        calls[piece.index][1] += piece.arguments
    return parsed.reasoning, parsed.content, [(n, a) for n, a in calls.values()]


def in_order(parsed: ParsedDelta) -> list[tuple[str, str]]:
    """Content and calls as a reader meets them."""
    found: list[tuple[str, str]] = []
    for part in parsed.parts:
        if isinstance(part, str):
            found.append(("text", part))
        elif part.name is not None:
            found.append((part.name, part.arguments))
        else:
            name, arguments = found[-1]
            found[-1] = (name, arguments + part.arguments)
    return found


@pytest.mark.parametrize("kind", CORPUS)
def test_examples(kind):
    for text, content, calls in CORPUS[kind]:
        assert flat(parse(kind, [text])) == ("", content, calls), text


@pytest.mark.parametrize(("text", "state", "reasoning", "answer"), THOUGHTS)
def test_thoughts(text, state, reasoning, answer):
    assert flat(parse("none", [text], state)) == (reasoning, answer, [])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "text"), CASES)
def test_two_cuts_anywhere_change_nothing(kind, text):
    whole = flat(parse(kind, [text]))
    ordered = in_order(parse(kind, [text]))
    assert flat(parse(kind, list(text))) == whole
    assert in_order(parse(kind, list(text))) == ordered
    for i in range(len(text)):
        assert flat(parse(kind, [text[:i], text[i:]])) == whole, i
        assert in_order(parse(kind, [text[:i], text[i:]])) == ordered, i
    # All pairs of cuts of a short text; of a long one, every third place.
    for i, j in itertools.combinations(range(0, len(text) + 1, 1 if len(text) < 50 else 3), 2):
        assert flat(parse(kind, [text[:i], text[i:j], text[j:]])) == whole, (i, j)


@pytest.mark.parametrize(("text", "state", "reasoning", "answer"), THOUGHTS)
@pytest.mark.parametrize("tail", ["", f"<tool_call>{C2}</tool_call>"])
def test_every_cut_of_a_thought_changes_nothing(text, state, reasoning, answer, tail):
    text += tail
    whole = flat(parse("hermes", [text], state))
    n = len(text) - 1
    cuts = range(2 ** min(n, 9)) if n > 0 else []
    for bits in cuts:  # all 512 ways to cut the last ten characters
        pieces, at = [], 0
        for i in range(n):
            if i >= n - 9 and bits >> (n - 1 - i) & 1:
                pieces.append(text[at : i + 1])
                at = i + 1
        assert flat(parse("hermes", [*pieces, text[at:]], state)) == whole
    del reasoning, answer


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "<think>",
        "</think>",
        C1,
        C2,
        *(BEGIN, END, SEP, CALL, CALL_END, "function", "\n```json\n", "```"),
        *("functools[", "<|tool_call|>", "<|/tool_call|>", "<|assistant|>", "f\n{"),
        *("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", '{"tool_name": "f"'),
        *("<|python_start|>", "<|python_end|>", "```tool_code\n", "f(a=", "'x'", "(", ")"),
        *("<|channel|>", "<|start|>assistant", "<|message|>", "<|end|>", "<|call|>"),
        *("analysis", "commentary to=functions.f", "final", "="),
        '{"name": "f", "arguments": ',
        '"parameters": "x\\',
        "{",
        "}",
        "[",
        "]",
        '"',
        ";",
        ",",
        " ",
        "\n",
        "word",
        "<",
        "ü",
    ]
)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(CALL_PARSERS)),
    st.sampled_from([State.LEAD, State.THOUGHT, State.ANSWER]),
    st.lists(FRAGMENTS, max_size=12).map("".join),
    st.data(),
)
def test_no_text_depends_on_its_cuts(kind, state, text, data):
    whole = flat(parse(kind, [text], state))
    at = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    edges = [0, *at, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert flat(parse(kind, pieces, state)) == whole
    assert flat(parse(kind, list(text), state)) == whole
    if "tool_call" not in text and kind == "hermes" and state is State.ANSWER:
        assert whole == ("", text, []), "content without markers stays to the letter"


HARMONY = (
    "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant<|channel|>analysis<|message|>More."
    f"<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGS}<|call|>"
)


def test_channels_tell_thoughts_from_answers():
    for n in (1, 3, len(HARMONY)):
        pieces = [HARMONY[i : i + n] for i in range(0, len(HARMONY), n)]
        assert flat(spoken("openai", pieces)) == ("Let me think.\nMore.", "", [("f", ARGS)])
    assert not spoken("openai", [HARMONY], calls=False).calls
    thinking = Speech(calls="openai", channels=True).parser(State.ANSWER, calls=True)
    thinking.feed(HARMONY[:40])
    assert thinking.thinking
    thinking.feed(HARMONY[40:])
    assert not thinking.thinking


def spoken(kind: str, pieces: list[str], *, calls: bool = True) -> ParsedDelta:
    parser = Speech(calls=kind, channels=kind == "openai").parser(State.ANSWER, calls=calls)
    parsed = ParsedDelta()
    for piece in pieces:
        parsed.add(parser.feed(piece))
    parsed.add(parser.close())
    return parsed


class Vocabulary:
    """A tokenizer of these words and single characters."""

    special_ids = frozenset[int]()

    def __init__(self, *words: str) -> None:
        self.words = words

    def token_id(self, token: str) -> int | None:
        return self.words.index(token) if token in self.words else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1000 + ord(c) for c in text]


PUBLISHED_TAGS = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "exaone_deep": ("<thought>", "</thought>"),
    "cohere_command": ("<|START_THINKING|>", "<|END_THINKING|>"),
}


@pytest.mark.parametrize("asked", ["by name", "auto"])
@pytest.mark.parametrize("name", PUBLISHED_TAGS)
def test_every_cut_of_a_thought_between_published_tags(name: str, asked: str) -> None:
    begin, end = PUBLISHED_TAGS[name]
    options = ModelOptions(
        model="m", tool_call_parser="none", reasoning_parser=name if asked == "by name" else "auto"
    )
    speech = speech_of(options, None, Vocabulary(begin, end))
    assert speech.tags == (begin, end)
    text = f"{begin}a {begin[:-1]} b{end}\n\nok {begin}"
    cuts = range(len(text) + 1)
    for i, j in itertools.combinations_with_replacement(cuts, 2):
        parser = speech.parser(State.LEAD, calls=False)
        parsed = ParsedDelta()
        for piece in (text[:i], text[i:j], text[j:]):
            parsed.add(parser.feed(piece))
        parsed.add(parser.close())
        assert flat(parsed) == (f"a {begin[:-1]} b", f"ok {begin}", []), (i, j)


def test_an_answer_between_control_tokens_is_read_without_tools():
    text = "<|START_RESPONSE|>Hello.<|END_RESPONSE|>"
    assert spoken("cohere_command", [text], calls=False).content == "Hello."
    final = "<|channel|>final<|message|>Hello.<|return|>"
    assert spoken("openai", [final], calls=False).content == "Hello."


def template(text: str) -> ChatTemplate:
    return ChatTemplate({"default": "{{ messages[0].content }}{% if tools %}x{% endif %}" + text})


@pytest.mark.parametrize(
    ("signs", "name"),
    [
        ("<|start|>{{ '<|channel|>' }}", "openai"),
        ("<|START_ACTION|>", "cohere_command"),
        ("<｜tool▁calls▁begin｜>```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<|python_start|>", "llama4_pythonic"),
        ("<|tool|>", "phi4_mini_json"),
        ("<|observation|>", "glm4"),
        ("<start_of_turn>", "gemma3"),
        ("<tool_call>", "hermes"),
        ("<tool_call><arg_key>", "none"),
        ("", "none"),
    ],
)
def test_a_chat_template_shows_how_calls_are_written(signs, name, byte_tokenizer):
    found = speech_of(ModelOptions(), template(signs), byte_tokenizer)
    assert found.calls == name


def test_the_reasoning_parser_of_channels_goes_with_their_calls(byte_tokenizer):
    options = ModelOptions(reasoning_parser="openai_gptoss")
    with pytest.raises(ConfigError) as caught:
        speech_of(options, template(""), byte_tokenizer)
    assert caught.value.field == "reasoning_parser"
    off = ModelOptions(reasoning_parser="none")
    assert not speech_of(off, template("<|channel|>"), byte_tokenizer).thinks
    assert speech_of(ModelOptions(), template("<|channel|>"), byte_tokenizer).thinks


def test_arguments_are_passed_on_while_they_are_written():
    parser = CALL_PARSERS["hermes"]()
    parsed = parser.feed('<tool_call>\n{"name": "f", "arguments": {"city": "Par')
    assert flat(parsed) == ("", "", [("f", '{"city": "Par')])
    assert json.loads(C1)["arguments"]["city"] == "Paris"
