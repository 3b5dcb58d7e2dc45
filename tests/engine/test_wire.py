"""Frames and messages: round trips in any pieces, limits, malformed frames on a live engine."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jserve.config import EngineConfig
from jserve.engine.process import run
from jserve.engine.wire import (
    MAX_MESSAGE_BYTES,
    Cancel,
    Control,
    Fault,
    FromEngine,
    LinkClosed,
    Outputs,
    Progress,
    Ready,
    Shutdown,
    SocketLink,
    Start,
    Stats,
    StepRecord,
    Submit,
    ToEngine,
    TooLarge,
    decoder,
    pack,
    take_frames,
)
from jserve.sampling import SamplingParams
from jserve.types import Finish, Output, Request, TokenLogprob
from tests.engine.fakes import FakeScheduler, build, expected, request

REQUEST = Request(
    id="r-1",
    prompt_ids=(1, 2, 3),
    params=SamplingParams(
        seed=-(2**63), stop=("é",), logit_bias={5: -100.0}, allowed_token_ids=(1, 2), n=2
    ),
    eos_ids=(0,),
    arrival=1.5,
    cache_salt="s",
)
OUTPUT = Output(
    request_id="r-1",
    index=1,
    token_ids=(7, 8),
    logprobs=(TokenLogprob(token=7, logprob=-0.5, top_ids=(7,), top_logprobs=(-0.5,)),),
    prompt_logprobs=(None, TokenLogprob(token=2, logprob=-1.0)),
    extra={"echo": (7, 8)},
    prompt_extra={"echo": (1, 2, 3)},
    finish=Finish.STOP,
    stop_reason=8,
    seed=2**63 - 1,
)
NO_NUMBERS = np.array([object()])
ARRAYS = (
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array([[1, -2]], np.int8),
    np.zeros((0, 4), np.float16),
    np.array(True),
)
TO = [
    Start(config=EngineConfig().flat()),
    Submit(request=REQUEST),
    Cancel(request_id="r-1", index=2),
    Control(id="c-1", action="reset_prefix_cache"),
    Shutdown(),
]
FROM = [
    Progress(stage="compile", done=1, total=9),
    Ready(info={"model": "m", "limits": {"n_slots": 3}}),
    Outputs(step=3, outputs=[OUTPUT]),
    Stats(
        step=4,
        waiting=1,
        running=2,
        in_flight=1,
        values={"x_total": 2.0},
        steps=[
            StepRecord(
                at=1.5,
                device_us=7.0,
                n_rows=3,
                n_prefill_rows=1,
                n_prefill_tokens=64,
                n_drawn=2,
            )
        ],
    ),
    Fault(message="no", code="config_error", field="model", fatal=True),
]


@pytest.fixture
def pair():
    a, b = socket.socketpair()
    links = SocketLink(a, FromEngine), SocketLink(b, ToEngine)
    yield links
    for link in links:
        link.close()


def test_every_message_to_the_engine_arrives_equal(pair):
    front, engine = pair
    for message in TO:
        front.send(message)
    got = engine.receive(1)
    assert got[1:] == TO[1:]
    assert EngineConfig.of(**got[0].config) == EngineConfig()


def test_every_message_from_the_engine_arrives_equal(pair):
    front, engine = pair
    for message in FROM:
        engine.send(message)
    assert front.receive(1) == FROM


def test_numpy_numbers_cross_as_plain_ones(pair):
    front, engine = pair
    out = Output(request_id="a", index=0, token_ids=(np.int32(5),))  # type: ignore[arg-type]
    engine.send(Outputs(step=1, outputs=[out]))
    (got,) = front.receive(1)
    assert got.outputs[0].token_ids == (5,)
    assert type(got.outputs[0].token_ids[0]) is int


def test_other_objects_do_not_cross():
    with pytest.raises(TypeError, match="cannot cross the wire"):
        pack(Ready(info={"x": object()}))


@given(
    messages=st.lists(st.sampled_from(TO), max_size=5),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
)
def test_frames_survive_any_cutting(messages, cuts):
    data = b"".join(map(pack, messages))
    edges = [0, *sorted(c for c in cuts if c < len(data)), len(data)]
    buffer, payloads = bytearray(), []
    for a, b in itertools.pairwise(edges):
        buffer += data[a:b]
        payloads += take_frames(buffer)
    assert [b"" + struct.pack("<I", len(p)) + p for p in payloads] == list(map(pack, messages))
    assert not buffer


def test_a_length_above_the_limit_ends_the_link():
    with pytest.raises(LinkClosed, match="above the limit"):
        take_frames(bytearray(struct.pack("<I", MAX_MESSAGE_BYTES + 1)))


def test_a_message_above_the_limit_is_not_sent():
    with pytest.raises(TooLarge, match="exceeds the limit"):
        pack(Ready(info={"x": b"\0" * (MAX_MESSAGE_BYTES + 1)}))


BROKEN = [
    b"",
    b"\xc1",
    b"\x93\x01\x02",
    msgspec.msgpack.encode({"type": "nonsense"}),
    msgspec.msgpack.encode({"type": "submit"}),
    msgspec.msgpack.encode({"type": "submit", "request": {"id": 5}}),
    msgspec.msgpack.encode(
        {"type": "submit", "request": {"id": "a", "prompt_ids": [1], "params": {"n": 0}}}
    ),
    b"\x81" * 5000,
]


@pytest.mark.parametrize("payload", BROKEN)
def test_a_malformed_frame_is_a_fault_between_good_ones(pair, payload):
    front, engine = pair
    front.send(TO[2])
    front.send_frame(struct.pack("<I", len(payload)) + payload)
    front.send(TO[3])
    before, fault, after = engine.receive(1)
    assert (before, after) == (TO[2], TO[3])
    assert isinstance(fault, Fault)
    assert fault.code == "malformed"
    assert not fault.fatal


@given(st.binary(max_size=200))
def test_no_payload_raises(payload):
    a, b = socket.socketpair()
    with a, b:
        link = SocketLink(b, ToEngine)
        a.sendall(struct.pack("<I", len(payload)) + payload)
        assert len(link.receive(1)) == 1


def test_receive_waits_no_longer_than_asked(pair):
    front, _ = pair
    begun = time.monotonic()
    assert front.receive(0.0) == []
    assert front.receive(0.05) == []
    assert 0.04 < time.monotonic() - begun < 1.0


def test_a_closed_end_is_seen_by_the_other(pair):
    front, engine = pair
    front.close()
    with pytest.raises(LinkClosed):
        engine.receive(1)
    with pytest.raises(LinkClosed):
        engine.send(Stats())


@pytest.fixture
def served():
    """The front's end of a link to an engine that serves in a thread."""
    a, b = socket.socketpair()
    front = SocketLink(a, FromEngine)
    codes = []
    thread = threading.Thread(
        target=lambda: codes.append(run(SocketLink(b, ToEngine), build, alone=False))
    )
    thread.start()
    yield front, thread, codes
    front.close()
    thread.join(5)
    assert not thread.is_alive()


def until(front, kind, timeout_s=5.0):
    """Messages up to the first of type ``kind``."""
    got, end = [], time.monotonic() + timeout_s
    while not any(isinstance(m, kind) for m in got):
        assert time.monotonic() < end, got
        got += front.receive(0.1)
    return got


def test_an_engine_answers_a_malformed_message_and_serves_on(served):
    front, _, _ = served
    front.send(TO[0])
    assert [type(m) for m in until(front, Ready)] == [Progress, Progress, Ready]
    for payload in BROKEN:
        front.send_frame(struct.pack("<I", len(payload)) + payload)
    front.send_frame(pack(Stats()))
    front.send(TO[0])
    faults = []
    while len(faults) < len(BROKEN) + 2:
        faults += until(front, Fault)
    assert all(f.code == "malformed" and not f.fatal for f in faults)
    assert "unexpected Start" in faults[-1].message
    front.send(Submit(request=request("a", max_tokens=3)))
    drawn = []
    while len(drawn) < 3:
        for m in until(front, Outputs):
            drawn += [t for o in getattr(m, "outputs", ()) for t in o.token_ids]
    assert drawn == expected(request("a", max_tokens=3))


def drawn_until_ends(front, n_ends):
    """Request id -> (tokens, finish, error code), once ``n_ends`` choices have ended."""
    tokens, ends = {}, {}
    while len(ends) < n_ends:
        for message in until(front, Outputs):
            for out in getattr(message, "outputs", ()):
                tokens.setdefault(out.request_id, []).extend(out.token_ids)
                if out.finish is not None:
                    ends.setdefault(out.request_id, (out.finish, out.error_code))
    return tokens, ends


def test_a_step_that_brings_more_than_a_message_holds_comes_in_parts(served, monkeypatch):
    front, _, codes = served
    front.send(TO[0])
    until(front, Ready)
    asked = [request(f"{i}" * 20_000, n_prompt=3 + i, max_tokens=6) for i in range(8)]
    monkeypatch.setattr("jserve.engine.wire.MAX_MESSAGE_BYTES", 50_000)  # two outputs, not three
    for r in asked:
        front.send(Submit(request=r))
    tokens, ends = drawn_until_ends(front, len(asked))
    assert tokens == {r.id: expected(r) for r in asked}
    assert set(ends.values()) == {(Finish.LENGTH, None)}
    assert codes == []


def test_an_output_that_no_message_holds_ends_its_choice_alone(served, monkeypatch):
    front, _, codes = served
    front.send(TO[0])
    until(front, Ready)
    commit, big, small = FakeScheduler.commit, request("big", max_tokens=50), request("small")
    scored = (TokenLogprob(token=1, logprob=-1.0),) * 5000

    def commit_scored(*args):
        told = commit(*args)
        return [
            msgspec.structs.replace(o, prompt_logprobs=scored) if o.request_id == "big" else o
            for o in told
        ]

    monkeypatch.setattr(FakeScheduler, "commit", commit_scored)
    monkeypatch.setattr("jserve.engine.wire.MAX_MESSAGE_BYTES", 50_000)
    for r in (big, small):
        front.send(Submit(request=r))
    tokens, ends = drawn_until_ends(front, 2)
    assert tokens == {"big": [], "small": expected(small)}
    assert ends == {"big": (Finish.ERROR, "answer_too_large"), "small": (Finish.LENGTH, None)}
    assert codes == []


def test_an_oversized_frame_ends_the_engine_cleanly(served):
    front, thread, codes = served
    front.send(TO[0])
    until(front, Ready)
    front.send_frame(struct.pack("<I", 2**32 - 1))
    thread.join(5)
    assert codes == [0]


def test_shutdown_and_a_closed_link_end_the_engine(served):
    front, thread, codes = served
    front.send(TO[0])
    until(front, Ready)
    front.send(Submit(request=request("a", max_tokens=4000)))
    until(front, Outputs)
    front.send(Shutdown())
    thread.join(5)
    assert codes == [0]


@pytest.mark.parametrize("wrong", [{"nonsense": 1}, {"page_size": 7}])
def test_a_wrong_config_is_exit_code_2_and_names_its_option(served, wrong):
    front, thread, codes = served
    front.send(Start(config=wrong))
    fault = until(front, Fault)[-1]
    thread.join(5)
    assert (fault.fatal, fault.code, fault.field) == (True, "config_error", next(iter(wrong)))
    assert codes == [2]


def test_a_first_message_that_is_not_start_is_refused(served):
    front, thread, codes = served
    front.send(Shutdown())
    assert until(front, Fault)[-1].fatal
    thread.join(5)
    assert codes == [2]


def test_the_heap_is_frozen_after_the_start_and_only_where_asked(pair, monkeypatch):
    front, engine = pair
    calls = []
    monkeypatch.setattr("jserve.engine.process.gc.freeze", lambda: calls.append("freeze"))
    for alone in (False, True):
        front.send(TO[0])
        front.send(Shutdown())
        assert run(engine, build, alone=alone) == 0
    assert calls == ["freeze"]


def test_an_idle_engine_does_not_spin(served):
    front, _, _ = served
    front.send(TO[0])
    until(front, Ready)
    front.send(Submit(request=request("a", max_tokens=2)))
    while front.receive(0.1):
        pass
    begun = time.process_time()
    assert front.receive(0.5) == []
    assert time.process_time() - begun < 0.1


def test_values_of_step_features_cross_as_arrays() -> None:
    """In as many bytes as they have, and whoever reads them gets their type and shape."""
    here, there = socket.socketpair()
    sender, receiver = SocketLink(here, ToEngine), SocketLink(there, FromEngine)
    large = np.linspace(0, 1, 4096, dtype=np.float32)
    output = Output(request_id="r", index=0, extra={"tap": (*ARRAYS, large)}, prompt_extra=None)
    assert len(pack(Outputs(step=1, outputs=[output]))) < large.nbytes + 500
    sender.send(Outputs(step=1, outputs=[output]))
    (message,) = receiver.receive(5.0)
    found = message.outputs[0].extra["tap"]
    for sent, got in zip((*ARRAYS, large), found, strict=True):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        np.testing.assert_array_equal(got, sent)
    here.close()
    there.close()


def test_all_who_read_messages_read_arrays() -> None:
    """An engine in a process, one behind Ray, and the fake one of the fleet's tests: nobody makes a decoder himself."""
    root = Path(__file__).parents[2]
    for folder in ("jserve/engine", "jserve/fleet", "tests/fleet"):
        made = [
            p.name for p in (root / folder).rglob("*.py") if "msgpack.Decoder(" in p.read_text()
        ]
        assert made == (["wire.py"] if folder == "jserve/engine" else []), folder
    output = Output(request_id="r", index=0, extra={"tap": (ARRAYS[0],)}, prompt_extra=None)
    frames = bytearray(pack(Outputs(step=1, outputs=[output])))
    [message] = map(decoder(FromEngine).decode, take_frames(frames))
    np.testing.assert_array_equal(message.outputs[0].extra["tap"][0], ARRAYS[0])


def test_an_array_that_is_none_is_reported() -> None:
    with pytest.raises(TypeError, match="ndarray cannot cross"):
        pack(Outputs(step=1, outputs=[Output(request_id="r", index=0, extra={"x": (NO_NUMBERS,)})]))
    here, there = socket.socketpair()
    receiver = SocketLink(there, FromEngine)
    wrong = [
        msgspec.msgpack.Ext(1, b"x"),
        msgspec.msgpack.Ext(1, msgspec.msgpack.encode(("|O", (1,), b"12345678"))),
        msgspec.msgpack.Ext(1, msgspec.msgpack.encode(("<f4", (3,), b"1234"))),
        msgspec.msgpack.Ext(1, msgspec.msgpack.encode(("no type", (1,), b"1234"))),
        msgspec.msgpack.Ext(7, b""),
    ]
    for each in wrong:
        payload = msgspec.msgpack.encode({"type": "ready", "info": {"x": each}})
        here.sendall(struct.pack("<I", len(payload)) + payload)
        (message,) = receiver.receive(5.0)
        assert isinstance(message, Fault), each
        assert message.code == "malformed"
    here.close()
    there.close()
