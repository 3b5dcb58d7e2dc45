"""The fakes keep the contract that the real runner and tokenizers keep."""

import dataclasses

import msgspec
import numpy as np
import pytest

from jserve.errors import BadRequest
from jserve.ports import Runner, Tokenizer
from jserve.testing import ByteTokenizer, FakeRunner
from jserve.types import StepPlan
from tests.sched.sched_drive import Drive, limits, request


def planned(**kw) -> tuple[Drive, StepPlan]:
    drive = Drive(**kw)
    drive.add(request("a", [1, 2, 3, 4, 5]))
    drive.add(request("b", [6, 7]))
    plan = drive.scheduler.plan(0.0)
    assert plan is not None
    return drive, plan


def test_the_fake_is_a_runner():
    assert isinstance(FakeRunner(limits()), Runner)


def with_row(plan: StepPlan, r: int, **changes) -> StepPlan:
    rows = list(plan.rows)
    rows[r] = msgspec.structs.replace(rows[r], **changes)
    return dataclasses.replace(plan, rows=tuple(rows))


@pytest.mark.parametrize("spoil", ["token", "ctx", "other page", None])
def test_a_wrong_page_changes_the_next_token(spoil):
    drive, first = planned(lim=limits(vocab_size=10**6))
    second = drive.scheduler.plan(0.0)
    assert second is not None
    tokens = []
    for broken in (None, spoil):
        runner, plan = FakeRunner(drive.limits), second
        runner.launch(first)
        page = first.page_table_RM[0, 0]
        if broken == "token":
            runner.token_PZ[page, 2] += 1
        elif broken == "ctx":
            runner.ctx_PZ[page, 2] += np.uint64(1)
        elif broken == "other page":
            runner.token_PZ[30], runner.ctx_PZ[30] = 1, 1
            table = second.page_table_RM.copy()
            table[0, 0] = 30
            plan = dataclasses.replace(second, page_table_RM=table)
        tokens.append(runner.launch(plan).handle[1].tokens_RJ[0, 0])
    assert (tokens[0] == tokens[1]) == (spoil is None)


@pytest.mark.parametrize(
    ("message", "spoil"),
    [
        ("scratch", lambda p: dataclasses.replace(p, page_table_RM=p.page_table_RM * 0)),
        (
            "one position",
            lambda p: dataclasses.replace(p, page_table_RM=p.page_table_RM[[0, 0]]),
        ),
        ("share a slot", lambda p: with_row(p, 1, slot=p.rows[0].slot)),
        ("never written", lambda p: with_row(p, 1, start=2)),
        ("count 3, 2 tokens", lambda p: with_row(p, 1, count=3)),
        ("first", lambda p: with_row(p, 1, from_slot=True, tokens=(), count=1)),
        ("empty plan", lambda p: dataclasses.replace(p, rows=())),
        ("leaves the context", lambda p: with_row(p, 1, start=63)),
        ("other rows", lambda p: dataclasses.replace(p, page_table_RM=p.page_table_RM[:1])),
    ],
)
def test_a_broken_plan_is_an_assertion(message, spoil):
    drive, plan = planned()
    with pytest.raises(AssertionError, match=message):
        drive.runner.launch(spoil(plan))


def test_steps_are_collected_in_order():
    drive, plan = planned()
    drive.runner.launch(plan)
    second = drive.runner.launch(drive.scheduler.plan(0.0))
    with pytest.raises(AssertionError, match="launch order"):
        drive.runner.collect(second)


def test_bytes_round_trip():
    tok: Tokenizer = ByteTokenizer(add_bos=True)
    assert tok.vocab_size == 259
    ids = tok.encode("naïve <|eos|> 🎈")
    assert ids[0] == 256
    assert max(ids[1:]) < 256, "special tokens never come from text"
    assert tok.decode(ids) == "naïve <|eos|> 🎈"
    assert tok.decode([*ids[1:3], 257], skip_special_tokens=False) == "na<|eos|>"
    assert tok.encode("a", add_special_tokens=False) == [97]
    assert tok.decode([0xF0, 0x9F]) == "\ufffd"


def test_a_small_vocabulary_refuses_other_text():
    tok = ByteTokenizer(n_bytes=128)
    assert tok.vocab_size == 131
    assert tok.eos_ids == (129,)
    for text in ("é", "\ud800"):
        with pytest.raises(BadRequest):
            tok.encode(text)
    with pytest.raises(ValueError, match="n_bytes"):
        ByteTokenizer(n_bytes=0)


def test_host_modules_do_not_import_jax():
    import subprocess
    import sys

    code = (
        "import sys, jserve.testing, jserve.sched.scheduler, jserve.sched.record.journal, jserve.kv.cache;"
        "sys.exit(any(m == 'jax' or m.startswith('jax.') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_finite_rows_by_default():
    drive, plan = planned()
    result = drive.runner.collect(drive.runner.launch(plan))
    np.testing.assert_array_equal(result.finite_R, [True, True])
    np.testing.assert_array_equal(result.n_ok_R, [1, 1])


def device_drafts(n_left: int, n_used: int, **kw):
    """The result of a step that tries ``n_used`` drafts after one that left ``n_left``."""
    drive, first = planned(lim=limits(device_drafts=3, max_drafts=3))
    runner = FakeRunner(drive.limits, **kw)
    runner.collect(runner.launch(dataclasses.replace(first, n_draft=n_left)))
    rows = drive.scheduler.plan(0.0).rows
    rows = tuple(
        msgspec.structs.replace(row, drafts=(-1,) * n_used, count=1 + n_used) for row in rows
    )
    table = np.pad(first.page_table_RM, ((0, 0), (0, 1)))
    table[:, 2] = [20, 21]
    table[1, 1] = 22
    plan = StepPlan(id=1, rows=rows, page_table_RM=table)
    expected = [runner.expected(drive.requests[id])[1:4] for id in "ab"]
    return runner.collect(runner.launch(plan)), expected


def test_drafts_of_the_device_stand_when_they_are_right():
    result, expected = device_drafts(3, 2, acceptance=1.0)
    assert result.n_ok_R.tolist() == [3, 3]
    assert result.tokens_RJ.tolist() == expected


def test_wrong_drafts_of_the_device_change_nothing():
    result, expected = device_drafts(3, 2, acceptance=0.0)
    assert result.n_ok_R.tolist() == [1, 1]
    assert result.tokens_RJ[:, 0].tolist() == [tokens[0] for tokens in expected]


def test_a_slot_gives_no_more_drafts_than_it_holds():
    with pytest.raises(AssertionError, match="2 drafts wanted, the slot holds 1"):
        device_drafts(1, 2)
    with pytest.raises(AssertionError, match="4 drafts of the device"):
        device_drafts(4, 2)
