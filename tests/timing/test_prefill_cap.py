"""Prefill caps: decoders keep their pace, and no prefill starves for it."""

import pytest

from jserve.timing import prefill_cap
from jserve.timing.step_costs import MeasuredCosts
from tests.sched.sched_drive import Drive, limits, request, seconds_of, step_times


def plans(drive: Drive, n: int) -> list:
    found = []
    for _ in range(n):
        if not drive.launch():
            break
        found.append(drive.flight[-1].plan)
        drive.commit()
    return found


def prefill_of(plan) -> int:
    return sum(row.count for row in plan.rows if not row.from_slot)


def bounded(bound_ms: float, **options) -> Drive:
    """One sequence decodes when a prompt of 50 tokens arrives."""
    drive = Drive(
        limits(step_times=step_times()), depth=0, itl_bound_ms=bound_ms, page_size=4, **options
    )
    drive.add(request("talks", [1], max_tokens=60, ignore_eos=True))
    plans(drive, 2)
    drive.add(request("long", list(range(10)) * 5, max_tokens=1))
    return drive


@pytest.mark.parametrize(
    ("bound_ms", "chunk"), [(0.0, 16), (10.3, 16), (10.1, 8), (6.3, 8), (4.3, 4)]
)
def test_the_chunk_is_the_largest_whose_step_keeps_the_bound(bound_ms, chunk):
    drive = bounded(bound_ms)
    found = plans(drive, 3)
    assert [prefill_of(plan) for plan in found] == [chunk] * 3
    if bound_ms:
        assert seconds_of(2, chunk) * 1e3 <= bound_ms
    assert all(plan.rows[0].from_slot for plan in found), "who decodes is in every step"
    drive.run()


def test_the_bound_holds_on_every_step_that_decodes():
    drive = bounded(6.3)
    for plan in plans(drive, 30):
        if plan.rows[0].from_slot:
            assert seconds_of(2, prefill_of(plan)) * 1e3 <= 6.3
    drive.run()


def test_nobody_decodes_so_the_whole_budget_is_taken():
    drive = Drive(limits(step_times=step_times()), depth=0, itl_bound_ms=4.3)
    drive.add(request("long", [1] * 40, max_tokens=1))
    assert [prefill_of(plan) for plan in plans(drive, 3)] == [16, 16, 8]
    drive.run()


def test_a_bound_that_nothing_keeps_still_lets_a_page_through_now_and_then():
    """The stated bound: n tokens are computed within PATIENCE * ceil(n / page) steps."""
    drive = bounded(0.001)
    carried = [prefill_of(plan) for plan in plans(drive, prefill_cap.PATIENCE * 6)]
    assert carried == [0, 0, 0, 0, 0, 0, 0, 4] * 6
    drive.run()


def test_the_step_budget_and_the_chunk_of_one_request_are_two_caps():
    drive = Drive(limits(), depth=0, max_prefill_tokens=10, max_prefill_chunk=6)
    for id in "ab":
        drive.add(request(id, [ord(id) % 11] * 20, max_tokens=1))
    assert [[row.count for row in plan.rows] for plan in plans(drive, 2)] == [[6, 4], [6, 4]]
    drive.run()


def test_overload_shortens_the_prefill():
    cap = prefill_cap.PrefillCap(MeasuredCosts(), most=512, least=16, bound_s=0.0)
    assert cap.tokens(3, 100, short=False) == 512
    assert cap.tokens(3, 100, short=True) == 512 // prefill_cap.SHORTENED
    assert (
        prefill_cap.PrefillCap(MeasuredCosts(), most=20, least=16, bound_s=0.0).tokens(
            3, 100, short=True
        )
        == 16
    )


def test_the_bound_follows_what_steps_really_take():
    """The device turns out twice as slow as measured: the chunk shrinks."""
    costs = MeasuredCosts(step_times())
    cap = prefill_cap.PrefillCap(costs, most=16, least=4, bound_s=10.3e-3)
    assert cap.tokens(2, 64, short=False) == 16
    for _ in range(10):
        costs.observe(2, 16, 64, 2 * seconds_of(2, 16))
    assert cap.tokens(2, 64, short=False) < 16
