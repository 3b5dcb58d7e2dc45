"""Vocab rows, which sequences with penalties or biases need: who waits for one, and that nobody waits for ever."""

import pytest

from jserve.errors import BadRequest
from jserve.sched.admission.queue import MOST_SKIPPED, PASSES
from jserve.sched.record.journal import JournalFile
from jserve.sched.record.replay import Diverged, replay
from jserve.sched.recovery.deadlock import LIMIT_S
from jserve.types import Finish, Lane
from tests.sched.sched_drive import Drive, MixedDrafts, drafting, limits, request, tokens_of

PENALISED = [
    {"presence_penalty": 1.0},
    {"frequency_penalty": 0.5, "temperature": 1.0, "seed": 3},
    {"repetition_penalty": 1.3},
    {"logit_bias": {3: 1.5}},
    {"allowed_token_ids": (1, 2, 3, 5)},
    {"bad_token_ids": ((4,), (1, 2))},
]
FIELDS = [
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
]


def mixed(n: int = 12, **more) -> list:
    """Three of four requests need a vocab row."""
    return [
        request(f"r{i}", [1 + i % 5, 2, 3], **(PENALISED[i % 6] if i % 4 else {}), **more)
        for i in range(n)
    ]


def alone(reqs) -> dict:
    return {key: tokens for req in reqs for key, tokens in tokens_of([req]).items()}


def running(drive: Drive) -> list[str]:
    return [seq.request.id for seq in drive.scheduler.resources.running]


def until_runs(drive: Drive, id: str, most: int = 200) -> None:
    for _ in range(most):
        if id in running(drive):
            return
        drive.step()
    raise AssertionError(f"{id} does not run")


def until_runs_or_ends(drive: Drive, id: str, most: int) -> None:
    for _ in range(most):
        drive.step()
        if id in running(drive) or drive.told[id, 0].end is not None:
            return
    raise AssertionError(f"{id} is kept out")


@pytest.mark.parametrize("n_rows", [1, 2, 3])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_more_of_them_than_rows_get_what_they_get_alone(n_rows: int, depth: int) -> None:
    reqs = mixed()
    six = {"n_slots": 6, "max_rows": 6, "max_decode_rows": 6}
    drive = Drive(limits(n_vocab_rows=n_rows, **six), depth=depth)
    for req in reqs:
        drive.add(req)
    most, resources = 0, drive.scheduler.resources
    while drive.step():
        held = [seq for seq in resources.running if seq.vocab_row >= 0]
        most = max(most, len(held))
        assert len(held) <= n_rows
    assert most == n_rows
    assert {key: told.tokens for key, told in drive.told.items()} == alone(reqs)
    counters = drive.scheduler.counters()
    assert (counters["vocab_rows"], counters["vocab_rows_used"]) == (n_rows, 0)
    assert counters["vocab_row_waits_total"] > 0


def test_those_that_need_none_go_on_meanwhile() -> None:
    drive = Drive(limits(n_vocab_rows=1))
    drive.add(request("first", [1], max_tokens=30, **PENALISED[0]))
    drive.add(request("second", [2], max_tokens=4, **PENALISED[1]))
    drive.add(request("plain", [3], max_tokens=4))
    drive.step()
    assert running(drive) == ["first", "plain"]
    drive.run()
    assert all(told.end.finish is Finish.LENGTH for told in drive.told.values())


def test_bad_words_of_several_tokens_need_none() -> None:
    drive = Drive(limits(n_vocab_rows=0))
    drive.add(request("words", [1], bad_token_ids=((1, 2),)))
    drive.run()
    assert drive.told["words", 0].end.finish is Finish.LENGTH


@pytest.mark.parametrize(("params", "field"), list(zip(PENALISED, FIELDS, strict=True)))
def test_without_rows_they_are_refused_by_name(params: dict, field: str) -> None:
    drive = Drive(limits(n_vocab_rows=0))
    with pytest.raises(BadRequest, match="max_penalized_seqs is 0") as caught:
        drive.add(request("x", [1], **params))
    assert caught.value.field == field
    assert not drive.scheduler.has_work


@pytest.mark.parametrize("lane", [Lane.BULK, Lane.STANDARD])
def test_nobody_starves_for_a_row(lane: Lane) -> None:
    """Others of a higher lane want the one row too, and more of them all the time, beside a flow of plain
    ones in the lane of the waiting one, which keep its lane served."""
    drive = Drive(limits(n_vocab_rows=1), max_waiting=1000, ageing_s=1e9, tenant_share=1.0)
    drive.add(request("holder", [1], max_tokens=3, **PENALISED[0]))
    drive.step()
    drive.add(request("late", [2], lane=lane, max_tokens=2, **PENALISED[0]))
    for i in range(3 * PASSES):
        if drive.told["late", 0].end is not None:
            break
        drive.add(request(f"i{i}", [3], lane=Lane.INTERACTIVE, max_tokens=3, **PENALISED[0]))
        drive.add(request(f"p{i}", [4], lane=lane, max_tokens=2))
        for _ in range(4):
            drive.step()
    assert drive.told["late", 0].end is not None, "it starves"
    drive.run()


def test_a_crowd_that_waits_for_rows_keeps_no_other_lane_out() -> None:
    """More of bulk wait for the one row than a step looks past, and are overdue; other lanes enter at once."""
    drive = Drive(limits(n_vocab_rows=1), max_waiting=1000, ageing_s=0.0, tenant_share=1.0)
    drive.add(request("holder", [1], max_tokens=40, **PENALISED[2]))
    for i in range(MOST_SKIPPED + 9):
        drive.add(request(f"b{i}", [2], lane=Lane.BULK, max_tokens=2, **PENALISED[0]))
    for i in range(2 * PASSES):
        drive.add(request(f"i{i}", [3], lane=Lane.INTERACTIVE, max_tokens=1))
        until_runs_or_ends(drive, f"i{i}", most=3)
    assert drive.told["holder", 0].end is not None or "holder" in running(drive)
    drive.run()


def test_bulk_gives_its_row_to_lane_interactive() -> None:
    drive = Drive(limits(n_vocab_rows=1))
    drive.add(request("bulk", [1, 2, 3], lane=Lane.BULK, max_tokens=20, **PENALISED[0]))
    drive.add(request("plain", [5], lane=Lane.BULK, max_tokens=20))
    drive.step()
    drive.step()
    reqs = list(drive.requests.values())
    urgent = request("urgent", [4], lane=Lane.INTERACTIVE, max_tokens=6, **PENALISED[1])
    drive.add(urgent)
    until_runs(drive, "urgent", most=4)
    assert running(drive) == ["urgent", "plain"], "one that holds no row gave way"
    assert drive.scheduler.resources.n_preemptions == 1
    drive.run()
    assert {k: told.tokens for k, told in drive.told.items()} == alone([*reqs, urgent])


def test_one_that_gave_way_counts_on_in_another_row() -> None:
    reqs = mixed(6, max_tokens=20)
    drive = Drive(limits(n_vocab_rows=2))
    for req in reqs:
        drive.add(req)
    for i in range(12):
        drive.step()
        drive.preempt(i)
    assert drive.scheduler.resources.n_preemptions > 3
    drive.run()
    assert {key: told.tokens for key, told in drive.told.items()} == alone(reqs)


def test_a_row_comes_back_however_its_sequence_ends() -> None:
    drive = Drive(limits(n_vocab_rows=1))
    for i in range(3):
        drive.add(request(f"r{i}", [1], max_tokens=20, **PENALISED[i]))
    drive.step()
    assert running(drive) == ["r0"]
    drive.cancel("r0")
    until_runs(drive, "r1", most=5)
    drive.runner.fail_next = RuntimeError("the step raised")
    drive.run()
    assert drive.told["r2", 0].end.finish is Finish.LENGTH


@pytest.mark.parametrize("drafts", [False, True])
def test_a_replay_leases_the_same_rows(tmp_path, drafts: bool) -> None:
    path = tmp_path / "journal.jsonl"
    with path.open("wb") as file:
        lim = limits(n_vocab_rows=2, n_pages=11, max_drafts=3 * drafts)
        journal = JournalFile(file)
        make = (lambda *args, **kw: drafting(MixedDrafts(), *args, **kw)) if drafts else Drive
        drive = make(lim, journal=journal)
        for req in mixed(max_tokens=20):
            drive.add(req)
            drive.step()
        drive.run()
    found = replay(path, lim, drive.config)
    assert found.n_steps == drive.scheduler.n_steps
    text = path.read_text()
    assert '"vocab_rows":[1]' in text
    path.write_text(text.replace('"vocab_rows":[1]', '"vocab_rows":[0]', 1))
    with pytest.raises(Diverged):
        replay(path, lim, drive.config)


def test_with_drafts_they_get_what_they_get_alone() -> None:
    reqs = mixed(max_tokens=16)
    drive = drafting(MixedDrafts(), limits(n_vocab_rows=2, max_drafts=3))
    for req in reqs:
        drive.add(req)
    drive.run()
    assert {key: told.tokens for key, told in drive.told.items()} == alone(reqs)


def test_a_row_that_never_comes_is_named(monkeypatch) -> None:
    """A bug is planted: the only row is lost."""
    drive = Drive(limits(n_vocab_rows=1), checks=False)
    rows = drive.scheduler.resources.vocab_rows
    monkeypatch.setattr(rows, "lacks", lambda seq: seq.request.params.needs_vocab_row)
    drive.jammed.add("stuck")
    drive.add(request("stuck", [1], **PENALISED[0]))
    for _ in range(int(LIMIT_S) + 10):
        drive.step()
    end = drive.told["stuck", 0].end
    assert end is not None
    assert "all 1 places for sequences with penalties or biases are taken" in end.error
    assert drive.scheduler.resources.waiting.n_tokens == 0
