"""The tests themselves under test: each planted bug must be caught by an oracle or an invariant."""

import random

import pytest

from jserve.errors import Overloaded
from jserve.kv.cache import PageCache
from jserve.kv.pages import PagePool
from jserve.kv.radix import RadixTree
from jserve.sched import finalize, policy, resources, sampled
from jserve.sched.plan_builder import PlanBuilder
from jserve.sched.prefill import PrefillPlanner
from jserve.sched.resources import Resources
from jserve.sched.scheduler import Scheduler
from jserve.types import Request
from tests.sched.sched_drive import VOCAB, Drive, MixedDrafts, drafting, folded, limits, request

SEEDS = [*range(20), 165]
"""In 165 the queue fills: nine wait, and at the pace of the last ends the ninth would wait too long."""


def torture(seed: int, vocab: int = VOCAB) -> None:
    """A random workload with every feature, under all oracles."""
    rng = random.Random(seed)
    lim = limits(n_pages=rng.choice([13, 18, 30]), max_drafts=rng.choice([0, 3]), vocab_size=vocab)
    options = {
        "depth": rng.choice([0, 1, 2]),
        "eos_rate": 8,
        "max_prefill_chunk": rng.choice([0, 5]),
    }
    drive = drafting(MixedDrafts(), lim, **options) if lim.max_drafts else Drive(lim, **options)
    for i in range(16):
        taken = _add(drive, folded(_random_request(rng, f"r{i}", drive), vocab))
        for _ in range(rng.randrange(6)):
            drive.step()
            if rng.random() < 0.15:
                drive.preempt(rng.randrange(4))
        if rng.random() < 0.2:
            drive.cancel(f"r{rng.randrange(i + 1)}")
        if rng.random() < 0.1 and taken and drive.told[f"r{i}", 0].end is None:
            drive.poison(f"r{i}")
    drive.run()


def _add(drive: Drive, req: Request) -> bool:
    """False if the queue is full, which must be true and leave no trace."""
    resources = drive.scheduler.resources
    before = len(resources.waiting), len(resources.running), resources.waiting.n_tokens
    try:
        drive.add(req)
    except Overloaded:
        assert drive.scheduler.gate.level == 3, "refused, and the queue is not full"
        assert before == (
            len(resources.waiting),
            len(resources.running),
            resources.waiting.n_tokens,
        )
        drive.check()
        return False
    return True


def _random_request(rng: random.Random, id: str, drive: Drive):
    done = [k[0] for k, told in drive.told.items() if told.end and len(told.tokens) > 3]
    if done and rng.random() < 0.3:
        turn = drive.next_turn(id, rng.choice(done), [rng.randrange(VOCAB)], max_tokens=3)
        return turn if len(turn.prompt_ids) < 40 else request(id, [1, 2, 3])
    prompt = [*rng.choice([[1, 2, 3, 4] * 2, [1, 2, 3, 4], [5] * 8])[: rng.choice([4, 8])]]
    prompt += [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 5))]
    extras = rng.choice(
        [
            {},
            {},
            {"frequency_penalty": 1.0},
            {"prompt_logprobs": 1},
            {"extra_args": {"echo": "prompt"}},
            {"n": 2},
        ]
    )
    wanted = rng.choice([1, 4, 12, 25])
    return request(id, prompt, eos=(3,), max_tokens=wanted, temperature=1.0, **extras)


def torture_all() -> None:
    for seed in SEEDS:
        torture(seed)
    for seed in range(4):
        torture(seed, vocab=2)


def test_without_a_bug_all_is_well():
    torture_all()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_a_bug_all_is_well_nightly():
    for seed in range(100, 1600):
        torture(seed, vocab=VOCAB if seed % 2 else 2)


def tail_page_freed_one_step_early(patch):
    """The tail page goes back to the pool when the row before the last is planned."""
    freeze, release = PlanBuilder.freeze, PageCache.release
    early = {}

    def freeze_and_free(self, step, cache, **how):
        plan = freeze(self, step, cache, **how)
        for seq in self.seqs:
            lease, last_but_one = seq.lease, len(seq.tokens) + seq.in_flight == seq.max_len - 1
            if last_but_one and lease not in early and lease.n_published < len(lease.pages):
                early[lease] = lease.pages[-1]
                cache.pool.drop([lease.pages[-1]])
        return plan

    def release_the_rest(self, lease):
        if lease in early:
            lease.pages.remove(early[lease])
            self.table.rows[lease.slot, len(lease.pages)] = 0
        release(self, lease)

    patch.setattr(PlanBuilder, "freeze", freeze_and_free)
    patch.setattr(PageCache, "release", release_the_rest)


def published_before_commit(patch):
    enter = Resources.enter

    def eager(self, seq):
        entered = enter(self, seq)
        if entered:
            self.cache.publish(seq.lease, seq.tokens, len(seq.tokens))
        return entered

    patch.setattr(Resources, "enter", eager)


def published_one_token_too_far(patch):
    publish = PageCache.publish

    def further(self, lease, tokens, n):
        padded = [*tokens, 0, 0]
        publish(self, lease, padded, min(n + 1, lease.capacity))

    patch.setattr(PageCache, "publish", further)


def match_may_cover_the_whole_prompt(patch):
    match = PageCache.match

    def longer(self, key, tokens, **kw):
        return match(self, key, [*tokens, 0], **kw)

    patch.setattr(PageCache, "match", longer)


def match_ignores_the_prefix(patch):
    """Pages are looked up by their own tokens, wherever they hang."""

    def walk(self, root, tokens, max_pages):
        Z, path = self.page_size, []
        nodes = {node.key: node for _, node in self.nodes()}
        for at in range(0, max_pages * Z, Z):
            node = nodes.get(tuple(tokens[at : at + Z]))
            if node is None or node in path:
                break
            path.append(node)
        return path

    patch.setattr(RadixTree, "walk", walk)


def slot_reused_without_a_load(patch):
    patch.setattr(PlanBuilder, "load", lambda self, seq: None)


def reference_leaks(patch):
    patch.setattr(
        PagePool, "share", lambda self, pages: [self.refs.__setitem__(p, 3) for p in pages]
    )


def cancel_leaves_pages(patch):
    def leave(self, seq):
        if seq.lease is not None:
            self.running.remove(seq)
            self._slots.append(seq.slot)
        else:
            self.waiting.remove(seq)

    patch.setattr(Resources, "leave", leave)


def lock_is_not_taken(patch):
    patch.setattr(RadixTree, "lock_path", lambda self, node, gone=None: None)


def readmitted_with_rows_in_flight(patch):
    """The queue does not wait for the rows of the last residence."""

    def admit(self, draft, step, now):
        for seq in list(self.resources.waiting):
            if self._may_admit(draft) and self.resources.enter(seq):
                draft.load(seq)
                draft.prefill(seq, owed=resources.owes_prompt(seq))

    patch.setattr(PrefillPlanner, "_admit", admit)


def bad_pages_are_published(patch):
    """Pages are made known at the end of a chunk, before any logits proved them finite."""
    commit = Scheduler.commit

    def early(self, plan, result, now):
        for row, seq in zip(plan.rows, self._in_flight[plan.id], strict=True):
            if not row.from_slot and seq.lease is not None:
                self.resources.cache.publish(seq.lease, seq.tokens, row.start + row.count)
        return commit(self, plan, result, now)

    patch.setattr(Scheduler, "commit", early)


def rejected_drafts_count(patch):
    patch.setattr(finalize, "roll_back", lambda seq, n: None)


def preempted_too_often(patch):
    patch.setattr(policy, "protected", lambda seq: False)
    patch.setattr(policy, "headroom", lambda n: 0)


def stop_is_overlooked(patch):
    patch.setattr(sampled, "_cut_at_stop", lambda seq, drawn: drawn)


def a_decoder_starves(patch):
    decode = PlanBuilder.decode
    patch.setattr(PlanBuilder, "decode", lambda self, seqs: decode(self, seqs[:2]))


BUGS = [
    tail_page_freed_one_step_early,
    published_before_commit,
    published_one_token_too_far,
    match_may_cover_the_whole_prompt,
    match_ignores_the_prefix,
    slot_reused_without_a_load,
    reference_leaks,
    cancel_leaves_pages,
    lock_is_not_taken,
    readmitted_with_rows_in_flight,
    bad_pages_are_published,
    rejected_drafts_count,
    preempted_too_often,
    stop_is_overlooked,
    a_decoder_starves,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        torture_all()


SILENT = [
    tail_page_freed_one_step_early,
    match_ignores_the_prefix,
    slot_reused_without_a_load,
    readmitted_with_rows_in_flight,
]


@pytest.mark.parametrize("bug", SILENT, ids=lambda bug: bug.__name__)
def test_the_output_oracle_alone_catches_it(bug, monkeypatch):
    """Without any look inside: the tokens themselves, or the device, betray the bug."""
    bug(monkeypatch)
    for looks_inside in ("check", "check_idle"):
        monkeypatch.setattr(Drive, looks_inside, lambda self: None)
    with pytest.raises(AssertionError, match=r"diverged|never written|one position|scratch"):
        torture_all()
