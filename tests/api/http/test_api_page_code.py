"""The page's own modules, run by node: event streams cut anywhere, bodies the server takes whole, snippets."""

from __future__ import annotations

import itertools
import json
import random
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import jserve.api
from jserve.api.openai import fields as openai
from jserve.api.request.parsed import Served
from jserve.text.chat.template import ChatTemplate
from tests.api.fake import CHATML, SPECIAL, FakeEngine, card, chat_body, live

FOLDER = Path(jserve.api.__file__).parent / "web"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def js(tmp_path_factory: pytest.TempPathFactory):
    """Runs a module's text with the page's modules beside it: ``input`` in, ``output`` out, as JSON."""
    root = tmp_path_factory.mktemp("page")
    for file in FOLDER.glob("*.js"):
        shutil.copy(file, root)
    (root / "package.json").write_text('{"type": "module"}')

    def run(code: str, value=None):
        head = 'import {readFileSync} from "fs"; const input = JSON.parse(readFileSync(0)); let output;\n'
        (root / "main.test.js").write_text(f"{head}{code}\nconsole.log(JSON.stringify(output));")
        done = subprocess.run(
            [str(NODE), "main.test.js"],
            cwd=root,
            input=json.dumps(value),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


STREAMS = [
    "data: a\n\ndata: b\n\n",
    "data: a\r\n\r\ndata: b\r\n\r\n",
    "data: a\r\rdata: b\r\r",
    ": keep-alive\n\nevent: x\nid: 1\ndata: a\ndata:b\n\n\n\ndata\n\ndata:  two\n\n",
    "data: wörld 🙂 \u2028\n\ndata: [DONE]\n\n",
    "data: cut",
    "",
]
EVENTS = [
    ["a", "b"],
    ["a", "b"],
    ["a", "b"],
    ["a\nb", "", " two"],
    ["wörld 🙂 \u2028", "[DONE]"],
    [],
    [],
]


def test_events_are_the_same_however_the_text_is_cut(js) -> None:
    rng = random.Random(3)
    cases = []
    for text in STREAMS:
        cuts = [[i] for i in range(len(text) + 1)] + [list(range(len(text)))]
        cuts += [sorted(rng.sample(range(len(text)), 4)) for _ in range(30) if len(text) > 4]
        for at in cuts:
            edges = [0, *at, len(text)]
            cases.append([text[a:b] for a, b in itertools.pairwise(edges)])
    code = """import { EventParser } from "./sse.js";
    output = input.map((parts) => { const p = new EventParser(); return parts.flatMap((x) => p.feed(x)); });"""
    for parts, found in zip(cases, js(code, cases), strict=True):
        assert found == EVENTS[STREAMS.index("".join(parts))], parts


def test_bytes_may_be_cut_inside_a_character_and_an_early_end_is_an_error(js) -> None:
    code = """import { readEvents } from "./sse.js";
    const bytes = new TextEncoder().encode(input.text);
    output = [];
    for (let size = 1; size <= bytes.length; size++) {
      const body = new ReadableStream({ start(c) {
        for (let i = 0; i < bytes.length; i += size) c.enqueue(bytes.slice(i, i + size));
        c.close();
      }});
      const found = [];
      try { for await (const e of readEvents(body)) found.push(e); } catch (e) { found.push(e.message); }
      output.push(found);
    }"""
    text = 'data: {"x":"ö🙂"}\n\ndata: {"x":2}\n\n'
    whole = js(code, {"text": text + "data: [DONE]\n\ndata: after"})
    assert all(found == [{"x": "ö🙂"}, {"x": 2}] for found in whole)
    assert all(found[:-1] == [{"x": "ö🙂"}, {"x": 2}] for found in js(code, {"text": text}))
    assert all("ended before" in found[-1] for found in js(code, {"text": text}))


BODY = 'import { requestBody } from "./body.js"; output = input.map((c) => {' + (
    "try { return requestBody(c, [{role: 'user', content: 'hi'}], 'tiny'); }"
    "catch (e) { if (!e.field) throw e; return {field: e.field, message: e.message}; }});"
)
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": 'it\'s "f"', "parameters": {"type": "object"}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^'\\d$"}}}
CONTROLS = [
    {},
    {"temperature": "", "stop": "", "tools": "  ", "schema": "\n", "system": " "},
    {
        "temperature": "0.5",
        "top_p": "1",
        "top_k": "-1",
        "min_p": "0",
        "max_tokens": "7",
        "seed": "-3",
    },
    {"presence_penalty": "-2", "frequency_penalty": "2", "repetition_penalty": "1.1"},
    {"stop": "END\n\nit's", "lane": "bulk", "thinking": "off", "system": 'Say "no"\n'},
    {"logprobs": True, "top_logprobs": "3"},
    {"logprobs": True},
    {"tools": json.dumps([TOOL]), "tool_choice": "auto"},
    {"tools": json.dumps([TOOL]), "tool_choice": "none"},
    {"schema": json.dumps(SCHEMA)},
]


def test_bodies_are_taken_whole_by_the_server(js) -> None:
    template = ChatTemplate({"default": CHATML}, control=SPECIAL)
    served = Served(card=card(), template=template, strict=True)
    for controls, body in zip(CONTROLS, js(BODY, CONTROLS), strict=True):
        ask = openai.parse_chat(body, served)
        assert ask.ignored == (), controls
        assert ask.stream is True
    found = js(BODY, CONTROLS)
    assert found[0] == found[1]
    assert "temperature" not in found[0]
    assert found[2]["temperature"] == 0.5
    assert found[4]["stop"] == ["END", "it's"]
    assert found[4]["messages"][0] == {"role": "system", "content": 'Say "no"\n'}
    assert found[4]["chat_template_kwargs"] == {"enable_thinking": False}
    assert found[6]["top_logprobs"] == 5
    assert found[7]["tools"] == [TOOL]
    assert found[9]["response_format"]["json_schema"]["schema"] == SCHEMA


@pytest.mark.parametrize(
    ("controls", "field", "words"),
    [
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": "2.1"}, "temperature", "from 0 to 2"),
        ({"top_p": "1e400"}, "top_p", "number"),
        ({"top_k": "1.5"}, "top_k", "whole"),
        ({"max_tokens": "0"}, "max_tokens", "at least 1"),
        ({"logprobs": True, "top_logprobs": "21"}, "top_logprobs", "from 0 to 20"),
        ({"tools": "[\n  {,}]"}, "tools", "line 2, column 4"),
        ({"tools": "{}"}, "tools", "list"),
        ({"tools": "[]"}, "tools", "list"),
        ({"tools": '[{"type": "function"}]'}, "tools", "tool 1"),
        ({"tools": '[{"type": "x", "function": {"name": "f"}}]'}, "tools", "type"),
        ({"tools": '[{"type": "function", "function": {"name": ""}}]'}, "tools", "name"),
        ({"tools": json.dumps([TOOL]), "tool_choice": "g"}, "tool_choice", "no tool is called g"),
        ({"schema": "[]"}, "schema", "object"),
        ({"schema": '{"a": '}, "schema", "not valid JSON"),
    ],
)
def test_nonsense_is_found_before_it_is_sent(js, controls, field, words) -> None:
    (found,) = js(BODY, [controls])
    assert found["field"] == field
    assert words in found["message"]


def test_the_servers_field_leads_to_its_control(js) -> None:
    names = {
        "temperature": "temperature",
        "tools[0].function.name": "tools",
        "response_format.json_schema.schema": "schema",
        "chat_template_kwargs": "thinking",
        "max_completion_tokens": "max_tokens",
        None: "",
    }
    code = 'import { controlOf } from "./body.js"; output = input.map(controlOf);'
    assert js(code, [*names]) == [*names.values()]
    page = (FOLDER / "index.html").read_text()
    assert all(f'data-field="{name}"' in page for name in names.values() if name)


@pytest.mark.parametrize("keyed", [False, True])
def test_snippets_ask_for_the_same(js, keyed: bool, monkeypatch) -> None:
    code = """import { curl, python } from "./snippets.js";
    output = input.bodies.map((b) => [curl(input.url, b, input.keyed), python(input.url, b, input.keyed)]);"""
    bodies = js(BODY, CONTROLS)
    url = "http://127.0.0.1:8000/v1"
    monkeypatch.setenv("JSERVE_API_KEY", "sk-here")
    for body, (curl, python) in zip(
        bodies, js(code, {"bodies": bodies, "url": url, "keyed": keyed}), strict=True
    ):
        words = shlex.split(curl)
        assert words[:3] == ["curl", "-N", f"{url}/chat/completions"]
        assert json.loads(words[words.index("-d") + 1]) == body
        assert ("authorization: Bearer $JSERVE_API_KEY" in words) is keyed
        assert _asked(python) == (
            {"base_url": url, "api_key": "sk-here" if keyed else "none"},
            body,
        )


def _asked(program: str) -> tuple[dict, dict]:
    """What ``program`` hands to the openai package: the client's options and the body it would send."""
    given: list[dict] = []

    class OpenAI:
        def __init__(self, **options) -> None:
            given.append(options)
            self.chat = types.SimpleNamespace(completions=self)

        def create(self, *, extra_body=None, **fields):
            given.append(fields | (extra_body or {}))
            return []

    known = sys.modules.get("openai")
    sys.modules["openai"] = types.SimpleNamespace(OpenAI=OpenAI)  # type: ignore[assignment]
    try:
        exec(compile(program, "snippet", "exec"), {})
    finally:
        sys.modules.pop("openai")
        if known is not None:
            sys.modules["openai"] = known
    return given[0], given[1]


TURNS = """import { addChunk, bodyOf, messagesOf, newAnswer, rate } from "./turns.js";
const body = { model: "tiny", messages: [{ role: "user", content: "hi" }], stream: true };
const answer = newAnswer(body);
for (const [i, chunk] of input.chunks.entries()) addChunk(answer, chunk, 100, 150 + 10 * i);
const entries = [{ role: "user", content: "hi" }, answer, { role: "tool", id: "c", content: "5" }];
output = { answer, messages: messagesOf(entries), body: bodyOf(entries, 1), rate: rate(answer.stats) };"""
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, 2]}}\n</tool_call>'


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("text", ["Plain wörds 🙂.", "Look: " + CALL + "\n" + CALL])
async def test_a_stream_adds_up_to_the_whole_answer(js, text: str, chunk: int) -> None:
    engine = FakeEngine((text,))
    engine.chunk, engine.n_cached = chunk, 4
    template = CHATML + "{# <tool_call> #}"
    body = chat_body(tools=[TOOL], logprobs=True, top_logprobs=2, max_tokens=300)
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with live(engine, template=template) as srv:
        _, whole, _ = await srv.post(CHAT, body)
        events = await srv.events(CHAT, body | options)
    found = js(TURNS, {"chunks": [e for e in events if isinstance(e, dict)]})
    message, answer = whole["choices"][0]["message"], found["answer"]
    calls = message.get("tool_calls") or []
    assert len(calls) == text.count("<tool_call>")
    assert answer["content"] == (message["content"] or "")
    assert [(c["name"], c["arguments"]) for c in answer["calls"]] == [
        (c["function"]["name"], c["function"]["arguments"]) for c in calls
    ]
    assert answer["finish"] == whole["choices"][0]["finish_reason"]
    entries = whole["choices"][0]["logprobs"]["content"]
    assert [t["p"] for t in answer["tokens"]] == [e["logprob"] for e in entries]
    assert [len(t["a"]) for t in answer["tokens"]] == [2] * len(entries)
    stats, usage = answer["stats"], whole["usage"]
    assert (stats["prompt"], stats["completion"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert (stats["cached"], stats["ttft"]) == (4, 50)
    if stats["took"] > stats["ttft"]:
        assert found["rate"] == pytest.approx(
            1e3 * (stats["completion"] - 1) / (stats["took"] - 50)
        )
    parsed = found["messages"][1]
    assert parsed["role"] == "assistant"
    assert len(parsed.get("tool_calls", [])) == len(calls)
    assert found["messages"][2] == {"role": "tool", "tool_call_id": "c", "content": "5"}
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    assert found["body"] == asked


def test_arithmetic_of_the_drawings(js) -> None:
    code = """import { Series, bars, niceTop, perSecond, short } from "./series.js";
    const s = new Series(10);
    for (const [at, v] of [[0, 9], [5, 1], [8, null], [10, 2], [12, 4]]) s.push(at, [v]);
    output = {
      tops: [0, 0.3, 1, 1.01, 7, 10, 2001].map(niceTop),
      kept: s.points.map((p) => p.at), top: s.top, path: s.path(0, 12, 5),
      bars: bars([0, 2, 4], 4, 4),
      rates: [perSecond(null, {now: 1, n: 5}, (d) => d.n), perSecond({now: 1, n: 5}, {now: 3, n: 9}, (d) => d.n),
              perSecond({now: 1, n: 5}, {now: 3, n: 0}, (d) => d.n)],
      short: [null, 0, 0.421, 7.34, 12.34, 128.4, 9994, 9996, 123456, 999999, 3100000].map(short),
    };"""
    found = js(code)
    assert found["tops"] == [1, 0.5, 1, 2, 10, 10, 5000]
    assert found["kept"] == [5, 8, 10, 12]
    assert found["top"] == 4
    assert found["path"] == "M30.00 80.00M80.00 60.00L100.00 20.00"
    assert found["bars"] == "M25.000 100v-50.00h20.500v50.00zM50.000 100v-100.00h20.500v100.00z"
    assert found["rates"] == [None, 2, 0]
    assert found["short"] == [
        "–", "0", "0.42", "7.34", "12.3", "128", "9994", "10.0k", "123k", "1.0M", "3.1M",
    ]  # fmt: skip


def test_probabilities_have_names_and_colours(js) -> None:
    code = """import { percent, surprise, tokensOf } from "./logprobs.js";
    output = [[0, -0.02, -0.2, -0.4, -0.8, -1.5, -2.5, -9].map(surprise), [0, -0.7, -9999].map(percent),
      tokensOf({ content: [
        { token: "\\uFFFD", logprob: -1, bytes: [240, 159], top_logprobs: [] }] }), tokensOf(null)];"""
    colours, names, broken, none = js(code)
    assert colours == [0, 0, 1, 2, 3, 4, 5, 6]
    assert names == ["100 %", "49.7 %", "≈ 0 %"]
    assert broken == [{"t": "\\xf0\\x9f", "p": -1, "a": []}]
    assert none == []


DASHBOARD = """
class Item {
  style = {}; dataset = {}; parts = []; hidden = false; textContent = "";
  append(...more) { this.parts.push(...more); }
  replaceChildren(...all) { this.parts = all; }
  setAttribute() {} addEventListener() {} toggleAttribute() {}
  get words() {
    return [this.textContent, ...this.parts.flatMap((p) => p.words ?? [p])].filter((word) => word !== "");
  }
}
const items = {};
globalThis.document = {
  createElement: () => new Item(), createElementNS: () => new Item(), hidden: false,
  getElementById: (id) => (items[id] ??= new Item()), addEventListener() {},
};
globalThis.sessionStorage = { getItem: () => null };
globalThis.fetch = async () => ({ ok: true, json: async () => input });
globalThis.setTimeout = () => {};
await import("./dashboard.js");
for (let i = 0; i < 20; i++) await null;
output = { hidden: items["experts-card"].hidden, words: items.experts?.words ?? [], state: items.state.words };
"""
"""The module on a page of one answer, which holds what was put where."""


@pytest.mark.parametrize("counted", [True, False])
async def test_the_dashboard_shows_the_load_of_experts_where_it_is_counted(js, counted) -> None:
    engine = FakeEngine()
    if counted:
        engine.values |= {
            "expert_load_max_over_mean": 1.25,
            "expert_load_max_over_mean_worst": 1.5,
            "expert_load_hottest_share": 0.125,
            "expert_moves_total": 7,
        }
    async with live(engine) as srv:
        _, body, _ = await srv.get("/v1/dashboard")
    found = js(DASHBOARD, body)
    assert found["state"][0].startswith("Live"), found["state"]
    assert found["hidden"] is not counted
    assert (
        found["words"]
        == [
            *("Fullest device, of the mean", "1.25 ×", "In the worst layer", "1.50 ×"),
            *("Busiest expert", "12.5 %", "Moves", "7"),
        ]
        * counted
    )
