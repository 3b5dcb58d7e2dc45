"""Streams: the same text as the whole answer, their shape on random outputs, faults, keep-alive."""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, given, settings, strategies as st

from jserve.types import Finish, Output
from tests.api.fake import FakeEngine, chat_body, live

CHAT, COMP = "/v1/chat/completions", "/v1/completions"

outputs = st.lists(st.lists(st.integers(0, 258), min_size=1, max_size=6), min_size=1, max_size=8)


class Scripted(FakeEngine):
    """Plays given batches of ids per choice; choices end in different ways."""

    def __init__(self, choices: list[list[list[int]]], finishes: list[Finish]) -> None:
        super().__init__()
        self.choices, self.finishes = choices, finishes

    def script(self, request, index):
        batches = self.choices[index]
        last = len(batches) - 1
        return [
            Output(
                request_id=request.id,
                index=index,
                token_ids=tuple(ids),
                finish=self.finishes[index] if number == last else None,
                seed=index if number == 0 else None,
            )
            for number, ids in enumerate(batches)
        ]


def check_shape(events: list, n: int) -> dict[int, str]:
    """The contract of a chat stream; the text of every choice."""
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    assert events[-2]["choices"] == []
    state = dict.fromkeys(range(n), "new")
    texts = dict.fromkeys(range(n), "")
    for event in events[:-2]:
        (choice,) = event["choices"]
        i = choice["index"]
        if state[i] == "new":
            assert choice["delta"] == {"role": "assistant", "content": ""}
            state[i] = "open"
        elif choice["finish_reason"] is None:
            assert state[i] == "open"
            assert set(choice["delta"]) == {"content"}
            assert choice["delta"]["content"]
            texts[i] += choice["delta"]["content"]
        else:
            assert state[i] == "open"
            assert set(choice["delta"]) <= {"content"}
            texts[i] += choice["delta"].get("content", "")
            assert choice["finish_reason"] in ("stop", "length")
            state[i] = "closed"
    assert set(state.values()) == {"closed"}
    return texts


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    choices=st.lists(outputs, min_size=1, max_size=3),
    stops=st.lists(st.sampled_from(["a", "ab", "\x80", "é", "zz", "\n"]), max_size=2),
    ends=st.lists(st.sampled_from([Finish.STOP, Finish.LENGTH]), min_size=3, max_size=3),
    include=st.booleans(),
    skip=st.booleans(),
)
def test_stream_equals_whole(choices, stops, ends, include, skip):
    async def run():
        engine = Scripted(choices, ends)
        async with live(engine) as srv:
            fields = {
                "n": len(choices),
                "stop": stops,
                "include_stop_str_in_output": include,
                "skip_special_tokens": skip,
            }
            _, whole, _ = await srv.post(CHAT, chat_body(**fields))
            asked = fields | {"stream_options": {"include_usage": True}}
            events = await srv.events(CHAT, chat_body(**asked))
            texts = check_shape(events, len(choices))
            assert texts == {c["index"]: c["message"]["content"] for c in whole["choices"]}
            assert events[-2]["usage"] == whole["usage"]
            reasons = {
                c["index"]: (c["finish_reason"], c.get("stop_reason"))
                for e in events[:-2]
                for c in e["choices"]
                if c["finish_reason"]
            }
            assert reasons == {
                c["index"]: (c["finish_reason"], c["stop_reason"]) for c in whole["choices"]
            }
            if not stops:
                for i, batches in enumerate(choices):
                    ids = [t for batch in batches for t in batch]
                    if ends[i] is Finish.STOP and not include:
                        ids = ids[:-1]
                    if skip:
                        ids = [t for t in ids if t < 256]
                        assert texts[i] == bytes(ids).decode("utf-8", "replace")
            _, text_whole, _ = await srv.post(COMP, {"prompt": "x"} | fields)
            text_events = await srv.events(COMP, {"prompt": "x"} | fields)
            joined = dict.fromkeys(range(len(choices)), "")
            for event in text_events[:-1]:
                joined[event["choices"][0]["index"]] += event["choices"][0]["text"]
            assert joined == {c["index"]: c["text"] for c in text_whole["choices"]}
            assert joined == texts

    asyncio.run(run())


async def test_a_fault_in_a_stream_is_an_error_event_without_done():
    engine = FakeEngine(("x" * 50,))
    engine.fail_at = 4
    async with live(engine) as srv:
        for path, body in ((CHAT, chat_body()), (COMP, {"prompt": "x"})):
            events = await srv.events(path, body)
            assert events[-1]["error"]["code"] == "engine_step_failed"
            assert events[-1]["error"]["type"] == "server_error"
            assert "[DONE]" not in events
            assert all(c["finish_reason"] is None for e in events[:-1] for c in e["choices"])


async def test_a_fault_in_a_stream_of_blocks_is_told_in_its_dialect():
    """Anthropic's clients raise on ``error``; OpenAI's on it too, behind a response that failed."""
    engine = FakeEngine(("x" * 50,))
    engine.fail_at = 4
    async with live(engine) as srv:
        user = [{"role": "user", "content": "hi"}]
        events = await srv.events("/v1/messages", {"messages": user, "max_tokens": 50})
        assert events[-1]["type"] == "error"
        assert events[-1]["error"]["type"] == "api_error"
        assert not {"message_delta", "message_stop"} & {e["type"] for e in events}
        events = await srv.events("/v1/responses", {"input": "hi"})
        assert [e["type"] for e in events[-2:]] == ["response.failed", "error"]
        assert events[-2]["response"]["error"]["code"] == "server_error"
        assert events[-1]["code"] == "engine_step_failed"
        assert [e["sequence_number"] for e in events] == list(range(len(events)))


async def test_an_exception_in_a_stream_is_an_error_event_too(caplog):
    engine = FakeEngine(("x" * 50,))
    engine.raise_at = (3, RuntimeError("private words"))
    async with live(engine) as srv:
        events = await srv.events(CHAT, chat_body())
        assert events[-1]["error"]["code"] == "internal_error"
        assert "[DONE]" not in events
        assert "private" not in str(events) + caplog.text
        assert engine.n_active == 0


async def test_an_engine_that_ends_early_is_an_error():
    engine = FakeEngine()
    async with live(engine) as srv:
        engine.script = lambda request, index: []  # type: ignore[method-assign]
        status, body, _ = await srv.post(COMP, {"prompt": "x"})
        assert (status, body["error"]["code"]) == (503, "engine_dead")


async def test_keep_alive_while_queued_and_between_tokens():
    engine = FakeEngine(("abc",))
    engine.first_delay = 0.25
    engine.delay = 0.15
    async with live(engine, keep_alive_s=0.05) as srv:
        events = await srv.events(CHAT, chat_body())
    comments = [i for i, e in enumerate(events) if e == ": keep-alive"]
    assert comments[0] == 0
    assert len(comments) >= 5
    texts = [e["choices"][0]["delta"].get("content") for e in events[:-1] if isinstance(e, dict)]
    assert "".join(t or "" for t in texts) == "abc"
    assert events[-1] == "[DONE]"


async def test_a_late_refusal_is_an_error_event():
    engine = FakeEngine()
    engine.first_delay, engine.fail_at = 0.2, 0
    async with live(engine, keep_alive_s=0.05) as srv:
        events = await srv.events(CHAT, chat_body())
    assert events[0] == ": keep-alive"
    assert "error" in events[-1]
    assert "[DONE]" not in events


async def test_no_keep_alive_when_off():
    engine = FakeEngine(("abc",))
    engine.first_delay = 0.2
    async with live(engine, keep_alive_s=0) as srv:
        events = await srv.events(CHAT, chat_body())
    assert ": keep-alive" not in events


async def test_the_status_waits_for_the_engine():
    """Within keep_alive_s a refusal still has its own status."""
    engine = FakeEngine()
    engine.first_delay, engine.fail_at = 0.2, 0
    engine.failure = {"error": "full", "error_code": "overloaded"}
    async with live(engine) as srv:
        status, body, _ = await srv.post(CHAT, chat_body(stream=True))
    assert (status, body["error"]["code"]) == (503, "overloaded")
