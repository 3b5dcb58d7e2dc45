"""The worker process: verdicts, the kill, and that a kill costs nobody else anything."""

from __future__ import annotations

import sys
import threading
import time

import msgspec
import pytest

from jserve.errors import BadRequest, Overloaded, RateLimited, RequestFailed
from jserve.grammar.checker import MAX_QUEUED, MAX_QUEUED_TENANT, GrammarChecker
from jserve.grammar.vocab import vocabulary
from jserve.grammar.worker import Answer
from jserve.sampling import StructuredOutputs
from tests.grammar.kit import CITY, EOS, VOCAB, tokenizer


def made(**options) -> GrammarChecker:
    return GrammarChecker(lambda: vocabulary(tokenizer(), VOCAB, (EOS,)), **options)


@pytest.fixture(scope="module")
def checker():
    one = made()
    yield one
    one.close()


def wait(checker: GrammarChecker, spec: StructuredOutputs) -> None:
    future = checker.check(spec)
    if future is not None:
        future.result(60)


def test_good_and_bad_and_the_second_time_without_asking(checker):
    bad = StructuredOutputs(json={"type": "array", "uniqueItems": True})
    wait(checker, CITY)
    assert checker.check(CITY) is None
    for _ in range(2):
        with pytest.raises(BadRequest, match="uniqueItems") as caught:
            wait(checker, bad)
        assert caught.value.field == "structured_outputs.json"
        assert caught.value.code == "invalid_schema"
    assert checker.n_killed == 0


def test_a_schema_over_the_bounds_never_reaches_the_process(checker):
    with pytest.raises(BadRequest) as caught:
        checker.check(StructuredOutputs(regex="a" * 70_000))
    assert caught.value.code == "grammar_too_large"


SLEEPER = (
    "import sys, time; sys.path.insert(0, '.')\n"
    "from jserve.grammar import worker\n"
    "plain = worker.answer\n"
    "def answer(compiler, spec):\n"
    "    if b'sleep' in spec: time.sleep(60)\n"
    "    if b'crash' in spec: sys.exit(3)\n"
    "    return plain(compiler, spec)\n"
    "worker.answer = answer\n"
    "worker.main(sys.stdin.buffer, sys.stdout.buffer)\n"
)


def test_a_compilation_without_end_is_killed_and_the_next_one_works():
    one = made(time_limit_s=4.0, command=(sys.executable, "-c", SLEEPER))
    try:
        wait(one, CITY)
        began = time.monotonic()
        with pytest.raises(BadRequest, match="longer than 4 s") as caught:
            wait(one, StructuredOutputs(choice=("sleep",)))
        assert caught.value.code == "grammar_too_large"
        assert time.monotonic() - began < 20
        with pytest.raises(BadRequest, match="too much memory"):
            wait(one, StructuredOutputs(choice=("crash",)))
        assert one.n_killed == 2
        wait(one, StructuredOutputs(choice=("good",)))
        with pytest.raises(BadRequest, match="longer than 4 s"):
            wait(one, StructuredOutputs(choice=("sleep",)))
        assert one.n_killed == 2, "a verdict is kept"
    finally:
        one.close()


def test_close_ends_the_process():
    one = made()
    wait(one, CITY)
    process = one._process
    assert process is not None
    one.close()
    assert process.poll() is not None


def test_a_worker_that_does_not_start_is_not_the_grammars_fault():
    one = made(command=(sys.executable, "-c", "raise SystemExit(1)"))
    try:
        for _ in range(2):
            with pytest.raises(RequestFailed, match="does not start"):
                wait(one, CITY)
    finally:
        one.close()


class Slow(GrammarChecker):
    """Says yes to everything, when it is let."""

    def __init__(self) -> None:
        super().__init__(lambda: None)  # type: ignore[arg-type,return-value]
        self.go, self.order = threading.Semaphore(0), []

    def _ask(self, payload):
        self.go.acquire()
        spec = msgspec.msgpack.decode(payload, type=StructuredOutputs)
        self.order.append(spec.regex)
        return Answer()


@pytest.fixture
def slow():
    one = Slow()
    yield one
    one.go.release(2 * MAX_QUEUED)
    one.close()


def regex(text: str) -> StructuredOutputs:
    return StructuredOutputs(regex=text)


def fill(checker: Slow, n_waiting: int, tenant: str) -> None:
    """One that is being checked, and ``n_waiting`` behind it."""
    checker.check(regex("0"), tenant)
    until = time.monotonic() + 5
    while checker._waiting and time.monotonic() < until:
        time.sleep(0.005)
    for i in range(n_waiting):
        checker.check(regex(f"x{i}"), tenant)


def test_tenants_take_turns(slow):
    futures = [slow.check(regex(f"ann{i}"), "ann") for i in range(4)]
    futures += [slow.check(regex(f"bob{i}"), "bob") for i in range(2)]
    slow.go.release(6)
    for future in futures:
        future.result(10)
    assert slow.order[:5] in (
        ["ann0", "ann1", "bob0", "ann2", "bob1"],  # the first began before there was another
        ["ann0", "bob0", "ann1", "bob1", "ann2"],
    )


def test_no_tenant_fills_the_queue(slow):
    fill(slow, MAX_QUEUED_TENANT, "ann")
    with pytest.raises(RateLimited) as caught:
        slow.check(regex("more"), "ann")
    assert caught.value.retry_after
    assert slow.check(regex("bob"), "bob") is not None


def test_without_tenants_the_whole_queue_may_be_filled_and_no_more(slow):
    fill(slow, MAX_QUEUED, "")
    with pytest.raises(Overloaded):
        slow.check(regex("more"))
    assert len(slow.order) == 0


def test_one_grammar_that_a_burst_asks_for_counts_once(slow):
    """512 requests with one schema at an idle server: none is refused while the first is compiled."""
    for tenant in ("", "ann"):
        futures = [slow.check(regex("same"), tenant) for _ in range(MAX_QUEUED + 10)]
        slow.go.release()
        for future in futures:
            assert future is not None
            future.result(10)
        slow._verdicts.clear()
    assert slow.order == ["same", "same"]
    assert not slow._asked, "nothing is counted that does not wait"


def test_who_left_is_not_checked(slow):
    first = slow.check(regex("first"), "ann")
    time.sleep(0.05)
    left, last = slow.check(regex("left"), "ann"), slow.check(regex("last"), "ann")
    assert left.cancel()
    slow.go.release(3)
    for future in (first, last):
        future.result(10)
    assert slow.order == ["first", "last"]
