"""Pause, sleep and other weights, over the real scheduler and a runner whose tokens betray the weights of pages."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jserve.engine.async_engine import AsyncEngine
from jserve.engine.client import InprocClient
from jserve.engine.engine import Engine
from jserve.engine.wire import Control
from jserve.errors import ConfigError, WeightsError
from jserve.kv_layout import Span
from jserve.sampling import SamplingParams
from jserve.sched.record.journal import JournalFile, Operated, Reweighed, read_events
from jserve.sched.record.replay import replay
from jserve.sched.scheduler import Scheduler
from jserve.testing.group_rows import GroupRow
from jserve.testing.model import mix
from jserve.testing.runner import FakeRunner
from jserve.types import Choice, Finish, Output, Request, RowPlan
from tests.engine.test_with_scheduler import CONFIG, LIMITS, by_choice, workload

WRONG, NOWHERE = "wrong", "nowhere"


class WeighedRunner(FakeRunner):
    """A fake whose weights are a number: KV and draws depend on it. With ``strict`` no row may read KV of other
    weights; else only a sequence that read it before they changed."""

    def __init__(self, limits: Any = LIMITS, *, strict: bool = True, step_s: float = 0.0) -> None:
        self.weights, self.strict = 0, strict
        self.old: int | None = None
        """The weights of before, beside the others."""
        self.turns: list[bool] = []
        """Of each step, whether it has them."""
        self.gone = ""
        """As ``LiveWeights.weights_fault``."""
        self.asleep: set[str] = set()
        self.seen: dict[tuple[str, int], set[int]] = defaultdict(set)
        """The numbers of what each sequence read."""
        self.n_written = 0
        super().__init__(limits, step_s=step_s)

    def reset(self) -> None:
        super().reset()
        self.n_old = 0
        """Steps in flight that have the weights of before."""
        self.weights_PZ = np.full(self.token_PZ.shape, -1, np.int64)
        self.written_PZ = np.zeros(self.token_PZ.shape, np.int64)
        """The number of what was written there last, wherever it is moved."""

    def _page_arrays(self) -> tuple[np.ndarray, ...]:
        return *super()._page_arrays(), self.weights_PZ, self.written_PZ

    def update_weights(
        self, source: Any, *, partial: bool, donate: bool, alias: bool, beside: bool = False
    ) -> str:
        assert self.old is None, "there are two versions already"
        assert self.n_collected == self.n_launched, "a step is in flight"
        if source == WRONG:
            raise WeightsError("params.a: shape", field="params.a")
        if source is None:
            raise ZeroDivisionError
        if source == NOWHERE:
            raise ConfigError("no such directory", field="model")
        number = source if isinstance(source, int) else int(Path(source).read_text())
        self.old = self.weights if beside else None
        self.weights, self.gone = number, ""
        return f"stamp {number}"

    def weights_fault(self) -> str:
        return self.gone

    def sleep(self, parts: Any) -> None:
        self.asleep |= {*parts}
        if "kv" in parts:
            self.token_PZ[...] = -1

    def wake(self, parts: Any) -> None:
        self.asleep -= {*parts}

    def launch(self, plan: Any) -> Any:
        assert not self.asleep, "a step while asleep"
        self.turns.append(plan.old_weights)
        if not plan.old_weights:
            return super().launch(plan)
        assert self.old is not None, "the weights of before are gone"
        weights, self.weights, self.n_old = self.weights, self.old, self.n_old + 1
        try:
            return super().launch(plan)
        finally:
            self.weights = weights

    def collect(self, flight: Any) -> Any:
        self.n_old -= flight.plan.old_weights
        return super().collect(flight)

    def end_beside(self) -> None:
        assert not self.n_old, "a step with the weights of before is in flight"
        self.old = None

    def _write(self, row: Any, pages: Any, start: int, tokens: Any, *rest: Any) -> None:
        super()._write(row, pages, start, tokens, *rest)
        mine = self.seen[row.choice.request.id, row.choice.index]
        for group in pages:
            new = group.cells(np.arange(start, start + len(tokens)))
            self.ctx_PZ[new] ^= np.uint64(mix(self.weights))
            self.weights_PZ[new] = self.weights
            self.written_PZ[new] = self.n_written + np.arange(len(tokens))
            self.n_written += len(tokens)
            cells = group.cells(np.arange(start + len(tokens)))
            for weights, n in zip(self.weights_PZ[cells], self.written_PZ[cells], strict=True):
                known = int(n)
                fits = weights == self.weights or (not self.strict and known in mine)
                assert fits, f"KV of weights {weights} is read under {self.weights}"
                mine.add(known)

    def _seen_N(self, pages: Any, start: int, n: int) -> list[int]:
        return [seen ^ mix(self.weights) for seen in super()._seen_N(pages, start, n)]


def next_token(
    request: Request, tokens: list[int], weights: int, *, vocab_size: int = LIMITS.vocab_size
) -> int:
    """What an engine that never had other ``weights`` draws after ``tokens``."""
    fresh = WeighedRunner(dataclasses.replace(LIMITS, vocab_size=vocab_size))
    fresh.weights = weights
    n, Z = len(tokens), LIMITS.page_size
    pages = [
        GroupRow(
            pages_M=np.arange(1, 1 + LIMITS.max_model_len // Z),
            number=0,
            span=Span(),
            sinks=0,
            page_size=Z,
            wraps=False,
        )
    ]
    choice = Choice(request=request, index=0, seed=0)
    row = RowPlan(choice=choice, slot=0, start=0, count=n, from_slot=False, tokens=tokens)
    fresh._write(row, pages, 0, tokens, set(), 0)
    seen = int(fresh._seen_N(pages, 0, n)[-1])
    return fresh.model.draw(seen, n, 0, request.params, (), 0)


def engine_of(overlap: int = 1, *, strict: bool = True, step_s: float = 0.0, **more: Any) -> Engine:
    runner = WeighedRunner(strict=strict, step_s=step_s)
    return Engine(Scheduler(LIMITS, CONFIG, **more), runner, overlap=overlap)


def ask(engine: Engine, action: Any, **fields: Any) -> Control:
    asked = Control(id=f"{action}-{engine.n_steps}", action=action, **fields)
    engine.ask(asked)
    return asked


def told(engine: Engine, action: Any, **fields: Any) -> tuple[Any, list[Output]]:
    ask(engine, action, **fields)
    outputs = engine.step()
    (answer,) = engine.take_answers()
    return answer, outputs


def run(engine: Engine, requests: list[Request], rng: random.Random, policies: list[str]) -> Any:
    """Outputs, while weights change now and then."""
    outputs, left, version = [], list(requests), 0
    while left or engine.busy:
        while left and rng.random() < 0.4:
            engine.submit(left.pop())
        if policies and rng.random() < 0.12:
            version += 1
            fields = {"source": version, "version": f"v{version}", "running": rng.choice(policies)}
            ask(engine, "update_weights", **fields)
        outputs += engine.step()
        assert all(a.error_code in (None, "operation_pending") for a in engine.take_answers())
    assert engine.scheduler.counters()["step_faults_total"] == 0, "an assertion of the runner"
    return outputs


def versions(outputs: list[Output]) -> dict[tuple[str, int], list[int]]:
    """Of each choice the weights of each of its tokens."""
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for out in outputs:
        found[out.request_id, out.index] += [int(out.weights.lstrip("v"))] * len(out.token_ids)
    return found


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_weights_that_are_lost_end_requests_until_there_are_others(overlap: int) -> None:
    engine, requests = engine_of(overlap), workload(random.Random(1))
    runner: Any = engine.runner
    for request in requests[:-1]:
        engine.submit(request)
    outputs = [*engine.step(), *engine.step()]
    runner.gone = "params.a is gone"
    outputs += engine.step()
    engine.submit(requests[-1])
    while engine.busy:
        outputs += engine.step()
    ends = [out for out in outputs if out.finish is not None]
    assert len(ends) == sum(r.params.n for r in requests)
    assert {(out.error, out.error_code) for out in ends if out.finish is Finish.ERROR} == {
        ("params.a is gone", WeightsError.code)
    }
    assert {out.finish for out in ends} <= {Finish.ERROR, Finish.LENGTH}
    answer, _ = told(engine, "update_weights", source=3)
    assert answer.error is None
    again = dataclasses.replace(requests[-1], id="again")
    engine.submit(again)
    tokens, ended = by_choice(engine.drain())["again", 0]
    assert ended == [Finish.LENGTH]
    assert tokens[0] == next_token(again, list(again.prompt_ids), 3)


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_after_a_recompute_a_sequence_goes_on_as_in_a_fresh_engine(overlap: int, seed: int) -> None:
    rng = random.Random(seed)
    engine, requests = engine_of(overlap), workload(rng)
    outputs = run(engine, requests, rng, ["recompute"])
    found, drew = by_choice(outputs), versions(outputs)
    assert engine.n_updates > 1
    mixed = 0
    for r in requests:
        for i in range(r.params.n):
            tokens, ends = found[r.id, i]
            assert ends == [Finish.LENGTH]
            assert len(tokens) == r.params.max_tokens
            assert all(a <= b for a, b in pairwise(drew[r.id, i]))
            mixed += len({*drew[r.id, i]}) > 1
            for k, weights in enumerate(drew[r.id, i]):
                text = [*r.prompt_ids, *tokens[:k]]
                assert tokens[k] == next_token(r, text, weights), (r.id, i, k)
    assert mixed, "no sequence lived through an update"


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_under_any_policy_nobody_reads_kv_of_others_weights(overlap: int, seed: int) -> None:
    """The runner asserts it of each row; every choice has one end."""
    rng = random.Random(seed)
    engine, requests = engine_of(overlap, strict=False), workload(rng, 16)
    policies = ["mix", "mix", "recompute", "abort", "finish", "beside"]
    outputs = run(engine, requests, rng, policies)
    found, drew = by_choice(outputs), versions(outputs)
    for r in requests:
        for i in range(r.params.n):
            tokens, ends = found[r.id, i]
            assert len(ends) == 1
            assert ends[0] is Finish.ABORT or len(tokens) == r.params.max_tokens
            assert all(a <= b for a, b in pairwise(drew[r.id, i]))
    engine.scheduler.resources.check()
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("overlap", [0, 1])
def test_finish_ends_those_of_before_under_the_old_weights(overlap: int) -> None:
    rng = random.Random(7)
    requests, late = workload(rng), workload(rng, 3)
    late = [Request(id=f"late{r.id}", prompt_ids=r.prompt_ids, params=r.params) for r in late]
    engine, still = engine_of(overlap), engine_of(overlap)
    for r in requests:
        engine.submit(r)
        still.submit(r)
    asked = ask(engine, "update_weights", source=5, running="finish", version="five")
    for r in late:
        engine.submit(r)
    outputs = engine.step()
    assert len(engine.hold) == 3
    busy, _ = told(engine, "update_weights", source=6)
    assert busy.error_code == "operation_pending"
    outputs += _ + engine.drain()
    (answer,) = engine.take_answers()
    assert (answer.id, answer.info["version"]) == (asked.id, "five")
    found, before = by_choice(outputs), by_choice(still.drain())
    assert {key: found[key] for key in before} == before
    assert {out.weights for out in outputs if out.request_id.startswith("late")} == {"five"}
    assert {out.weights for out in outputs if not out.request_id.startswith("late")} == {"0"}


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_beside_the_new_ones_those_of_before_end_under_the_old_weights(
    overlap: int, seed: int
) -> None:
    """In turns, as if the others were not there; later updates wait until only one version is left."""
    rng = random.Random(seed)
    engine, requests = engine_of(overlap), workload(rng, 16)
    outputs, left, version, refused = [], list(requests), 0, 0
    runner: Any = engine.runner
    while left or engine.busy:
        while left and rng.random() < 0.4:
            engine.submit(left.pop())
        if rng.random() < 0.2:
            version += 1
            fields = {"source": version, "version": f"v{version}", "running": "beside"}
            ask(engine, "update_weights", **fields)
        outputs += engine.step()
        refused += sum(a.error_code == "operation_pending" for a in engine.take_answers())
        engine.scheduler.resources.check()
    assert engine.scheduler.counters()["step_faults_total"] == 0, "an assertion of the runner"
    assert engine.n_updates
    assert refused
    pairs = [*pairwise(runner.turns)]
    assert (True, False) in pairs
    assert (False, True) in pairs
    found, drew = by_choice(outputs), versions(outputs)
    for r in requests:
        for i in range(r.params.n):
            tokens, ends = found[r.id, i]
            assert ends == [Finish.LENGTH]
            (weights,) = {*drew[r.id, i]}
            for k, token in enumerate(tokens):
                assert token == next_token(r, [*r.prompt_ids, *tokens[:k]], weights), (r.id, i, k)
    assert len({w for drawn in drew.values() for w in drawn}) > 1
    assert runner.old is None
    assert not engine.beside


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_with_two_versions_new_requests_start_at_once(overlap: int) -> None:
    engine = engine_of(overlap)
    runner: Any = engine.runner
    long = Request(
        id="long", prompt_ids=(1, 2, 3), params=SamplingParams(temperature=0, max_tokens=20)
    )
    short = dataclasses.replace(
        long, id="short", params=SamplingParams(temperature=0, max_tokens=4)
    )
    engine.submit(long)
    outputs = [*engine.step(), *engine.step()]
    ask(engine, "update_weights", source=5, running="beside", version="five")
    engine.submit(short)
    outputs += engine.step()
    (answer,) = engine.take_answers()
    assert (answer.info["version"], answer.info["ending"]) == ("five", 1)
    for action, fields in (("update_weights", {"source": 6}), ("sleep", {})):
        busy, more = told(engine, action, **fields)
        assert busy.error_code == "operation_pending"
        outputs += more
    outputs += engine.drain()
    order = [(out.request_id, out.weights) for out in outputs if out.finish is not None]
    assert order == [("short", "five"), ("long", "0")]
    assert {(out.request_id, out.weights) for out in outputs} == {*order}
    tokens, _ = by_choice(outputs)["long", 0]
    assert tokens == by_choice(alone(long))["long", 0][0]
    assert (runner.old, engine.beside) == (None, False)
    again, _ = told(engine, "update_weights", source=6, running="beside")
    assert again.info["ending"] == 0
    assert runner.old is None, "nobody is left who needs them"


@pytest.mark.parametrize("ends", ["abort", "cancel", "fault"])
def test_the_old_weights_go_whatever_ends_those_who_need_them(ends: str) -> None:
    engine, r = engine_of(), workload(random.Random(2))[3]
    runner: Any = engine.runner
    engine.submit(r)
    outputs = [*engine.step(), *engine.step()]
    ask(engine, "update_weights", source=5, running="beside", version="five")
    outputs += engine.step()
    assert runner.old == 0
    if ends == "cancel":
        engine.cancel(r.id)
    elif ends == "abort":
        ask(engine, "pause", running="abort")
    else:
        runner.fail_next = RuntimeError("a step raised")
    outputs += engine.drain()
    assert runner.old is None
    tokens, finish = by_choice(outputs)[r.id, 0]
    assert finish == [Finish.LENGTH if ends == "fault" else Finish.ABORT]
    assert tokens == by_choice(alone(r))[r.id, 0][0][: len(tokens)]


def test_weights_that_do_not_fit_leave_all_as_it_was() -> None:
    engine, r = engine_of(), workload(random.Random(1))[0]
    engine.submit(r)
    outputs = engine.step() + engine.step()
    for source, code in ((WRONG, "params.a"), (None, "params"), (NOWHERE, "source")):
        answer, more = told(engine, "update_weights", source=source, running="abort")
        assert (answer.error_field, engine.version) == (code, "0")
        outputs += more
    for action, fields in (
        ("update_weights", {"source": 1, "canary": 0.1}),
        ("update_weights", {"source": 1, "analysis": {}}),
        ("rollback_weights", {}),
    ):
        answer, more = told(engine, action, **fields)
        assert "replicas" in answer.error
        outputs += more
    answer, more = told(engine, "update_weights", source=1, running="sideways")
    assert answer.error_field == "running"
    outputs += more + engine.drain()
    assert by_choice(outputs)[r.id, 0][0] == by_choice(alone(r))[r.id, 0][0]


def alone(r: Request) -> list[Output]:
    engine = engine_of()
    engine.submit(r)
    return engine.drain()


@pytest.mark.parametrize("mode", ["abort", "finish", "keep"])
def test_pause_holds_new_requests_back(mode: str) -> None:
    engine = engine_of()
    first, second, third = (
        Request(id=name, prompt_ids=(1, 2, 3), params=SamplingParams(temperature=0, max_tokens=9))
        for name in ("first", "second", "third")
    )
    engine.submit(first)
    outputs = engine.step() + engine.step()
    ask(engine, "pause", running=mode)
    for r in (second, third):
        engine.submit(r)
    engine.cancel("third")
    outputs += engine.drain()
    (answer,) = engine.take_answers()
    assert answer.info["paused"]
    assert not engine.busy
    assert len(engine.hold) == 1
    found = by_choice(outputs)
    assert found["third", 0] == ([], [Finish.ABORT])
    assert "second" not in {key[0] for key in found}
    ended = {"abort": [Finish.ABORT], "finish": [Finish.LENGTH], "keep": []}[mode]
    assert found["first", 0][1] == ended
    if mode == "keep":
        refused, _ = told(engine, "pause", running="finish")
        assert refused.error_code == "paused"
    ask(engine, "resume")
    outputs += engine.drain()
    found = by_choice(outputs)
    whole = by_choice(alone(first))["first", 0][0]
    assert found["second", 0] == (whole, [Finish.LENGTH])
    assert found["first", 0][0] == (
        whole if mode != "abort" else whole[: len(found["first", 0][0])]
    )


def test_sleep_stops_all_and_wake_goes_on_with_the_same_tokens() -> None:
    engine, r = engine_of(), workload(random.Random(2))[3]
    engine.submit(r)
    outputs = engine.step() + engine.step()
    answer, more = told(engine, "sleep")
    assert answer.info["asleep"] == ["kv", "weights"]
    outputs += more
    assert not engine.busy
    refused, _ = told(engine, "resume")
    assert refused.error_code == "asleep"
    refused, _ = told(engine, "update_weights", source=3)
    assert refused.error_code == "asleep"
    answer, more = told(engine, "wake", parts=["weights"])
    assert answer.info["asleep"] == ["kv"]
    runner: Any = engine.runner
    assert runner.asleep == {"kv"}
    ask(engine, "wake")
    outputs += more + engine.drain()
    assert by_choice(outputs) == by_choice(alone(r))


@pytest.mark.parametrize("mode", ["abort", "finish", "keep"])
def test_sleep_has_the_modes_of_pause(mode: str) -> None:
    engine = engine_of()
    first, second = (
        Request(id=name, prompt_ids=(1, 2, 3), params=SamplingParams(temperature=0, max_tokens=9))
        for name in ("first", "second")
    )
    engine.submit(first)
    outputs = engine.step() + engine.step()
    ask(engine, "sleep", running=mode, parts=["weights"])
    engine.submit(second)
    outputs += engine.drain()
    (answer,) = engine.take_answers()
    assert answer.info["asleep"] == ["weights"]
    assert "second" not in {out.request_id for out in outputs}
    ends = [out.finish for out in outputs if out.finish is not None]
    assert ends == {"abort": [Finish.ABORT], "finish": [Finish.LENGTH], "keep": []}[mode]
    refused, _ = told(engine, "sleep", running="beside")
    assert refused.error_field == "running"
    ask(engine, "wake")
    outputs += engine.drain()
    found, whole = by_choice(outputs), by_choice(alone(first))["first", 0][0]
    assert found["second", 0] == (whole, [Finish.LENGTH])
    assert found["first", 0][0] == whole[: None if mode != "abort" else len(found["first", 0][0])]


@pytest.mark.parametrize("seed", range(3))
def test_a_journal_with_other_weights_replays(seed: int, tmp_path: Any) -> None:
    path, rng = tmp_path / "journal.jsonl", random.Random(seed)
    with path.open("wb") as file:
        engine = engine_of(strict=False, journal=JournalFile(file))
        outputs = run(engine, workload(rng), rng, ["mix", "recompute", "abort"])
    assert b'"type":"weights"' in path.read_bytes()
    again = replay(path, LIMITS, CONFIG)
    assert again.n_steps == engine.scheduler.n_steps
    assert sorted(again.outputs, key=repr) == sorted(outputs, key=repr)


@pytest.mark.parametrize("seed", range(3))
def test_a_replay_on_a_device_has_the_weights_of_directories(seed: int, tmp_path: Path) -> None:
    """Until one is gone or has become another; what came otherwise is nowhere."""
    path, rng = tmp_path / "journal.jsonl", random.Random(seed)
    files = [tmp_path / name for name in ("one", "two", "three")]
    for i, file in enumerate(files, 1):
        file.write_text(str(i))
    with path.open("wb") as file:
        engine = engine_of(strict=False, journal=JournalFile(file))
        for part, policy in enumerate(("recompute", "beside", "mix")):
            for r in workload(rng):
                engine.submit(dataclasses.replace(r, id=f"{part}{r.id}"))
            engine.step()
            engine.step()
            ask(engine, "update_weights", source=str(files[part]), running=policy)
            engine.drain()
            assert [a.error for a in engine.take_answers()] == [None]

    def until() -> tuple[str, int]:
        done = replay(path, LIMITS, CONFIG, runner=WeighedRunner(strict=False))
        assert done.n_steps == engine.scheduler.n_steps
        return done.until, done.n_tokens

    lines = [n for n, e in enumerate(read_events(path), 1) if isinstance(e, Reweighed)]
    why, whole = until()
    assert why == ""
    files[2].write_text("4")
    assert until()[0] == f"line {lines[2]}: other weights, 3: {files[2]} has other files than then"
    files[1].unlink()
    why, fewer = until()
    assert why == f"line {lines[1]}: other weights, 2: {files[1]} is no longer there"
    assert 0 < fewer < whole
    with path.open("wb") as file:
        engine = engine_of(journal=JournalFile(file))
        told(engine, "update_weights", source=7, version="seven")
    assert until()[0] == "line 1: other weights, seven: they came from no directory"


def test_a_journal_with_pauses_and_sleep_replays(tmp_path: Any) -> None:
    path, commands = tmp_path / "journal.jsonl", ["pause", "resume", "sleep", "wake"]
    with path.open("wb") as file:
        engine = engine_of(journal=JournalFile(file))
        for r in workload(random.Random(3)):
            engine.submit(r)
        outputs = engine.step() + engine.step()
        for action in commands:
            outputs += told(engine, action, running="keep" if action == "pause" else "")[1]
        told(engine, "pause", running="abort")
        told(engine, "resume")
        outputs += engine.drain()
    noted = [e for e in read_events(path) if isinstance(e, Operated)]
    assert [e.action for e in noted] == [*commands, "pause", "resume"]
    assert [e.running for e in noted] == ["keep", "", "", "", "abort", ""]
    assert [e.parts for e in noted[2:4]] == [["kv", "weights"]] * 2
    assert [e.now for e in noted] == sorted(e.now for e in noted)
    again = replay(path, LIMITS, CONFIG)
    assert again.n_steps == engine.scheduler.n_steps
    assert len(again.outputs) >= len(outputs)


def test_seconds_and_recomputed_tokens_of_updates_are_counted() -> None:
    engine, params = engine_of(strict=False), SamplingParams(temperature=0, max_tokens=30)
    engine.submit(Request(id="a", prompt_ids=(1, 2, 3, 4), params=params))
    for _ in range(4):
        engine.step()
    told(engine, "update_weights", source=1, running="mix")
    values = engine.stats().values
    assert values["weight_recomputed_tokens_total"] == 0
    took = values["weight_update_seconds_total"]
    assert took > 0
    engine.land()
    [seq] = engine.scheduler.groups["a"]
    computed = seq.scheduled
    assert computed > 4
    ask(engine, "update_weights", source=2, running="recompute")
    engine.step()
    values = engine.stats().values
    assert values["weight_recomputed_tokens_total"] == computed
    assert values["weight_update_seconds_total"] > took


async def test_an_engine_in_a_thread_takes_arrays_and_its_outputs_are_not_merged_across_versions() -> (
    None
):
    # Slow steps, so that the pause comes amid the answer however busy this machine is.
    made = engine_of(strict=False, step_s=0.02)
    engine = AsyncEngine(lambda: InprocClient(CONFIG, lambda *_: (made, {})))
    await engine.start()
    try:
        params = SamplingParams(temperature=0, max_tokens=50)
        stream = engine.generate(Request(id="a", prompt_ids=(1, 2, 3), params=params))
        outputs = [await anext(stream)]
        asked = Control(id="1", action="pause", running="keep")
        assert (await engine.control(asked))["paused"]
        assert engine.degraded_reasons() == ["paused"]
        assert engine.healthy()
        update = Control(id="2", action="update_weights", source=4, version="four", running="mix")
        assert (await engine.control(update))["version"] == "four"
        await engine.control(Control(id="3", action="resume"))
        outputs += [out async for out in stream]  # all that came in between is merged
        assert not engine.degraded_reasons()
    finally:
        await engine.close()
    drew = [out.weights for out in outputs for _ in out.token_ids]
    assert len(drew) == 50
    assert drew == sorted(drew)
    assert {*drew} == {"0", "four"}
