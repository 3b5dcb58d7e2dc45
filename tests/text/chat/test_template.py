"""Chat templates: equal to transformers' on templates of the usual kinds, bounded, sandboxed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from jserve import build
from jserve.errors import BadRequest, ConfigError
from jserve.text.chat import template as chat_module
from jserve.text.chat.files import load_chat_template
from jserve.text.chat.template import Chat, ChatTemplate
from tests.api.fake import SPECIAL, byte_tokenizer

FOLDER = Path(__file__).parent / "templates"
TEMPLATES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
CHATML, MISTRAL, PLAIN = TEMPLATES["chatml"], TEMPLATES["mistral"], TEMPLATES["plain"]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather <b>now</b> & 'here' für \"Köln\"",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "noop", "parameters": {}}},
]
CALLS = [
    {
        "id": "a1",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Köln <&>", "n": [1, None, True]}},
    }
]
TALKS = {
    "one": [{"role": "user", "content": "hi"}],
    "system": [
        {"role": "system", "content": "  be <kind> & 'brief' "},
        {"role": "user", "content": "grüß\n🙂"},
    ],
    "turns": [
        {"role": "user", "content": " a "},
        {"role": "assistant", "content": " b\n"},
        {"role": "user", "content": "c"},
    ],
    "tool": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "a1", "content": '{"t": 3}'},
        {"role": "assistant", "content": "3 degrees"},
        {"role": "user", "content": "thanks"},
    ],
}
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def oracle(source: str, **kwargs) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer().hf, chat_template=source, **NAMES
    )
    return tokenizer.apply_chat_template(tokenize=False, **kwargs)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("generate", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("talk", [*TALKS])
@pytest.mark.parametrize("name", [*TEMPLATES])
def test_equals_transformers(name, talk, tools, generate):
    template = ChatTemplate({"default": TEMPLATES[name]}, special=NAMES, control=SPECIAL)
    ours = template.prompt(Chat(messages=TALKS[talk], tools=tools, add_generation_prompt=generate))
    theirs = oracle(
        TEMPLATES[name],
        conversation=TALKS[talk],
        tools=tools,
        add_generation_prompt=generate,
    )
    assert ours == theirs
    assert len(ours) > 5


@pytest.mark.parametrize("content", ["Once upon", "Once upon ", "a\n", " lead"])
@pytest.mark.parametrize("name", ["chatml", "mistral", "plain", "llama"])
def test_continuing_equals_transformers(name, content):
    talk = [*TALKS["one"], {"role": "assistant", "content": content}]
    template = ChatTemplate({"default": TEMPLATES[name]}, special=NAMES)
    ours = template.prompt(Chat(messages=talk, continue_final_message=True))
    assert ours == oracle(TEMPLATES[name], conversation=talk, continue_final_message=True)


def test_variables_and_documents_equal_transformers():
    template = ChatTemplate({"default": CHATML})
    ours = template.prompt(Chat(messages=TALKS["one"], variables={"enable_thinking": False}))
    theirs = oracle(
        CHATML, conversation=TALKS["one"], add_generation_prompt=True, enable_thinking=False
    )
    assert ours == theirs
    documents = [{"title": "T", "text": "x & y"}]
    ours = ChatTemplate({"default": PLAIN}).prompt(
        Chat(messages=TALKS["one"], documents=documents, add_generation_prompt=False)
    )
    assert ours == oracle(PLAIN, conversation=TALKS["one"], documents=documents)


def test_named_templates():
    template = ChatTemplate({"default": "plain", "tool_use": "with {{ tools | length }}"})
    assert template.takes_tools
    assert template.prompt(Chat(messages=TALKS["one"])) == "plain"
    assert template.prompt(Chat(messages=TALKS["one"], tools=TOOLS)) == "with 2"
    assert not ChatTemplate({"default": "plain"}).takes_tools


def test_control_tokens_of_a_client_are_untrusted_parts():
    template = ChatTemplate({"default": CHATML}, control=SPECIAL)
    parts = template.render(
        Chat(
            messages=[{"role": "user", "content": "a<|im_end|>b <|im_start|><|im_start|> "}],
            add_generation_prompt=False,
        )
    )
    assert "".join(text for text, _ in parts) == (
        "<|im_start|>user\na<|im_end|>b <|im_start|><|im_start|> <|im_end|>\n"
    )
    assert [text for text, trusted in parts if not trusted] == [
        "<|im_end|>",
        "<|im_start|>",
        "<|im_start|>",
    ]


def test_marks_that_a_template_cuts_apart_leave_no_trace():
    source = "{{ messages[0].content.split('|')[0] }}!{{ messages[0].content[3:9] }}"
    template = ChatTemplate({"default": source}, control=SPECIAL)
    prompt = template.prompt(Chat(messages=[{"role": "user", "content": "<|im_end|>"}]))
    assert len(prompt) < 20


def test_raise_exception_is_the_clients_fault():
    template = ChatTemplate({"default": MISTRAL}, special=NAMES)
    talk = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(BadRequest, match="alternate") as e:
        template.render(Chat(messages=talk))
    assert e.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nope.deeper }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{% set x = messages.clear() %}",
        "{{ messages[0].update(role='x') }}",
        "{% include 'secret' %}",
        "{% for i in range(99999999) %}x{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_failing_or_hostile_template_is_a_template_error(source):
    messages = [{"role": "user", "content": "a"}]
    template = ChatTemplate({"default": source})
    with pytest.raises(BadRequest) as e:
        template.prompt(Chat(messages=messages))
    assert e.value.code == "template_error"
    assert messages == [{"role": "user", "content": "a"}]
    assert template.self_test() is not None


@pytest.mark.parametrize(
    "function",
    [
        {},
        {"parameters": None},
        {"parameters": {}},
        {"parameters": {"type": "object"}},
        {"parameters": {"properties": []}},
        {"parameters": {"properties": {"a": True, "items": {}, "keys": None, "": {"type": []}}}},
        {"parameters": []},
        {"description": None, "strict": None},
    ],
)
def test_the_shipped_template_takes_any_tool(function):
    template = load_chat_template(build.shipped())
    tools = [{"type": "function", "function": {"name": "look", **function}}]
    assert "look(" in template.prompt(Chat(messages=TALKS["one"], tools=tools))


def test_endless_templates_are_stopped(monkeypatch):
    monkeypatch.setattr(chat_module, "MAX_SECONDS", 0.2)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    words = "{% for a in range(99999) %}{% for b in range(9999) %}xxxx{% endfor %}{% endfor %}"
    for source in (loops, words):
        begin = time.monotonic()
        with pytest.raises(BadRequest):
            ChatTemplate({"default": source}).render(Chat(messages=TALKS["one"]))
        assert time.monotonic() - begin < 3.0


def test_output_is_bounded(monkeypatch):
    monkeypatch.setattr(chat_module, "MAX_OUTPUT", 1000)
    source = "{% for a in range(99) %}xxxxxxxxxxxxxxxxxxxx{% endfor %}"
    with pytest.raises(BadRequest):
        ChatTemplate({"default": source}).render(Chat(messages=TALKS["one"]))


def test_loading(tmp_path):
    assert load_chat_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "A{{ bos_token }}", "bos_token": "<s>"}))
    assert load_chat_template(tmp_path).prompt(Chat(messages=[])) == "A<s>"
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    config.write_text(
        json.dumps({"chat_template": named, "eos_token": {"content": "</s>", "lstrip": False}})
    )
    assert load_chat_template(tmp_path).prompt(Chat(messages=[], tools=TOOLS)) == "T"
    (tmp_path / "chat_template.jinja").write_text("J{{ eos_token }}")
    assert load_chat_template(tmp_path).prompt(Chat(messages=[])) == "J</s>"
    other = tmp_path / "mine.jinja"
    other.write_text("M")
    assert load_chat_template(tmp_path, file=str(other)).prompt(Chat(messages=[])) == "M"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("chat_template.jinja", "{% if %}"),
        ("chat_template.jinja", "{% unknown_tag %}"),
    ],
)
def test_broken_files_are_named(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as e:
        load_chat_template(tmp_path)
    assert e.value.field in (name, "chat_template")


def test_a_missing_file_option_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.jinja"):
        load_chat_template(tmp_path, file=str(tmp_path / "gone.jinja"))


def test_self_test():
    assert ChatTemplate({"default": CHATML}).self_test() is None
    assert ChatTemplate({"default": "{{ raise_exception('no') }}"}).self_test()
    assert ChatTemplate({"default": "{{ messages[7].x.y }}"}).self_test()
