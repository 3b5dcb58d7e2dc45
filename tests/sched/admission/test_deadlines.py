"""Deadlines: promised at arrival or refused, kept in order, ended when they pass."""

from functools import partial

import pytest

from jserve.errors import (
    BadRequest,
    DeadlineInfeasible,
    DeadlineUnreachable,
    JserveError,
    error_of,
)
from jserve.sched.admission.deadlines import Deadlines
from jserve.types import Finish, Lane
from tests.sched.sched_drive import Drive, limits, request, seconds_of, step_times


def timed(lim=None, **options) -> Drive:
    """A drive whose clock moves as its device does."""
    drive = Drive(lim or limits(step_times=step_times()), depth=0, **options)
    drive.tick = 0.0
    launch = drive.launch

    def timed_launch() -> bool:
        launched = launch()
        if launched:
            plan = drive.flight[-1].plan
            n_prefill = sum(row.count for row in plan.rows if not row.from_slot)
            drive.now += seconds_of(len(plan.rows), n_prefill)
        return launched

    drive.launch = timed_launch
    return drive


def attempt(drive: Drive, req) -> JserveError | None:
    """None, or why it was refused."""
    try:
        drive.add(req)
    except JserveError as error:
        return error
    return None


def refusal(drive: Drive, req) -> Exception:
    with pytest.raises((BadRequest, DeadlineUnreachable)) as caught:
        drive.add(req)
    return caught.value


@pytest.mark.parametrize("field", ["ttft_deadline_ms", "tpot_deadline_ms", "deadline_ms"])
def test_what_an_idle_server_cannot_do_is_the_clients_fault(field):
    drive = timed()
    error = refusal(drive, request("a", [1] * 40, max_tokens=10, **{field: 1.0}))
    assert isinstance(error, DeadlineInfeasible)
    assert (error.status, error.field) == (400, field)
    assert "idle server" in error.message
    assert "1 ms" in error.message
    assert not drive.scheduler.has_work


def test_what_only_the_queue_prevents_may_be_tried_later():
    drive = timed(limits(step_times=step_times(), n_slots=1))
    for i in range(6):
        drive.add(request(f"r{i}", [i] * 30, max_tokens=10, ignore_eos=True, priority=-1))
    error = refusal(drive, request("late", [7] * 16, ttft_deadline_ms=15.0))
    assert isinstance(error, DeadlineUnreachable)
    assert (error.status, error.field) == (503, "ttft_deadline_ms")
    assert error.retry_after >= 1
    drive.run()
    drive.add(request("late", [7] * 16, ttft_deadline_ms=15.0))
    drive.run()


def test_a_deadline_that_only_its_own_batch_prevents_is_the_clients_fault():
    """To try again later would be of no use; behind others it may be."""
    mates = [
        request(f"b{i}", [i] * 16, batch="b", ttft_deadline_ms=15.0, ignore_eos=True)
        for i in range(9)
    ]
    for others, kind, status in ((0, DeadlineInfeasible, 400), (1, DeadlineUnreachable, 503)):
        drive = timed(limits(step_times=step_times(), n_slots=1))
        for i in range(others):
            drive.add(request(f"r{i}", [10], max_tokens=30, ignore_eos=True))
        errors = [error for error in map(partial(attempt, drive), mates) if error]
        assert isinstance(errors[0], kind)
        assert (errors[0].status, errors[0].field) == (status, "ttft_deadline_ms")


def test_a_lane_with_more_weight_is_promised_more():
    drive = timed(limits(step_times=step_times(), n_slots=4))
    for i in range(12):
        drive.add(request(f"r{i}", [i % 11] * 30, lane=Lane.BULK, max_tokens=1, priority=-1))
    refusal(drive, request("b", [7] * 16, ttft_deadline_ms=80.0, lane=Lane.BULK))
    drive.add(request("i", [7] * 16, ttft_deadline_ms=80.0, lane=Lane.INTERACTIVE))
    drive.run()
    assert drive.told["i", 0].end.finish is Finish.LENGTH


PENALISED = {"presence_penalty": 1.0}


def with_leased_row(lane: Lane) -> Drive:
    """A drive with free slots whose one vocab row a long sequence holds, after some that ended 10 ms apart."""
    drive = timed(limits(step_times=step_times(), n_slots=4, n_vocab_rows=1))
    for i in range(3):
        drive.add(request(f"past{i}", [i] * 8, max_tokens=10, ignore_eos=True))
        drive.run()
    holder = request("holder", [5] * 8, max_tokens=50, ignore_eos=True, lane=lane, **PENALISED)
    drive.add(holder)
    while drive.scheduler.resources.vocab_rows.n_free:
        drive.step()
    return drive


def test_a_deadline_includes_the_wait_for_a_vocab_row():
    drive = with_leased_row(Lane.STANDARD)
    wish = {"ttft_deadline_ms": 18.0, "max_tokens": 1}
    error = refusal(drive, request("late", [7] * 8, **wish, **PENALISED))
    assert isinstance(error, DeadlineUnreachable)
    drive.add(request("plain", [7] * 8, **wish))
    drive.run()
    assert drive.told["plain", 0].end.finish is Finish.LENGTH
    drive.add(request("free", [7] * 8, **wish, **PENALISED))
    drive.run()
    assert drive.told["free", 0].end.finish is Finish.LENGTH


def test_lane_interactive_is_promised_the_vocab_row_of_a_bulk_sequence():
    drive = with_leased_row(Lane.BULK)
    wish = {"ttft_deadline_ms": 18.0, "max_tokens": 1, "lane": Lane.INTERACTIVE}
    drive.add(request("urgent", [7] * 8, **wish, **PENALISED))
    drive.run()
    assert drive.told["urgent", 0].end.finish is Finish.LENGTH


def test_cached_tokens_count_as_computed():
    prompt = [1, 2, 3, 4] * 10
    drive = timed()
    wish = {"ttft_deadline_ms": 8.0, "max_tokens": 2}
    assert isinstance(refusal(drive, request("cold", prompt, **wish)), DeadlineInfeasible)
    drive.add(request("warms", prompt, max_tokens=1))
    drive.run()
    drive.add(request("warm", prompt, **wish))
    drive.run()
    assert drive.told["warm", 0].end.finish is Finish.LENGTH


@pytest.mark.parametrize("seed", range(3))
def test_promises_are_kept(seed):
    """At twice the capacity, who is accepted gets its first token in time, and is not pushed out
    of it by a later arrival with an earlier deadline."""
    import random

    rng = random.Random(seed)
    drive = timed(prefix_caching=False)
    said, arrived, wishes, refused = {}, {}, {}, 0
    for i in range(150):
        wish = rng.choice([25.0, 60.0, 120.0])
        req = request(
            f"r{i}", [rng.randrange(11) for _ in range(rng.randrange(4, 33))],
            max_tokens=rng.randrange(1, 6), ttft_deadline_ms=wish, ignore_eos=True,
        )  # fmt: skip
        try:
            drive.add(req)
            arrived[req.id], wishes[req.id] = drive.now, wish
        except DeadlineUnreachable:
            refused += 1
        for _ in range(rng.randrange(3)):
            drive.step()
            for key, told in drive.told.items():
                if told.tokens:
                    said.setdefault(key[0], drive.now)
    while drive.step():
        for key, told in drive.told.items():
            if told.tokens:
                said.setdefault(key[0], drive.now)
    late = [id for id in arrived if id not in said or said[id] - arrived[id] > wishes[id] / 1e3]
    assert refused > 0, "the test means nothing where everything fits"
    assert len(arrived) > 20
    assert len(late) <= 0.02 * len(arrived), late


def test_a_promise_made_is_not_broken_for_a_later_one():
    drive = timed(prefix_caching=False)
    drive.add(request("first", [1] * 32, ttft_deadline_ms=35.0, max_tokens=1))
    error = refusal(drive, request("late", [2] * 32, ttft_deadline_ms=34.0, max_tokens=1))
    assert (error.status, error.field) == (503, "ttft_deadline_ms")
    assert "promised before" in error.message
    drive.add(request("small", [2] * 4, ttft_deadline_ms=34.0, max_tokens=1))
    drive.add(request("patient", [2] * 32, max_tokens=1))
    assert order_of_ends(drive) == ["small", "first", "patient"]


def order_of_ends(drive: Drive) -> list[str]:
    ends: list[str] = []
    while drive.step():
        ends += [k[0] for k, t in drive.told.items() if t.end and k[0] not in ends]
    return ends


def test_without_any_measurement_nothing_is_promised_and_nothing_refused():
    drive = Drive(depth=0)
    drive.add(request("a", [1] * 40, ttft_deadline_ms=0.001, max_tokens=1))
    assert drive.scheduler.has_work


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf"), True, "soon"])
@pytest.mark.parametrize("field", ["ttft_deadline_ms", "tpot_deadline_ms", "deadline_ms"])
def test_a_deadline_is_a_number_of_milliseconds(field, bad):
    with pytest.raises(BadRequest) as caught:
        Drive().add(request("a", [1], **{field: bad}))
    assert caught.value.field == field


def test_an_unknown_lane_is_refused():
    with pytest.raises(BadRequest, match="interactive, standard, bulk") as caught:
        Drive().add(request("a", [1], lane="fast"))
    assert caught.value.field == "lane"


# -- what happens when they pass


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_running_sequence_ends_in_error_when_its_deadline_passes(depth):
    drive = Drive(depth=depth)
    drive.add(request("a", [1] * 5, max_tokens=50, deadline_ms=9500.0, ignore_eos=True))
    drive.add(request("b", [1] * 5, max_tokens=50, ignore_eos=True))
    drive.run()
    end, told = drive.told["a", 0].end, drive.told["a", 0]
    assert (end.finish, end.error_code, end.error_field) == (
        Finish.ERROR,
        "deadline_exceeded",
        "deadline_ms",
    )
    assert 0 < len(told.tokens) < 12, "what was drawn before stays said"
    assert drive.told["b", 0].end.finish is Finish.LENGTH
    assert error_of(end.error_code, end.error, field=end.error_field).status == 504


def test_a_sequence_that_never_got_in_ends_when_its_first_token_is_hopeless():
    drive = Drive(limits(n_slots=1), depth=0)
    drive.add(request("runs", [1], max_tokens=40, ignore_eos=True))
    drive.step()
    drive.add(request("waits", [2], ttft_deadline_ms=5000.0))
    drive.run()
    end = drive.told["waits", 0].end
    assert (end.error_code, end.error_field) == ("deadline_exceeded", "ttft_deadline_ms")
    assert drive.scheduler.stats().lanes["standard_expired"] == 1


def test_one_that_got_in_goes_on_though_its_first_token_is_late():
    drive = Drive(depth=0, max_prefill_chunk=1)
    drive.add(request("slow", [1] * 20, ttft_deadline_ms=5000.0, max_tokens=3))
    drive.run()
    assert drive.told["slow", 0].end.finish is Finish.LENGTH


def test_the_time_runs_from_the_arrival():
    drive = Drive(limits(n_slots=1), depth=0)
    drive.add(request("runs", [1], max_tokens=40, ignore_eos=True))
    for _ in range(10):
        drive.step()
    drive.add(request("old", [2], arrival=4.0, deadline_ms=7000.0))
    drive.step()
    assert drive.told["old", 0].end is not None
    drive.add(request("other clock", [2], arrival=1e9, deadline_ms=7000.0))
    drive.step()
    assert drive.told["other clock", 0].end is None
    drive.run()


def test_deadlines_of_the_finished_do_not_pile_up():
    drive = Drive(depth=0)
    for i in range(50):
        drive.add(request(f"r{i}", [1], max_tokens=1, deadline_ms=1e8, ttft_deadline_ms=1e8))
        drive.run()
        assert len(drive.scheduler.deadlines) <= 2


def test_a_sequence_is_told_once_though_both_its_deadlines_passed():
    drive = Drive(limits(n_slots=1))
    drive.add(request("runs", [1], max_tokens=40, ignore_eos=True))
    drive.step()
    drive.add(request("a", [2], ttft_deadline_ms=2000.0, deadline_ms=3000.0))
    drive.now += 60
    (out,) = drive.scheduler.expire(drive.now)
    drive.late.add(("a", 0))
    drive._hear([out])
    drive.run()


def test_nothing_to_watch_costs_nothing():
    assert Deadlines().passed(1e9) == []
