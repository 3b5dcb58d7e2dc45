"""Admission: bounds, shares, overload with hysteresis, retries, forecasts of pages."""

from dataclasses import replace

import pytest

from jserve.api.http.front import Limits
from jserve.errors import BadRequest, JserveError, Overloaded, RateLimited
from jserve.sched.admission.forecast import Lengths, peak_tokens
from jserve.sched.admission.gate import DOWN, FULL, UP, next_level
from jserve.types import Lane
from tests.sched.sched_drive import Drive, limits, request, step_times


def try_add(drive: Drive, req) -> str | None:
    """None, or the code of the refusal."""
    try:
        drive.add(req)
    except JserveError as error:
        return error.code
    return None


def blocked(**options) -> Drive:
    """One slot, taken for long: whatever comes waits."""
    drive = Drive(limits(n_slots=1), depth=0, **options)
    drive.add(request("runs", [1], max_tokens=60, ignore_eos=True))
    drive.step()
    return drive


# -- overload


def test_the_level_rises_and_falls_with_a_gap_between():
    level, path = 0, []
    for load in (0.2, 0.49, 0.5, 0.4, 0.36, 0.34, 0.8, 0.7, 0.61, 0.5, 0.3, 1.2, 0.9, 0.84, 0.0):
        level = next_level(level, load)
        path.append(level)
    assert path == [0, 0, 1, 1, 1, 0, 2, 2, 2, 1, 0, 3, 3, 2, 0]
    assert all(down < up for down, up in zip(DOWN, UP, strict=True))


def test_bulk_is_shed_first_then_standard_and_interactive_last():
    drive = blocked(max_waiting=16)
    first: dict[Lane, int] = {}
    for i in range(40):
        for lane in (Lane.BULK, Lane.STANDARD, Lane.INTERACTIVE):
            n = len(drive.scheduler.resources.waiting)
            code = try_add(drive, request(f"{lane}{i}", [2], lane=lane))
            assert code in (None, "overloaded")
            if code:
                first.setdefault(lane, n)
    assert first == {Lane.BULK: 9, Lane.STANDARD: 17, Lane.INTERACTIVE: 16 * FULL}, "on its turn"
    stats = drive.scheduler.stats()
    assert (stats.overload_level, stats.overload_load) == (3, FULL)
    assert stats.lanes["bulk_refused"] > stats.lanes["standard_refused"] > 0
    drive.run()
    assert drive.scheduler.stats().overload_level == 0
    assert try_add(drive, request("again", [1], lane=Lane.BULK)) is None


def test_after_overload_standard_comes_back_only_below_the_lower_mark():
    drive = blocked(max_waiting=20)
    for i in range(20):
        assert try_add(drive, request(f"r{i}", [2])) is None
    assert try_add(drive, request("more", [2])) == "overloaded"
    for i in range(3):
        drive.cancel(f"r{i}")
        assert try_add(drive, request(f"x{i}", [2])) == "overloaded", "17 of 20 is not below 0.85"
    drive.cancel("r3")
    assert try_add(drive, request("y", [2])) is None


def test_overload_makes_prefills_shorter():
    drive = Drive(limits(n_slots=2, max_rows=2, max_decode_rows=2), depth=0, max_waiting=8)
    drive.add(request("long", [1] * 60, max_tokens=1))
    for i in range(7):
        drive.add(request(f"r{i}", [2] * 10, max_tokens=1))
    drive.launch()
    assert drive.flight[-1].plan.n_tokens == 4, "a quarter of 16"
    drive.commit()
    drive.run()


def refusal(drive: Drive, lane: Lane = Lane.STANDARD) -> str:
    with pytest.raises(Overloaded) as caught:
        drive.add(request("refused", [2], lane=lane))
    return caught.value.message


def test_a_refusal_names_the_option_and_when_the_lane_is_taken_again():
    drive = blocked(max_waiting=20)
    for i in range(20):
        drive.add(request(f"r{i}", [2]))
    assert refusal(drive).startswith(
        "overloaded: 20 sequences are waiting; lane standard is taken again below 17"
        " (max_waiting is 20); try again in"
    )
    assert "lane bulk is taken again below 7 (max_waiting is 20)" in refusal(drive, Lane.BULK)
    drive.cancel("r0")
    assert "19 sequences are waiting; lane standard is taken again below 17" in refusal(drive)
    drive = blocked(max_waiting_tokens=100)
    for i in range(3):
        drive.add(request(f"r{i}", [2] * 40))
    said = refusal(drive)
    assert "120 prompt tokens are waiting" in said
    assert "below 85 (max_waiting_tokens is 100)" in said


def test_a_refusal_for_seconds_of_work_names_that_option():
    slow = tuple(replace(t, seconds=10.0) for t in step_times())
    drive = Drive(limits(n_slots=2, step_times=slow), depth=0, max_queue_s=1.0)
    codes = [try_add(drive, request(f"r{i}", [2] * 9)) for i in range(20)]
    assert "overloaded" in codes
    said = refusal(drive)
    assert "s of work are waiting; lane standard is taken again below 0.85" in said
    assert "(max_queue_s is 1)" in said


def test_a_burst_at_an_idle_server_is_queued_whatever_its_work_takes():
    """As many as connections may be open, with the default bounds; 10 s for a step are hours of work."""
    slow = tuple(replace(t, seconds=10.0) for t in step_times())
    drive = Drive(limits(n_slots=2, step_times=slow), depth=0)
    for i in range(Limits().max_connections):
        drive.scheduler.submit(request(f"r{i}", [2] * 40), 0.0)  # one refusal would raise
    assert len(drive.scheduler.resources.waiting) == Limits().max_connections


def test_retry_after_grows_with_the_queue():
    waits = []
    for n in (8, 32):
        drive = Drive(limits(n_slots=1, step_times=step_times()), depth=0, max_waiting=n)
        for i in range(n):
            drive.add(request(f"r{i}", [1] * 40, max_tokens=20))
        drive.scheduler.gate.finish_intervals.mean_s = 1.0
        with pytest.raises(Overloaded) as caught:
            drive.add(request("more", [1]))
        assert f"{caught.value.retry_after:.0f} s" in caught.value.message
        waits.append(caught.value.retry_after)
    assert 1 <= waits[0] < waits[1] <= 60


def accepted_under(retries: int) -> tuple[int, int]:
    """(requests accepted, tokens drawn) in 200 steps while refused ones come back at once."""
    drive = Drive(limits(n_slots=2), max_waiting=6)
    waiting_room = []
    for n in range(200):
        waiting_room.append(request(f"r{n}", [n % 11] * 6, max_tokens=4, ignore_eos=True))
        for _ in range(1 + retries):
            if waiting_room and try_add(drive, waiting_room[0]) is None:
                waiting_room.pop(0)
        drive.step()
    return len(drive.told), sum(len(told.tokens) for told in drive.told.values())


def test_retry_storms_do_not_raise_the_accepted_load():
    calm, storm = accepted_under(0), accepted_under(20)
    assert storm[0] <= calm[0] + 6, "at most what the queue holds more"
    assert abs(storm[1] - calm[1]) <= 0.05 * calm[1], "the same work is done"


# -- bounds and shares


def test_the_queue_is_bounded_in_prompt_tokens():
    drive = blocked(max_waiting_tokens=100)
    for i in range(3):
        assert try_add(drive, request(f"r{i}", [2] * 40)) is None
    assert try_add(drive, request("more", [2])) == "overloaded"
    drive.run()


def test_a_prompt_larger_than_the_bound_is_taken_by_an_empty_queue():
    drive = Drive(max_waiting_tokens=10)
    assert try_add(drive, request("r", [2] * 40)) is None
    drive.run()


def test_the_queue_is_bounded_in_seconds_of_work():
    lim = limits(n_slots=1, step_times=step_times())
    drive = Drive(lim, depth=0, max_queue_s=2.0, max_waiting=1000)
    drive.scheduler.gate.finish_intervals.mean_s = 0.1
    n = next(i for i in range(1000) if try_add(drive, request(f"r{i}", [2] * 4)))
    assert 15 < n < 25


def test_a_burst_that_finds_free_slots_is_no_overload():
    """A slow machine: seconds of prefill wait as soon as a few prompts arrive together."""
    slow = tuple(replace(t, seconds=10.0) for t in step_times())
    drive = Drive(
        limits(n_slots=30, max_rows=30, max_decode_rows=30, step_times=slow),
        depth=0,
        max_queue_s=2.0,
        max_waiting=1000,
    )
    n = next(i for i in range(1000) if try_add(drive, request(f"r{i}", [2] * 4)))
    assert n == 31, "one more than there are slots"


def test_prompts_asked_for_together_are_taken_or_refused_together():
    """Whatever bound they alone would break: sequences, tokens, seconds, the share of a key."""
    mates = [request(f"b{i}", [2] * 9, batch="b", tenant="t") for i in range(40)]
    bounds = {"max_waiting": 8, "max_waiting_tokens": 64, "tenant_share": 0.5}
    slow = tuple(replace(t, seconds=10.0) for t in step_times())
    drive = Drive(limits(n_slots=2, step_times=slow), depth=0, max_queue_s=1.0, **bounds)
    assert [try_add(drive, mate) for mate in mates] == [None] * 40
    assert try_add(drive, request("late", [2], tenant="u")) == "overloaded"
    assert try_add(drive, request("c0", [2], batch="c")) == "overloaded"
    drive.run()
    assert try_add(drive, request("c1", [2], batch="c")) is None
    drive.run()
    assert try_add(drive, replace(mates[0], id="again")) is None, "an empty queue takes anyone"

    drive = blocked(max_waiting=8)
    for i in range(8):
        drive.add(request(f"r{i}", [2]))
    assert [try_add(drive, mate) for mate in mates[:5]] == ["overloaded"] * 5


def test_the_names_of_batches_are_forgotten(monkeypatch):
    monkeypatch.setattr("jserve.sched.admission.gate.MAX_BATCHES", 3)
    drive = Drive(limits())
    for i in range(20):
        drive.add(request(f"r{i}", [2], batch=f"b{i}", max_tokens=1))
        drive.run()
    assert list(drive.scheduler.gate._batches) == ["b17", "b18", "b19"]
    drive.add(request("alone", [2]))
    assert "" not in drive.scheduler.gate._batches


def test_one_key_may_fill_its_share_only():
    drive = blocked(max_waiting=20, tenant_share=0.25)
    for i in range(5):
        assert try_add(drive, request(f"a{i}", [2], tenant="ann")) is None
    with pytest.raises(RateLimited) as caught:
        drive.add(request("a5", [2], tenant="ann"))
    assert (caught.value.status, caught.value.code) == (429, "queue_full_tenant")
    assert caught.value.retry_after >= 1
    assert try_add(drive, request("b", [2], tenant="bob")) is None
    assert all(try_add(drive, request(f"n{i}", [2])) is None for i in range(6)), "no key, no share"
    drive.run()


def test_max_tokens_is_capped_per_lane():
    drive = Drive(max_tokens_bulk=5)
    with pytest.raises(BadRequest, match="at most 5 in lane bulk") as caught:
        drive.add(request("a", [1], lane=Lane.BULK, max_tokens=6))
    assert caught.value.field == "max_tokens"
    drive.add(request("fits", [1], lane=Lane.BULK, max_tokens=5))
    drive.add(request("other", [1], max_tokens=6))
    drive.scheduler.submit(request("open", [1], lane=Lane.BULK, max_tokens=None), 0.0)
    open_ended = next(s for s in drive.scheduler.resources.waiting if s.request.id == "open")
    assert open_ended.max_len == 6


# -- pages to come


def brute_peak(members: list[tuple[int, int]]) -> int:
    """Tokens needed beyond those held now, step by step."""
    need, peak = -sum(own for left, own in members if left == 0), 0
    for t in range(1, max((left for left, _ in members), default=0) + 1):
        need += sum(1 for left, _ in members if left >= t)
        peak = max(peak, need)
        need -= sum(left + own for left, own in members if left == t)
    return peak


@pytest.mark.parametrize("seed", range(30))
def test_the_peak_is_that_of_a_walk_step_by_step(seed):
    import random

    rng = random.Random(seed)
    members = [(rng.randrange(30), rng.randrange(40)) for _ in range(rng.randrange(9))]
    assert peak_tokens(members) == brute_peak(members)


def run_crowd(forget: bool) -> int:
    """Preemptions while 30 sequences of known length go through a pool that holds three of them."""
    drive = Drive(limits(n_pages=19, n_slots=8, max_rows=8, max_decode_rows=8))
    for i in range(30):
        drive.add(request(f"r{i}", [i % 11, i // 11, 1, 1], max_tokens=20, ignore_eos=True))
    while drive.step():
        if forget:
            drive.scheduler.resources.lengths = Lengths()
    drive.run()
    return drive.scheduler.resources.n_preemptions


def test_forecasts_spare_preemptions():
    blind, seeing = run_crowd(True), run_crowd(False)
    assert blind > 15
    assert seeing <= blind / 2


def test_lengths_are_learnt_per_lane_and_never_exceed_what_is_allowed():
    drive = Drive(depth=0)
    for i in range(4):
        drive.add(request(f"r{i}", [1], max_tokens=10, ignore_eos=True))
        drive.run()
    lengths = drive.scheduler.resources.lengths
    assert lengths.expected(Lane.STANDARD, 100) == 10
    assert lengths.expected(Lane.STANDARD, 4) == 4
    assert lengths.expected(Lane.BULK, 100) == 100, "nothing has ended there yet"
