"""A recorded live run goes through the simulator to the same decisions, at the same times."""

import dataclasses
import random
from pathlib import Path

import msgspec
import pytest

from jserve.config import EngineConfig
from jserve.engine.engine import Engine
from jserve.errors import ConfigError
from jserve.ports import InFlight, RunnerLimits
from jserve.sampling import SamplingParams
from jserve.sched.record.journal import Event, JournalFile
from jserve.sched.record.replay import Diverged
from jserve.sched.scheduler import Scheduler
from jserve.sim import recorded
from jserve.sim.costs import Device
from jserve.sim.device import SimClock
from jserve.sim.simulate import Setup, simulate
from jserve.testing import FakeRunner
from jserve.types import Lane, Request

VOCAB, EOS = 19, 18
LIMITS = RunnerLimits(
    n_slots=6,
    max_rows=6,
    max_decode_rows=6,
    max_prefill_tokens=48,
    max_prefill_rows=3,
    max_drafts=0,
    n_pages=22,
    page_size=8,
    max_model_len=128,
    vocab_size=VOCAB,
)


class Price:
    """Any step times, as long as both sides use them."""

    def seconds(self, n_decode, n_prefill, n_context):
        return 0.01 + 0.001 * n_decode + 0.0005 * n_prefill + 1e-5 * n_context


class TimedFake(FakeRunner):
    """A FakeRunner on a clock of its own: what a live device would take."""

    def __init__(self, limits, clock, host_s):
        super().__init__(limits)
        self.clock, self.host_s, self.free_at = clock, host_s, 0.0

    def launch(self, plan):
        self.clock.now += self.host_s
        flight = super().launch(plan)
        rows = plan.rows
        decode = [r for r in rows if r.from_slot]
        prefill = sum(r.count for r in rows[len(decode) :])
        context = sum(r.start + r.count for r in rows) // len(rows)
        begin = max(self.clock.now, self.free_at)
        took = Price().seconds(len(decode), prefill, context)
        self.free_at = begin + took
        return InFlight(plan=plan, launched=begin, handle=(self.free_at, took, flight.handle))

    def collect(self, flight):
        end, took, handle = flight.handle
        self.clock.now = max(self.clock.now, end)
        result = super().collect(InFlight(plan=flight.plan, launched=0.0, handle=handle))
        return dataclasses.replace(result, device_us=took * 1e6)


def config(overlap: int, **options) -> EngineConfig:
    return EngineConfig.of(
        max_num_seqs=6, max_num_batched_tokens=48, page_size=8, overlap=overlap, **options
    )


def requests(seed: int) -> list[tuple[float, Request]]:
    """Shared beginnings, repeated prompts, choices, stops, scores, penalties, refusals."""
    rng = random.Random(seed)
    stems = [[rng.randrange(VOCAB - 1) for _ in range(20)] for _ in range(3)]
    found, at = [], 100.0
    for i in range(40):
        at += rng.expovariate(12.0)
        prompt = rng.choice(stems)[: rng.choice([4, 16, 20])]
        prompt = prompt + [rng.randrange(VOCAB - 1) for _ in range(rng.choice([0, 3, 30]))]
        extras = rng.choice(
            [{}, {}, {"n": 2}, {"prompt_logprobs": 1}, {"presence_penalty": 0.5}, {"max_tokens": 1}]
        )
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": rng.randrange(2, 40)} | extras)
        eos = rng.choice([(), (EOS, 3), (EOS,)])
        lane = rng.choice(list(Lane))
        found.append(
            (at, Request(id=f"r{i}", prompt_ids=tuple(prompt), params=params, eos_ids=eos,
                         arrival=at, priority=rng.randrange(2), lane=lane,
                         tenant=rng.choice(["", "a"]),
                         ttft_deadline_ms=rng.choice([None, None, 150.0, 600.0]),
                         deadline_ms=rng.choice([None, None, None, 900.0])))
        )  # fmt: skip
    return found


def live(path: Path, *, seed: int, overlap: int, cancels: bool = False) -> SimClock:
    """A run of the real engine with a journal."""
    clock = SimClock(100.0)
    runner = TimedFake(LIMITS, clock, 0.002)
    todo = requests(seed)
    with path.open("wb") as file:
        scheduler = Scheduler(LIMITS, config(overlap), journal=JournalFile(file))
        engine = Engine(scheduler, runner, overlap=overlap, clock=clock)
        n = 0
        while todo or engine.busy:
            if not engine.busy:
                clock.now = max(clock.now, todo[0][0])
            while todo and todo[0][0] <= clock.now:
                engine.submit(todo.pop(0)[1])
            n += 1
            if cancels and n % 9 == 0:
                engine.cancel(f"r{n // 3}")
            engine.step()
    return clock


def device() -> Device:
    return Device(name="test", costs=Price(), n_pages=22, max_model_len=128, host_s=0.002)


def setup(overlap: int, **options) -> Setup:
    return Setup(config=config(overlap, **options), device=device())


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_live_run_is_verified_by_the_simulator(tmp_path: Path, overlap: int) -> None:
    path = tmp_path / "journal"
    live(path, seed=overlap, overlap=overlap, cancels=True)
    limits = dataclasses.replace(LIMITS, vocab_size=1 << 17)
    done = recorded.verify(path, setup(overlap), limits)
    assert done.n_requests == 40
    assert done.n_steps > 100


def test_another_configuration_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    live(path, seed=1, overlap=1)
    limits = dataclasses.replace(LIMITS, vocab_size=1 << 17)
    with pytest.raises(Diverged, match="event"):
        recorded.verify(path, setup(1, max_prefill_chunk=16), limits)
    with pytest.raises(Diverged, match="event"):
        recorded.verify(path, setup(0), limits)


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_with_the_same_prices_it_decides_the_same_at_the_same_times(
    tmp_path: Path, overlap: int
) -> None:
    """Not told any time: the trace's arrivals and the prices give every reading of the clock."""
    path, again = tmp_path / "live", tmp_path / "simulated"
    live(path, seed=7 + overlap, overlap=overlap)
    trace = recorded.convert(path)
    with again.open("wb") as file:
        made = dataclasses.replace(setup(overlap), journal=JournalFile(file))
        simulate(trace, made, dataclasses.replace(LIMITS, vocab_size=1 << 17))
    decoder = msgspec.json.Decoder(Event)

    def told(file: Path) -> list:
        events = [decoder.decode(line) for line in file.read_bytes().splitlines()]
        return [(type(e).__name__, e.now, getattr(e, "decision", None)) for e in events]

    assert told(again) == told(path)


def test_a_trace_of_a_journal_holds_no_text(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    live(path, seed=3, overlap=1)
    trace = recorded.convert(path)
    asked = [request for _, request in requests(3)]
    assert [item.n_prompt for item in trace] == [len(r.prompt_ids) for r in asked]
    assert [item.lane for item in trace] == [r.lane for r in asked]
    assert all(len(item.prompt) <= 4 for item in trace)
    assert sum(len(item.prompt) > 1 for item in trace) > 10, "prefixes are shared"


def test_faults_and_reused_ids_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with path.open("wb") as file:
        journal = JournalFile(file)
        journal.arrival(requests(0)[0][1], 1.0)
        journal.recover(2.0, "boom")
    limits = dataclasses.replace(LIMITS, vocab_size=1 << 17)
    with pytest.raises((ConfigError, Diverged), match="fault"):
        recorded.verify(path, setup(1), limits)
    with path.open("ab") as file:
        JournalFile(file).arrival(requests(0)[0][1], 3.0)
    with pytest.raises(ConfigError, match="reused"):
        recorded.convert(path)
