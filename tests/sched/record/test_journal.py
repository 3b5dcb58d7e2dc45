"""A journal of the scheduler's inputs replays to the same decisions."""

import random
import re

import pytest

from jserve.errors import JserveError
from jserve.sched.record.journal import JournalFile
from jserve.sched.record.replay import Diverged, replay
from jserve.types import Lane
from tests.sched.sched_drive import VOCAB, Drive, MixedDrafts, drafting, limits, request, step_times


def record(path, seed: int, *, drafts: bool = False) -> tuple[Drive, list]:
    """A busy run with preemption, cancels, faults and refusals; its drive and all outputs."""
    rng = random.Random(seed)
    with path.open("wb") as file:
        times = step_times() if seed % 2 else ()
        own = {"n_pages": 11, "max_drafts": 3 if drafts else 0}
        lim = limits(**own, step_times=times)
        options = {"journal": JournalFile(file), "max_waiting": 6, "seed": 5}
        options |= {"itl_bound_ms": 5.0, "ageing_s": 9.0, "max_queue_s": 60.0}
        drive = drafting(MixedDrafts(), lim, **options) if drafts else Drive(lim, **options)
        for i in range(14):
            prompt = [1, 2, 3, 4, *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 7)))]
            extras = rng.choice(
                [
                    {},
                    {"logprobs": 2},
                    {"logprob_token_ids": (1, 2)},
                    {"prompt_logprobs": 1},
                    {"n": 2},
                ]
            )
            extras |= {"temperature": 1.0, "logit_bias": {2: -3.0}, "max_tokens": 20}
            extras |= {"extra_args": {"echo": rng.choice([1, "prompt"])}} if i % 3 == 0 else {}
            extras |= {"lane": rng.choice(list(Lane)), "tenant": rng.choice(["", "ann", "bob"])}
            if rng.random() < 0.4:
                wish = rng.choice(["ttft_deadline_ms", "deadline_ms", "tpot_deadline_ms"])
                extras[wish] = rng.choice([4000.0, 25000.0])
            try:
                drive.add(request(f"r{i}", prompt, **extras))
            except JserveError:
                continue
            for _ in range(rng.randrange(4)):
                drive.step()
            if i == 8:
                drive.runner.fail_next = RuntimeError("the step raised")
        drive.cancel("r1")
        drive.cancel("r13", 0)
        if ("r12", 0) in drive.told and drive.told["r12", 0].end is None:
            drive.poison("r12")
        drive.run()
    return drive, [out for told in drive.told.values() for out in told.outputs]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5, 6])
def test_a_replay_makes_the_same_decisions(tmp_path, seed, drafts):
    path = tmp_path / "journal.jsonl"
    drive, outputs = record(path, seed, drafts=drafts)
    assert drive.scheduler.stats().preemptions > 0, "the run was to go through preemption"
    again = replay(path, drive.limits, drive.config)
    assert again.n_steps == drive.scheduler.n_steps
    assert again.n_events == len(path.read_bytes().splitlines())
    echoed = [(out.token_ids, out.extra) for out in outputs if out.extra is not None]
    assert echoed
    assert all(extra == {"echo": ids} for ids, extra in echoed)
    key = repr
    assert sorted(again.outputs, key=key) == sorted(outputs, key=key)


def test_the_journal_runs_through_everything_that_decides(tmp_path):
    """Over its seeds: deadlines that pass, refusals, lanes, step times that teach."""
    said, lines, refused = set(), b"", 0
    for seed in range(6):
        path = tmp_path / f"{seed}.jsonl"
        drive, outputs = record(path, seed)
        said |= {out.error_code for out in outputs}
        lines += path.read_bytes()
        refused += sum(drive.scheduler.gate.n_refused.values())
        assert drive.scheduler.costs.known
    assert "deadline_exceeded" in said
    assert b'"type":"expire"' in lines
    assert b'"type":"recover"' in lines
    assert b'"lane":"bulk"' in lines
    assert b'"tenant":"ann"' in lines
    assert refused > 0


def test_a_replay_without_the_step_times_of_the_run_parts_from_it(tmp_path):
    """The times that results carry are inputs: chunks follow from them."""
    path = tmp_path / "journal.jsonl"
    drive, _ = record(path, 1)
    changed = re.sub(rb'"device_us":[0-9.]+', b'"device_us":90000.0', path.read_bytes())
    path.write_bytes(changed)
    with pytest.raises(Diverged):
        replay(path, drive.limits, drive.config)


def test_a_replay_under_other_options_says_where_it_parts(tmp_path):
    path = tmp_path / "journal.jsonl"
    drive, _ = record(path, 0)
    with pytest.raises(Diverged, match=r"line \d+"):
        replay(path, limits(n_pages=13), drive.config)


def test_a_changed_line_is_noticed(tmp_path):
    path = tmp_path / "journal.jsonl"
    drive, _ = record(path, 0)
    lines = path.read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if b'"type":"arrival"' in line)
    path.write_bytes(b"".join(lines[:at] + lines[at + 1 :]))
    with pytest.raises(Diverged):
        replay(path, drive.limits, drive.config)


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "journal.jsonl"
    drive, _ = record(path, 0)
    whole = replay(path, drive.limits, drive.config)
    path.write_bytes(path.read_bytes()[:-9])
    assert replay(path, drive.limits, drive.config).n_events == whole.n_events - 1
