"""``run-batch`` over the fake engine: the format, resuming after any end, what is tried again, signals."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
from pathlib import Path

import pytest
from aiohttp import web

from jserve.api.batch.answers import AnswerFile, name_of
from jserve.api.batch.lines import survey
from jserve.api.batch.run import TRIES, Outcome, run_batch, tally
from jserve.api.http.app import make_app
from jserve.config import EngineConfig
from jserve.errors import ConfigError, Overloaded
from jserve.text.chat.template import ChatTemplate
from jserve.types import Lane
from tests.api.fake import CHATML, SPECIAL, FakeEngine, byte_tokenizer, card, chat_body

CHAT, COMP = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, url: str = COMP, **body) -> dict:
    body = body or {"prompt": custom_id}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def written(path: Path, lines) -> Path:
    raw = [text if isinstance(text, bytes) else json.dumps(text).encode() for text in lines]
    path.write_bytes(b"".join(text + b"\n" for text in raw))
    return path


def application(engine: FakeEngine):
    chat = ChatTemplate({"default": CHATML}, control=SPECIAL)
    return make_app(EngineConfig.of(), engine, byte_tokenizer(), chat, card())


async def answered(
    source: Path,
    target: Path,
    engine: FakeEngine | None = None,
    *,
    app: web.Application | None = None,
    concurrency: int = 3,
    grace_s: float = 5.0,
) -> Outcome:
    answers = AnswerFile(target)
    try:
        outcome = tally(source, survey(source), answers.answered)
        return await run_batch(
            app or application(engine or FakeEngine()),
            source,
            answers,
            outcome,
            concurrency=concurrency,
            grace_s=grace_s,
        )
    finally:
        answers.close()


def records(path: Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()]


async def test_every_endpoint_answers_as_over_http(tmp_path: Path) -> None:
    lines = [
        line("chat", CHAT, **chat_body()),
        line("text", COMP, prompt="x", n=2),
        line("tokens", "/tokenize", prompt="hey"),
    ]
    target = tmp_path / "out"
    engine = FakeEngine(("good",))
    outcome = await answered(written(tmp_path / "in", lines), target, engine)
    assert (outcome.answered, outcome.failed, outcome.exit_code) == (3, 0, 0)
    found = {r["custom_id"]: r for r in records(target)}
    assert all(r["error"] is None and r["id"].startswith("batch_req_") for r in found.values())
    assert len({r["id"] for r in found.values()}) == 3
    answers = {name: r["response"] for name, r in found.items()}
    assert all(a["status_code"] == 200 and len(a["request_id"]) == 32 for a in answers.values())
    assert answers["chat"]["body"]["choices"][0]["message"]["content"] == "good"
    assert len(answers["text"]["body"]["choices"]) == 2
    assert answers["tokens"]["body"]["count"] == 3
    assert {record.request.lane for record in engine.records} == {Lane.BULK}


async def test_a_lane_of_its_own_is_kept(tmp_path: Path) -> None:
    source = written(tmp_path / "in", [line("a", COMP, prompt="x", lane="interactive")])
    engine = FakeEngine()
    await answered(source, tmp_path / "out", engine)
    assert engine.records[0].request.lane is Lane.INTERACTIVE


BAD = [
    (b"{not json", None, None),
    (b'{"custom_id": "x"', None, None),
    (b"\xff\xfe", None, None),
    (b"[1, 2]", None, None),
    ({"method": "POST", "url": COMP, "body": {}}, None, "custom_id"),
    (line("") | {"custom_id": 7}, None, "custom_id"),
    (line("m") | {"method": "GET"}, "m", "method"),
    (line("u") | {"url": "v1/completions"}, "u", "url"),
    (line("v") | {"url": None}, "v", "url"),
    (line("b") | {"body": [1]}, "b", "body"),
    (line("s", COMP, prompt="x", stream=True), "s", "body.stream"),
]


@pytest.mark.parametrize(("bad", "custom_id", "field"), BAD)
async def test_a_bad_line_is_answered_and_hurts_no_other(
    tmp_path: Path, bad, custom_id, field
) -> None:
    source = written(tmp_path / "in", [line("a"), bad, line("z")])
    outcome = await answered(source, tmp_path / "out")
    assert (outcome.answered, outcome.failed, outcome.exit_code) == (3, 1, 1)
    found = {name_of(r): r for r in records(tmp_path / "out")}
    assert found["a"]["response"]["status_code"] == found["z"]["response"]["status_code"] == 200
    record = found[custom_id or 2]
    assert (record["custom_id"], record["response"]) == (custom_id, None)
    error = record["error"]
    assert (error["code"], error["param"], error["line"]) == ("invalid_line", field, 2)
    assert error["message"].startswith("line 2: ")
    again = await answered(source, tmp_path / "out")
    assert (again.answered, again.exit_code) == (3, 1), "a failure is an answer, and is remembered"
    assert len(records(tmp_path / "out")) == 3


async def test_errors_of_the_server_keep_their_shape(tmp_path: Path) -> None:
    lines = [
        line("hot", COMP, prompt="x", temperature=9),
        line("model", COMP, prompt="x", model="gpt-9"),
        line("path", "/v1/nothing", prompt="x"),
        line("odd", "/v1/[", prompt="x"),
        line("get", "/v1/models", prompt="x"),
    ]
    outcome = await answered(written(tmp_path / "in", lines), tmp_path / "out")
    assert (outcome.answered, outcome.failed, outcome.exit_code) == (5, 5, 1)
    found = {r["custom_id"]: r["response"] for r in records(tmp_path / "out")}
    assert found["hot"]["status_code"] == 400
    assert found["hot"]["body"]["error"]["param"] == "temperature"
    assert found["model"]["body"]["error"]["code"] == "model_not_found"
    assert [found[name]["status_code"] for name in ("path", "odd", "get")] == [404, 404, 405]


async def test_a_double_custom_id_costs_its_line_and_no_other(tmp_path: Path) -> None:
    source = written(tmp_path / "in", [line("a"), line("b"), line("a", prompt="other"), line("c")])
    outcome = await answered(source, tmp_path / "out")
    assert (outcome.total, outcome.answered, outcome.failed, outcome.exit_code) == (4, 4, 1, 1)
    found = {name_of(r): r for r in records(tmp_path / "out")}
    assert set(found) == {"a", "b", "c", 3}
    assert all(found[name]["response"]["status_code"] == 200 for name in "abc")
    error = found[3]["error"]
    assert (error["param"], error["line"]) == ("custom_id", 3)
    assert error["message"] == "line 3: line 1 has the same custom_id 'a'"
    again = await answered(source, tmp_path / "out")
    assert (again.answered, again.failed) == (4, 1)
    assert len(records(tmp_path / "out")) == 4, "nothing is asked again"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        survey(tmp_path / "none")


N = 6


async def test_resume_at_every_line_and_at_every_torn_byte(tmp_path: Path) -> None:
    """However a run was cut short, the next one asks what is missing, once, and nothing else."""
    lines = [*(line(f"r{i}") for i in range(N - 1)), b"{torn"]
    source = written(tmp_path / "in", lines)
    whole = tmp_path / "whole"
    await answered(source, whole, concurrency=1)
    raw = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(raw) if byte == ord("\n")]
    cuts = {
        0,
        *ends,
        *(end - 1 for end in ends),
        *(end - 40 for end in ends),
        *range(3, len(raw), 211),
    }
    for cut in sorted(cuts):
        target = tmp_path / "cut"
        target.write_bytes(raw[:cut])
        kept = sum(end <= cut + 1 for end in ends)  # a record that lacks but its newline is whole
        engine = FakeEngine()
        outcome = await answered(source, target, engine, concurrency=2)
        assert (outcome.answered, outcome.failed, outcome.exit_code) == (N, 1, 1), cut
        assert target.read_bytes().startswith(raw[: ends[kept - 1] if kept else 0]), cut
        names = [name_of(r) for r in records(target)]
        assert sorted(map(str, names)) == sorted([*(f"r{i}" for i in range(N - 1)), str(N)]), cut
        assert len(engine.records) == max(0, N - 1 - kept), cut


def test_a_foreign_output_is_left_alone(tmp_path: Path) -> None:
    for text in (b"hello\n", b'{"a": 1}\n', json.dumps(line("a")).encode() + b"\n", b"[]\n1\n"):
        target = tmp_path / "out"
        target.write_bytes(text)
        with pytest.raises(ConfigError, match="line 1 is not an answer"):
            AnswerFile(target)
        assert target.read_bytes() == text
    with pytest.raises(ConfigError, match="No such file"):
        AnswerFile(tmp_path / "no" / "out")


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with (tmp_path / "out").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another run"):
            AnswerFile(tmp_path / "out")
    AnswerFile(tmp_path / "out").close()


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_concurrency_is_bounded(tmp_path: Path, concurrency: int) -> None:
    engine = FakeEngine(("ab",))
    engine.first_delay = 0.01
    most = 0
    begin = engine.generate

    async def counted(request):
        nonlocal most
        async for output in begin(request):
            most = max(most, engine.n_active)
            yield output

    engine.generate = counted
    source = written(tmp_path / "in", [line(f"r{i}") for i in range(12)])
    outcome = await answered(source, tmp_path / "out", engine, concurrency=concurrency)
    assert (outcome.answered, most) == (12, concurrency)


async def test_a_full_queue_is_waited_for(tmp_path: Path, monkeypatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def quick(seconds: float, *rest) -> None:
        waits.append(seconds)
        await sleep(0)

    engine = FakeEngine()
    begin, refusals = engine.generate, iter(range(3))

    async def refusing(request):
        if next(refusals, None) is not None:
            raise Overloaded("the queue is full", retry_after=7)
        async for output in begin(request):
            yield output

    engine.generate = refusing
    source = written(tmp_path / "in", [line("a"), line("b")])
    monkeypatch.setattr("jserve.api.batch.run.asyncio.sleep", quick)
    outcome = await answered(source, tmp_path / "out", engine)
    assert (outcome.answered, outcome.failed) == (2, 0)
    assert waits.count(7.0) >= 3


@pytest.mark.parametrize("n_breaks", [1, 2, 9])
async def test_a_connection_that_breaks_costs_one_line_at_most(
    tmp_path: Path, monkeypatch, n_breaks: int
) -> None:
    """The line is asked again; if that does not help it gets an error, and the others go on."""
    monkeypatch.setattr("jserve.api.batch.run.BROKEN_WAIT_S", 0.0)
    served, breaks = application(FakeEngine()), iter(range(n_breaks))

    @web.middleware
    async def breaking(request, handler):
        if b"broken" in await request.read() and next(breaks, None) is not None:
            request.transport.close()
        return await handler(request)

    served.middlewares.append(breaking)
    source = written(tmp_path / "in", [line("a"), line("broken"), line("b"), line("c")])
    outcome = await answered(source, tmp_path / "out", app=served, concurrency=2)
    n_failed = int(n_breaks >= TRIES)
    assert (outcome.answered, outcome.failed, outcome.exit_code) == (4, n_failed, n_failed)
    found = {r["custom_id"]: r for r in records(tmp_path / "out")}
    assert set(found) == {"a", "b", "c", "broken"}
    error = found["broken"]["error"]
    assert (error and error["code"]) == ("no_answer" if n_failed else None)
    if n_failed:
        assert "line 2" in error["message"]
        assert "ServerDisconnectedError" in error["message"]
        assert next(breaks) == TRIES


async def test_a_connection_that_breaks_with_the_engine_leaves_the_line(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("jserve.api.batch.run.BROKEN_WAIT_S", 0.0)
    engine = FakeEngine()
    served = application(engine)

    @web.middleware
    async def breaking(request, handler):
        engine.gave_up.set()
        engine.gave_up_reason = "it burnt"
        request.transport.close()
        return await handler(request)

    served.middlewares.append(breaking)
    source = written(tmp_path / "in", [line("a"), line("b")])
    outcome = await answered(source, tmp_path / "out", app=served, concurrency=1)
    assert (outcome.answered, outcome.exit_code) == (0, 1)
    assert "it burnt" in outcome.fault
    assert records(tmp_path / "out") == []


async def test_a_dead_engine_leaves_its_lines_to_the_next_run(tmp_path: Path) -> None:
    engine = FakeEngine()
    begin, first = engine.generate, iter([0, 1])

    async def dying(request):
        if next(first, None) is None:
            engine.gave_up.set()
            engine.gave_up_reason = "it burnt"
        async for output in begin(request):
            yield output

    engine.generate = dying
    source = written(tmp_path / "in", [line(f"r{i}") for i in range(8)])
    outcome = await answered(source, tmp_path / "out", engine, concurrency=1)
    assert (outcome.answered, outcome.exit_code) == (2, 1)
    assert "it burnt" in outcome.fault
    assert (await answered(source, tmp_path / "out")).exit_code == 0
    assert len(records(tmp_path / "out")) == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_one_signal_finishes_what_runs(tmp_path: Path, number: int) -> None:
    engine = FakeEngine(("ab",))
    engine.first_delay = 0.05
    source = written(tmp_path / "in", [line(f"r{i}") for i in range(20)])
    asyncio.get_running_loop().call_later(0.12, os.kill, os.getpid(), number)
    outcome = await answered(source, tmp_path / "out", engine, concurrency=4)
    assert 0 < outcome.answered < 20
    assert outcome.exit_code == 128 + number
    assert [record.n_sent for record in engine.records] == [3] * outcome.answered, (
        "none was cut off"
    )
    assert outcome.answered == len(records(tmp_path / "out")) == len(engine.records)
    assert (await answered(source, tmp_path / "out")).exit_code == 0
    assert {r["custom_id"] for r in records(tmp_path / "out")} == {f"r{i}" for i in range(20)}


@pytest.mark.parametrize("patient", [True, False])
async def test_a_second_signal_or_the_end_of_patience_cuts_off(
    tmp_path: Path, patient: bool
) -> None:
    engine = FakeEngine()
    engine.first_delay = 60
    source = written(tmp_path / "in", [line(f"r{i}") for i in range(5)])
    loop = asyncio.get_running_loop()
    for at in (0.2, 0.4) if patient else (0.2,):
        loop.call_later(at, os.kill, os.getpid(), signal.SIGINT)
    grace_s = 50.0 if patient else 0.2
    outcome = await asyncio.wait_for(
        answered(source, tmp_path / "out", engine, concurrency=2, grace_s=grace_s), 20
    )
    assert (outcome.answered, outcome.exit_code) == (0, 130)
    assert len(engine.records) == 2
    assert all(record.cancelled_at is not None for record in engine.records)
    assert (tmp_path / "out").read_bytes() == b""
