"""The scheduler, rule by rule."""

import gc

import pytest

from jserve.errors import BadRequest, Overloaded
from jserve.sched import policy
from jserve.types import Finish, SeqState, Sequence
from tests.sched.sched_drive import Drive, limits, request, tokens_of


def shapes(plan) -> list[tuple]:
    return [(r.choice.request.id, r.start, r.count, r.from_slot, r.emits) for r in plan.rows]


# -- plans


def test_decode_rows_come_first_and_prefill_gets_what_is_left():
    drive = Drive(max_num_batched_tokens=6)
    drive.add(request("a", [1] * 3))
    drive.step()
    drive.add(request("b", [2] * 9))
    plan = drive.scheduler.plan(9.0)
    assert shapes(plan) == [("a", 3, 1, True, True), ("b", 0, 5, False, False)]
    assert plan.rows[1].tokens == (2,) * 5
    assert plan.page_table_RM.shape == (2, 2)


def test_a_decoder_gets_a_row_in_every_step_while_prompts_arrive():
    drive = Drive(max_num_batched_tokens=5, depth=1)
    drive.add(request("talk", [1], max_tokens=30, ignore_eos=True))
    drive.step()
    for i in range(5):
        drive.add(request(f"long{i}", [i] * 30, max_tokens=1))
    for _ in range(20):
        plan = drive.scheduler.plan(0.0)
        assert plan.rows[0].choice.request.id == "talk"
        assert plan.n_tokens == 5, "the whole budget is used"
        drive.flight.append(drive.runner.launch(plan))
        drive.commit()


def test_the_last_row_of_a_prefill_emits():
    drive = Drive(max_prefill_chunk=4, depth=0)
    drive.add(request("a", [1] * 10))
    seen = [drive.scheduler.plan(0.0) for _ in range(4)]
    assert [shapes(p)[0][1:] for p in seen] == [
        (0, 4, False, False),
        (4, 4, False, False),
        (8, 2, False, True),
        (10, 1, True, True),
    ]


def test_a_chunk_carries_the_token_after_it_and_the_targets_of_its_prompt():
    drive = Drive(max_prefill_chunk=4, depth=0)
    drive.add(request("a", range(9), prompt_logprobs=0))
    rows = [drive.scheduler.plan(0.0).rows[0] for _ in range(4)]
    assert [row.next_token for row in rows] == [4, 8, -1, -1]
    assert [row.targets for row in rows] == [(1, 2, 3, 4), (5, 6, 7, 8), (), ()]


def test_a_plan_does_not_change_while_it_runs():
    """Its sequences draw, give way, start over and end in the meantime."""
    drive = Drive(limits(n_pages=9), depth=2)
    for id in "abc":
        drive.add(request(id, [ord(id) % 11] * 6, max_tokens=22, prompt_logprobs=0))
    flying, n_preempted = {}, 0
    while drive.step():
        n_preempted += sum(seq.n_preempted for seq in drive.scheduler.resources.waiting)
        for flight in drive.flight:
            plan = flight.plan
            seen = f"{plan.rows} {plan.page_table_RM.tolist()} {plan.loads} {plan.moves}"
            assert flying.setdefault(plan.id, seen) == seen
    assert n_preempted, "the test means nothing unless somebody starts over"


def test_limits_of_the_runner_hold():
    lim = limits(max_prefill_tokens=7, max_prefill_rows=2, n_slots=8, max_rows=8, max_decode_rows=3)
    drive = Drive(lim)
    for i in range(8):
        drive.add(request(f"r{i}", [i] * 3))
    plan = drive.scheduler.plan(0.0)
    assert [row.count for row in plan.rows] == [3, 3]
    drive.runner.launch(plan)
    drive.scheduler.plan(0.0)
    assert len(drive.scheduler.resources.running) == 3, "all who run fit one step's decode rows"


def test_nothing_to_do_is_no_plan():
    drive = Drive()
    assert drive.scheduler.plan(0.0) is None
    assert not drive.scheduler.has_work


def test_no_row_is_planned_past_the_length():
    drive = Drive(depth=2)
    drive.add(request("a", [1, 2], max_tokens=2))
    plans = [drive.scheduler.plan(0.0) for _ in range(3)]
    assert [plan is None for plan in plans] == [False, False, True]
    assert drive.scheduler.has_work


def test_priority_orders_the_queue():
    drive = Drive(limits(n_slots=1), depth=0)
    for id, priority in (("first", 0), ("late", 5), ("urgent", -1), ("second", 0)):
        drive.add(request(id, [1], priority=priority, max_tokens=1))
    ends = []
    while drive.step():
        ends += [k[0] for k, t in drive.told.items() if t.end and k[0] not in ends]
    assert ends == ["urgent", "first", "second", "late"]


# -- ends


def ended(req, **kw):
    drive = Drive(**kw)
    drive.add(req)
    drive.run()
    return drive.told[req.id, 0]


def test_ends_at_max_tokens():
    told = ended(request("a", [1, 2], max_tokens=5))
    assert (told.end.finish, told.end.stop_reason, len(told.tokens)) == (Finish.LENGTH, None, 5)


def test_max_tokens_none_fills_the_context_or_the_pool():
    assert len(ended(request("a", [1] * 4, max_tokens=None)).tokens) == 60
    assert len(ended(request("a", [1] * 4, max_tokens=None), lim=limits(n_pages=6)).tokens) == 17


def test_max_tokens_zero_scores_the_prompt_and_says_nothing():
    told = ended(request("a", [1, 2, 3], max_tokens=0, prompt_logprobs=1))
    assert told.tokens == []
    assert told.end.finish is Finish.LENGTH
    assert len(told.end.prompt_logprobs) == 3


@pytest.mark.parametrize("as_eos", [True, False])
def test_stop_ids_end_and_name_themselves(as_eos):
    free = ended(request("a", [1, 2], max_tokens=20)).tokens
    stop = free[6]
    at = free.index(stop)
    params = {"eos": (stop,)} if as_eos else {"stop_token_ids": (stop,)}
    told = ended(request("a", [1, 2], max_tokens=20, **params))
    assert told.tokens == free[: at + 1]
    assert told.end.finish is Finish.STOP
    assert told.end.stop_reason == (None if as_eos else stop)


def test_ignore_eos():
    told = ended(request("a", [1, 2], eos=(3,), ignore_eos=True, max_tokens=20), eos_rate=2)
    assert told.end.finish is Finish.LENGTH


@pytest.mark.parametrize("n_min", [0, 1, 5])
def test_min_tokens_holds_stops_back(n_min):
    told = ended(request("a", [1, 2], eos=(3,), min_tokens=n_min, max_tokens=20), eos_rate=1)
    assert len(told.tokens) == n_min + 1
    assert told.end.finish is Finish.STOP
    assert 3 not in told.tokens[:-1]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("steps", range(9))
def test_cancel_at_every_stage_is_one_end(steps, depth):
    drive = Drive(depth=depth, max_prefill_chunk=3)
    drive.add(request("gone", [1] * 8, n=2, max_tokens=3))
    drive.add(request("stays", [1] * 8, max_tokens=3))
    for _ in range(steps):
        drive.step()
    drive.cancel("gone")
    assert drive.scheduler.cancel("gone") == []
    assert all(drive.told["gone", i].end is not None for i in (0, 1))
    drive.run()


def test_cancel_of_one_choice_leaves_the_others():
    drive = Drive()
    drive.add(request("a", [1], n=3, max_tokens=4, temperature=1.0))
    drive.step()
    drive.cancel("a", 1)
    drive.run()
    ends = [drive.told["a", i].end.finish for i in range(3)]
    assert ends == [Finish.LENGTH, Finish.ABORT, Finish.LENGTH]


def test_cancel_of_a_stranger_says_nothing():
    assert Drive().scheduler.cancel("nobody") == []


def test_an_id_is_free_again_after_the_end():
    drive = Drive(depth=0)
    drive.add(request("a", [1], max_tokens=1))
    with pytest.raises(BadRequest, match="in use"):
        drive.scheduler.submit(request("a", [1]), 0.0)
    drive.run()
    drive.scheduler.submit(request("a", [1]), 0.0)


# -- faults


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_row_that_is_not_finite_ends_its_sequence_alone(depth):
    drive = Drive(depth=depth)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    drive.add(request("bad", prompt, max_tokens=20))
    drive.add(request("good", [2, *prompt], max_tokens=20))
    for _ in range(5):
        drive.step()
    drive.poison("bad")
    drive.run()
    end = drive.told["bad", 0].end
    assert end.finish is Finish.ERROR
    assert "not finite" in end.error
    drive.add(request("again", prompt, max_tokens=20))
    drive.run()
    assert drive.told["again", 0].end.finish is Finish.LENGTH


@pytest.mark.parametrize("chunk", [0, 4])
def test_a_poisoned_prefill_is_never_found_in_the_cache(chunk):
    drive = Drive(max_prefill_chunk=chunk)
    prompt = [1, 2, 3, 4] * 3
    drive.add(request("bad", prompt))
    drive.poison("bad")
    drive.run()
    assert drive.told["bad", 0].end.finish is Finish.ERROR
    drive.add(request("next", prompt))
    drive.run()
    assert drive.told["next", 0].outputs[0].n_cached == 0
    assert drive.told["next", 0].end.finish is Finish.LENGTH


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_sequence_whose_steps_raise_alone_and_again_ends_and_the_rest_goes_on(depth):
    drive = Drive(depth=depth)
    drive.add(request("hit", [1] * 5, max_tokens=20))
    for _ in range(3):
        drive.step()
    for _ in range(2):
        assert drive.told["hit", 0].end is None
        drive.runner.fail_next = RuntimeError("device fell over")
        while drive.runner.fail_next is not None:
            drive.step()
    assert drive.told["hit", 0].end.error == "device fell over"
    drive.add(request("after", [1] * 5, max_tokens=4))
    drive.run()
    assert drive.told["after", 0].end.finish is Finish.LENGTH


# -- pages, slots, preemption


def test_a_new_sequence_in_a_slot_is_not_touched_by_the_over_run_row():
    """The slot goes on at once; the ended sequence's last row was launched, and runs, before."""
    drive = Drive(limits(n_slots=1, max_rows=1, max_decode_rows=1, n_pages=6), depth=2)
    drive.add(request("ends", [1, 2], stop_token_ids=tuple(range(11)), max_tokens=18))
    drive.add(request("follows", [5, 6, 7], max_tokens=12, presence_penalty=1.0))
    over_run = 0
    while drive.step():
        seqs = [seq for row_seqs in drive.scheduler._in_flight.values() for seq in row_seqs]
        over_run += sum(seq.state is SeqState.FINISHED for seq in seqs)
    drive.run()
    assert over_run >= 2, "the test means nothing without over-run rows"
    assert drive.told["ends", 0].end.finish is Finish.STOP


def test_preemption_takes_the_newest_and_loses_nothing():
    drive = Drive(limits(n_pages=9), depth=1)
    for id in "abc":
        drive.add(request(id, [ord(id) % 11] * 6, max_tokens=22))
    first = []
    while drive.step():
        first += [s.request.id for s in drive.scheduler.resources.waiting if s.n_preempted]
    assert first[0] == "c"
    assert drive.scheduler.resources.n_preemptions > 0
    drive.run()


def test_the_victim_is_the_newest_that_is_not_protected():
    drive = Drive(limits(max_prefill_rows=4))
    for id in "abcd":
        drive.add(request(id, [1, 2]))
    drive.step()
    a, b, c, d = drive.scheduler.resources.running
    assert drive.scheduler.resources.running.after(a) == [b, c, d]
    assert policy.victim([b, c, d]) is d
    d.n_preempted = policy.MAX_PREEMPTIONS
    assert policy.victim([b, c, d]) is c
    assert policy.victim([]) is None


def test_all_start_over_when_the_device_lost_its_pages():
    drive = Drive(limits(n_pages=17), depth=0)
    for id in "abc":
        drive.add(request(id, [1, 2, 3, 4, ord(id) % 11], max_tokens=12, temperature=1.0))
    for _ in range(6):
        drive.step()
    drive.scheduler.resources.requeue_all()
    drive.runner.reset()
    drive.check()
    assert drive.scheduler.stats().pages_free == 16
    assert drive.scheduler.stats().preemptions == 0
    drive.run()


def test_a_protected_sequence_takes_all_its_pages_and_is_left_alone():
    drive = Drive(limits(n_pages=17))
    drive.add(request("often", [1] * 5, max_tokens=30))
    drive.step()
    resources = drive.scheduler.resources
    for _ in range(3):
        while not len(resources.running):
            drive.step()
        resources.preempt(next(iter(resources.running)))
    while not len(resources.running):
        drive.step()
    seq = next(iter(resources.running))
    assert policy.protected(seq)
    assert len(seq.lease.pages) == -(-34 // 4)
    assert policy.victim([seq]) is None
    drive.run()


def test_slot_loads_come_with_every_admission_of_those_who_need_them():
    drive = Drive(depth=0)
    drive.add(request("plain", [1] * 5))
    drive.add(request("counts", [3] * 5, frequency_penalty=1.0))
    drive.add(request("bias", [2] * 5, logit_bias={1: 2.0}))
    plan = drive.scheduler.plan(0.0)
    slots = {row.choice.request.id: row.slot for row in plan.rows}
    assert [load.slot for load in plan.loads] == [slots["counts"], slots["bias"]]
    drive.flight.append(drive.runner.launch(plan))
    drive.commit()
    resources = drive.scheduler.resources
    resources.preempt(next(s for s in resources.running if s.request.id == "counts"))
    again = drive.scheduler.plan(0.0)
    assert len(again.loads[0].tokens) == 6, "prompt and the token drawn before"
    assert again.loads[0].n_prompt == 5


def test_skip_prefix_cache_neither_reads_nor_leaves_anything():
    drive = Drive()
    drive.add(request("a", [1] * 9, skip=True))
    drive.run()
    assert drive.scheduler.resources.cache.tree.n_nodes == 0
    drive.add(request("b", [1] * 9))
    drive.run()
    drive.add(request("c", [1] * 9, skip=True))
    drive.run()
    assert drive.told["c", 0].outputs[0].n_cached == 0


def test_salts_do_not_share():
    drive = Drive()
    for id, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        drive.add(request(id, [1] * 9, salt=salt))
        drive.run()
    assert [drive.told[k, 0].outputs[0].n_cached for k in "abc"] == [0, 0, 8]


def test_prompt_logprobs_compute_every_position_and_survive_preemption():
    drive = Drive(max_prefill_chunk=4)
    prompt = [1, 2, 3, 4] * 3
    drive.add(request("warm", prompt))
    drive.run()
    drive.add(request("scored", prompt, prompt_logprobs=2))
    drive.step()
    drive.step()
    resources = drive.scheduler.resources
    resources.preempt(next(iter(resources.running)))
    drive.run()  # the drive compares every value
    told = drive.told["scored", 0]
    assert told.outputs[0].n_cached == 0
    assert len(told.outputs[0].prompt_logprobs) == 12


def test_values_of_a_prompt_are_of_every_token_and_survive_preemption():
    drive = Drive(max_prefill_chunk=4)
    prompt = [1, 2, 3, 4] * 3
    drive.add(request("warm", prompt))
    drive.run()
    drive.add(request("told", prompt, extra_args={"echo": "prompt"}))
    drive.add(request("plain", prompt, extra_args={"echo": 1}))
    drive.step()
    drive.step()
    resources = drive.scheduler.resources
    told = next(seq for seq in resources.running if seq.request.id == "told")
    assert len(drive.scheduler.prompt_values) == 1, "a chunk has come"
    resources.preempt(told)
    drive.run()
    (first, *rest) = drive.told["told", 0].outputs
    assert (first.n_cached, first.prompt_extra) == (0, {"echo": tuple(prompt)})
    assert all(out.prompt_extra is None for out in rest)
    assert drive.told["plain", 0].outputs[0].n_cached == 8
    assert not len(drive.scheduler.prompt_values)


# -- seeds and the queue


def test_a_derived_seed_is_a_stable_function_of_the_id():
    assert policy.seed_of("req-1", 0, None, 0) == policy.seed_of("req-1", 0, None, 0)
    assert policy.seed_of("req-1", 0, None, 0) == 209621080421261  # for ever
    assert policy.seed_of("req-1", 0, None, 2) == policy.seed_of("req-1", 0, None, 0) + 2
    assert policy.seed_of("req-2", 0, None, 0) != policy.seed_of("req-1", 0, None, 0)
    assert policy.seed_of("req-1", 1, None, 0) != policy.seed_of("req-1", 0, None, 0)


def test_seeds_wrap_inside_int64():
    assert policy.seed_of("x", 0, 2**63 - 1, 1) == -(2**63)
    assert policy.seed_of("x", 0, -5, 0) == -5


def test_the_first_output_tells_the_seed():
    told = ended(request("a", [1], temperature=1.0))
    seed = told.outputs[0].seed
    again = tokens_of([request("b", [1], temperature=1.0, seed=seed)])
    assert again["b", 0] == told.tokens


def test_a_full_queue_refuses_with_a_time_to_wait():
    drive = Drive(limits(n_slots=1), max_waiting=2)
    for i in range(2):
        drive.add(request(f"r{i}", [1]))
    with pytest.raises(Overloaded) as caught:
        drive.add(request("more", [1]))
    assert 1.0 <= caught.value.retry_after <= 60.0
    drive.run()


def test_stats_count():
    drive = Drive(depth=0)
    for i in range(2):
        drive.add(request(f"r{i}", [1] * 9, max_tokens=4))
        drive.run()
    stats = drive.scheduler.stats()
    assert (stats.cache_query_tokens, stats.cache_hit_tokens) == (18, 8)
    assert (stats.finished, stats.running, stats.waiting) == (2, 0, 0)
    assert stats.pages_cached + stats.pages_free == stats.pages_total == 32


def test_finished_requests_are_forgotten():
    """I17: nothing keeps a finished sequence alive."""
    drive = Drive()
    for i in range(20):
        drive.add(request(f"gone{i}", [i % 11] * 6, n=2, max_tokens=3))
    drive.run()
    gc.collect()
    alive = [o for o in gc.get_objects() if type(o) is Sequence]
    assert not [seq for seq in alive if seq.request.id.startswith("gone")]
