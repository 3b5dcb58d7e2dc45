"""When nothing moves: who is given up, when, and what becomes of the others. The bugs are planted here."""

import pytest
from hypothesis import given, strategies as st

from jserve.errors import Unschedulable, error_of
from jserve.ports import Verdict
from jserve.sampling import StructuredOutputs
from jserve.sched.decode import DecodePlanner
from jserve.sched.record.journal import JournalFile
from jserve.sched.record.replay import replay
from jserve.sched.recovery.deadlock import AGAIN_S, LIMIT_S, STRIDE_S
from jserve.types import Finish, Lane
from tests.sched.sched_drive import Drive, limits, request, tokens_of


def stuck(drive: Drive, id: str = "stuck"):
    """The terminal output of ``id``, which must be that of one who was given up."""
    end = drive.told[id, 0].end
    assert end is not None
    assert (end.finish, end.error_code) == (Finish.ERROR, Unschedulable.code)
    return end


def turns(drive: Drive, n: int) -> None:
    for _ in range(n):
        drive.step()


def alone(*reqs) -> dict:
    return {key: tokens for req in reqs for key, tokens in tokens_of([req]).items()}


def never_enters(patch, drive):
    drive.jam("stuck")


def never_ready(patch, drive):
    ready = DecodePlanner.ready
    patch.setattr(
        DecodePlanner, "ready", lambda self: [s for s in ready(self) if s.request.id != "stuck"]
    )
    drive.jammed.add("stuck")
    drive._check_plan = lambda plan: None  # it would say that a decoder was skipped


def waits_for_ever(owner, method):
    """``stuck`` waits for what ``method`` of ``owner`` looks at, and it never comes."""

    def bug(patch, drive):
        found = getattr(drive.scheduler.prefill_planner, owner)
        real = getattr(found, method)
        patch.setattr(
            found, method, lambda seq, *step: seq.request.id == "stuck" or real(seq, *step)
        )
        drive.jammed.add("stuck")

    return bug


BUGS = {
    "it is not admitted, 32 of 32 pages": never_enters,
    "no step takes it": never_ready,
    "requests of a failed step are retried one group at a time": waits_for_ever(
        "bisection", "holds"
    ),
    "another request computes its prefix": waits_for_ever("prefix_waits", "wait"),
    "its prefix is read from disk": waits_for_ever("disk_waits", "wait"),
}


@pytest.mark.parametrize("said", BUGS)
def test_one_that_can_never_run_ends_and_the_others_go_on(said, monkeypatch):
    """Whatever holds it, and wherever: the words say what; the others get their own tokens."""
    drive = Drive()
    others = [request(f"r{i}", [i, 2, 3], max_tokens=12, lane=lane) for i, lane in enumerate(Lane)]
    drive.add(others[-1])  # older, and kept out by the one that is stuck: not to blame
    drive.add(request("stuck", [7, 7, 7], max_tokens=5, lane=Lane.INTERACTIVE))
    BUGS[said](monkeypatch, drive)
    for req in others[:-1]:
        drive.add(req)
    told = drive.run()
    end = stuck(drive)
    assert said in end.error
    assert "20 s" in end.error
    assert drive.scheduler.counters()["requests_unschedulable_total"] == 1
    assert {key: told[key] for key in told if key[0] != "stuck"} == alone(*others)
    assert error_of(end.error_code, end.error).status == 500


class NoMask:
    """``ports.Guide`` whose mask is never there."""

    forced, fault = (), None

    def room(self, in_flight):
        return 0

    def mask(self, drafts):
        return None

    def take(self, drawn):
        return Verdict()


class NoMasks:
    """``ports.Guides`` of such guides."""

    def guide(self, req, most):
        return NoMask() if req.params.guided else None

    def start_masks(self): ...

    def wait_masks(self, timeout_s): ...


def guided(journal=None) -> Drive:
    """A drive in which structures never get their masks, with one that has one and one that has not."""
    drive = Drive(limits(masks=True), journal=journal)
    drive.scheduler.guides = NoMasks()
    drive.scheduler.decode_planner.guided = True
    drive.jammed.add("stuck")
    regex = StructuredOutputs(regex="a+")
    drive.add(request("stuck", [1, 2], eos=(3,), structured_outputs=regex))
    drive.add(request("free", [4, 5], max_tokens=6))
    return drive


def test_a_mask_that_never_comes_ends_its_sequence_only():
    drive = guided()
    told = drive.run()
    assert "structure" in stuck(drive).error
    assert told["free", 0] == alone(request("free", [4, 5], max_tokens=6))["free", 0]


def test_a_journal_replays_it(tmp_path):
    path = tmp_path / "journal"
    with path.open("wb") as file:
        drive = guided(JournalFile(file))
        drive.run()
    end = stuck(drive)
    again = replay(path, drive.limits, drive.config)
    assert [out for out in again.outputs if out.request_id == "stuck"] == [end]


def test_choices_of_one_request_end_one_after_the_other():
    drive = Drive()
    drive.add(request("stuck", [1, 2], n=3))
    drive.jam("stuck")
    turns(drive, round(LIMIT_S) + 2)
    assert sum(told.end is not None for told in drive.told.values()) == 1
    turns(drive, round(2 * AGAIN_S) + 2)
    assert all(told.end is not None for told in drive.told.values())
    assert not drive.scheduler.has_work


def test_what_came_late_has_its_own_time():
    """It joins an impasse of 19 s: a second later it has waited for one."""
    drive = Drive()
    drive.add(request("first", [1, 2]))
    drive.jam("first")
    turns(drive, round(LIMIT_S) - 1)
    drive.add(request("stuck", [3, 4]))
    drive.jam("stuck")
    drive.cancel("first")
    turns(drive, round(LIMIT_S) - 2)
    assert drive.told["stuck", 0].end is None
    turns(drive, 4)
    assert stuck(drive)


def test_a_process_that_was_stopped_gives_nobody_up():
    drive = Drive()
    drive.add(request("a", [1, 2], max_tokens=3))
    drive.jam("a")
    turns(drive, 3)
    drive.now += 1000.0
    turns(drive, 3)
    assert drive.told["a", 0].end is None
    drive.jammed.clear()
    assert drive.run()["a", 0]


def test_an_idle_scheduler_that_is_asked_for_plans_stands_in_no_impasse():
    """Nor does it help that the clock jumped behind the arrival of the next request."""
    drive = Drive()
    for _ in range(3 * round(LIMIT_S)):
        assert not drive.launch()
    drive.add(request("a", [1, 2], max_tokens=3))
    drive.now += 1000.0
    assert drive.run()["a", 0]
    assert not drive.given_up


def test_a_step_that_runs_for_long_is_no_impasse():
    """Plans asked for in vain beside it do not count: what is in flight will come back."""
    drive = Drive(depth=0)
    drive.add(request("a", [1, 2], max_tokens=3))
    drive.add(request("b", [3, 4], max_tokens=3))
    while drive.launch():
        pass
    for _ in range(3 * round(LIMIT_S)):
        assert not drive.launch()
    assert drive.run().keys() == {("a", 0), ("b", 0)}
    assert not drive.given_up


def test_who_waits_while_others_run_is_not_given_up():
    """As long as steps run nobody is, however long it waits: that is what queues are for."""
    drive = Drive(limits(n_slots=1, max_rows=1, max_decode_rows=1))
    drive.add(request("long", [1, 2], max_tokens=60))
    drive.add(request("waits", [3, 4], max_tokens=2))
    turns(drive, 50)
    assert drive.told["waits", 0].end is None
    assert drive.run()["waits", 0]


@given(st.lists(st.tuples(st.floats(0, 40), st.booleans()), max_size=60))
def test_time_counts_only_between_plans_in_vain(plans):
    drive = Drive()
    drive.add(request("a", [1, 2]))
    guard, now, stood, asked = drive.scheduler.deadlock, 100.0, 0.0, False
    for seconds, moves in plans:
        now += seconds
        stood = 0.0 if moves or not asked else stood + min(seconds, STRIDE_S)
        asked = not moves
        guard.planned(now, moves=moves)
        assert abs(guard._stood_s - stood) < 1e-6
        found = guard.find(0, now)
        if found is None:
            assert stood < LIMIT_S + 1e-6
        else:
            assert stood >= LIMIT_S - 1e-6
            assert found.seq.request.id == "a"
            stood = LIMIT_S - AGAIN_S
