"""``bench shard --trace`` of an OpenAI batch file: its prompts, shared as they are, each answer at its longest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jserve.build import text_side
from jserve.cli import app
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.shard_live import items_of
from jserve.sim.recorded import SPARE, is_batch
from jserve.sim.trace import TraceItem

MINI = "checkpoints/jserve-mini"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SYSTEM = {"role": "system", "content": "You answer in one short sentence, whatever is asked."}
LINES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [SYSTEM, {"role": "user", "content": "Hello"}], "max_tokens": 4}),
    (CHAT, {"messages": [SYSTEM, {"role": "user", "content": "Who?"}], "model": "gpt-x"}),
    (TEXT, {"prompt": ["Once upon a time", "The end"], "max_tokens": 9, "n": 2}),
]


def written(path: Path, lines: list[tuple[str, dict[str, Any]]]) -> str:
    rows = [
        {"custom_id": f"line-{i}", "method": "POST", "url": url, "body": body}
        for i, (url, body) in enumerate(lines)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def items(trace: str, **options: Any) -> list[TraceItem]:
    return list(items_of(EngineConfig.of(model=MINI, **options), trace))


def test_lines_are_requests_with_their_own_lengths_and_shared_prefixes(tmp_path: Path) -> None:
    hello, who, once, end = items(written(tmp_path / "in.jsonl", LINES))
    assert [x.id for x in (hello, who, once, end)] == ["line-0", "line-1", "line-2-0", "line-2-1"]
    assert {x.at for x in (hello, who, once, end)} == {0.0}
    text = text_side(EngineConfig.of(model=MINI))
    assert once.n_prompt == len(text.tokenizer.encode("Once upon a time"))
    assert end.n_prompt == len(text.tokenizer.encode("The end"))
    assert [sum(n for *_, n in pieces) for pieces in once.outputs] == [9, 9]
    assert (hello.max_tokens, who.max_tokens) == (4, SPARE)
    stream, first, shared = hello.prompt[0]
    assert who.prompt[0] == (stream, first, min(shared, who.prompt[0][2]))
    assert who.prompt[0][2] >= 8, "the system message is one prefix"
    assert once.prompt[0][0] not in {stream, end.prompt[0][0]}


def test_an_answer_without_a_limit_ends_with_the_context(tmp_path: Path) -> None:
    [one] = items(written(tmp_path / "in.jsonl", LINES[1:2]), max_model_len=64)
    assert one.max_tokens == 64 - one.n_prompt


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ((CHAT, {"messages": []}), "line 2: "),
        ((TEXT, {"prompt": "x", "max_tokens": 0}), "max_tokens"),
        ((TEXT, {"prompt": "x", "max_tokens": 4000}), "context"),
        (("/v1/embeddings", {"input": "x"}), "url"),
        ((CHAT, {**LINES[0][1], "response_format": {"type": "json_object"}}), "structured output"),
    ],
)
def test_a_line_that_cannot_be_asked_is_named(
    line: tuple[str, dict[str, Any]], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        items(written(tmp_path / "in.jsonl", [LINES[0], line]))
    assert caught.value.field == "trace"


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    trace = written(tmp_path / "in.jsonl", LINES)
    config = EngineConfig.of(model="llama-3.1-8b")
    with pytest.raises(ConfigError, match="tokenizer") as caught:
        items_of(config, trace)
    assert caught.value.field == "trace"


def test_other_files_are_no_batches(tmp_path: Path) -> None:
    for text in ("", "x", '{"type": "start"}\n', '{"format": "jserve-trace-1"}\n', "[]\n"):
        (tmp_path / "x").write_text(text)
        assert not is_batch(tmp_path / "x")
    assert not is_batch(tmp_path / "nothing")


def test_the_command_simulates_it(tmp_path: Path) -> None:
    words = ["--spec", "tp=1", "--simulate", "--json", "--trace"]
    trace = written(tmp_path / "in.jsonl", LINES)
    done = CliRunner().invoke(app, ["bench", "shard", MINI, *words, trace])
    assert done.exit_code == 0, done.output
    [row] = json.loads(done.stdout)["specs"]
    assert row["simulated"]["ttft_p99_ms"] > 0
