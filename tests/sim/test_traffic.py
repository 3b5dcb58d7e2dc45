"""Traffic: traces survive their file, generators keep their means, sessions contain their answers."""

from pathlib import Path

import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.request_options import Lane, Retention
from jserve.sim import trace, traffic
from jserve.sim.trace import EOS, Streams, TraceItem, request_of


def made(text: str, seed: int = 0) -> list[TraceItem]:
    return traffic.generate(traffic.parse(text), seed)


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    items = made("rate=5,n=20,turns=3,prefixes=2,prefix=64,lane=bulk,ttft_ms=500,tenants=3")
    items.append(
        TraceItem(
            id="odd",
            at=9.0,
            prompt=((1 << 40, 2, 3),),
            outputs=(((1, 0, 2),), ((2, 0, 4), (3, 1, 1))),
            cancels=((0.5, None), (0.7, 1)),
            retain=(Retention(start=2, priority=90),),
            session="s",
        )
    )
    path = tmp_path / "t.jsonl"
    assert trace.write(path, items, about="test") == len(items)
    assert trace.read(path) == items
    assert path.stat().st_size < 400 * len(items)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('{"id": "a"', "line 2"),
        ('{"id": "a", "at": 1}', "line 2"),
        ('{"id": "a", "at": 1, "prompt": [[1,0,4]], "outputs": [[[2,0,1]]], "x": 1}', "line 2"),
        ('{"id": "a", "at": -1, "prompt": [[1,0,4]], "outputs": [[[2,0,1]]]}', "negative time"),
        ('{"id": "a", "at": 1, "prompt": [], "outputs": [[[2,0,1]]]}', "no prompt"),
        ('{"id": "a", "at": 1, "prompt": [[1,0,0]], "outputs": [[[2,0,1]]]}', "piece"),
        ('{"id": "a", "at": 1, "after": "b", "prompt": [[1,0,1]], "outputs": [[[2,0,1]]]}', "'b'"),
    ],
)
def test_a_bad_trace_is_refused_by_line_or_request(tmp_path: Path, line: str, word: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"format": "jserve-trace-1"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=word):
        trace.read(path)
    path.write_text('{"format": "other"}\n')
    with pytest.raises(ConfigError, match="format"):
        trace.read(path)


def test_streams_differ_from_their_first_tokens_on_and_end_in_eos() -> None:
    streams = Streams()
    firsts = {tuple(streams.tokens(s, 0, 2)) for s in [*range(2000), 1 << 33]}
    assert len(firsts) == 2001
    whole = streams.tokens(9, 0, 50)
    assert streams.tokens(9, 1, 30) == whole[1:31]
    assert EOS not in whole
    item = TraceItem(id="a", at=0.0, prompt=((9, 0, 5),), outputs=(((8, 0, 4),),), max_tokens=6)
    answer = streams.answer(item, 0)
    assert answer[:3] == streams.tokens(8, 0, 3)
    assert set(answer[3:]) == {EOS}
    cut = TraceItem(id="a", at=0.0, prompt=((9, 0, 5),), outputs=(((8, 0, 4),),), max_tokens=4)
    assert streams.answer(cut, 0)[:4] == streams.tokens(8, 0, 4)


def test_the_same_seed_gives_the_same_traffic() -> None:
    text = "rate=5,n=50,turns=2;arrivals=bursty,rate=3,seconds=20,lane=bulk"
    assert made(text, 3) == made(text, 3)
    assert made(text, 3) != made(text, 4)
    firsts = [i.at for i in made(text, 3) if not i.after]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize("kind", ["poisson", "bursty", "even"])
def test_arrivals_keep_their_rate(kind: str) -> None:
    at = [i.at for i in made(f"rate=20,seconds=150,arrivals={kind},burst_s=0.1,prompt=4,output=2")]
    assert len(at) / 150 == pytest.approx(20, rel=0.12)
    gaps = np.diff(at)
    spread = gaps.std() / gaps.mean()
    low, high = {"poisson": (0.9, 1.1), "bursty": (1.15, 3), "even": (-1, 0.01)}[kind]
    assert low < spread < high


def test_lengths_keep_their_means_and_limits() -> None:
    items = made("rate=9,n=4000,prompt=300,prompt_sigma=0.5,output=80,output_sigma=0.5,limit=200")
    outputs = [i.outputs[0][0][2] for i in items]
    assert np.mean([i.n_prompt for i in items]) == pytest.approx(300, rel=0.05)
    assert np.mean(outputs) == pytest.approx(80, rel=0.05)
    assert max(outputs) <= 200
    assert {i.max_tokens for i in items} == {200}


def test_prefixes_are_zipf_and_tenants_named() -> None:
    items = made("rate=9,n=3000,prefixes=4,prefix=100,zipf=1,tenants=2")
    counts = np.bincount([i.prompt[0][0] for i in items])
    counts = sorted(counts[counts > 0], reverse=True)
    assert len(counts) == 4
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.2)
    assert {i.tenant for i in items} == {"t0", "t1"}


def test_a_next_turn_contains_the_last_answer_and_ends_at_the_context() -> None:
    items = made("rate=9,n=40,turns=6,context=600,prompt=100,follow=50,output=60")
    by_id = {i.id: i for i in items}
    followers = [i for i in items if i.after]
    assert len(followers) > 60
    streams = Streams()
    for item in followers:
        before = by_id[item.after]
        said = request_of(before, streams, 0.0).prompt_ids
        answer = streams.text(before.outputs[0])[:-1]
        assert request_of(item, streams, 0.0).prompt_ids[: len(said) + len(answer)] == (
            *said,
            *answer,
        )
        assert item.n_prompt + (item.max_tokens or 0) <= 600


def test_deadlines_and_lane_reach_the_request() -> None:
    [item] = made("n=1,lane=interactive,ttft_ms=250,tpot_ms=20,deadline_ms=9000,priority=2")
    request = request_of(item, Streams(), 5.0)
    assert (request.lane, request.priority, request.arrival) == (Lane.INTERACTIVE, 2, 5.0)
    assert request.ttft_deadline_ms == 250
    assert request.tpot_deadline_ms == 20
    assert request.deadline_ms == 9000


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("rate=5", "needs n or seconds"),
        ("rats=5,n=1", "did you mean 'rate'"),
        ("rate=0,n=1", "rate must be at least"),
        ("n=1,lane=vip", "lane must be one of"),
        ("n=1,prefix=4", "go together"),
        ("n=1,arrivals=bursty,burst=20", "burst"),
        ("n=1,rate", "not key=value"),
        ("n=1,prefixes=1,prefix=9000", "context"),
    ],
)
def test_bad_traffic_is_refused_naming_the_key(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        traffic.parse(text)
