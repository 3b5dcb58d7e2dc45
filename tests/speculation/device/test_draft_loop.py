"""Drafters on the device, in float32: outputs are those without, drafts are those of the whole text
run anew, whatever shares the step, and the KV of both is updated in place."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
import pytest

from jserve.config import DEFAULT_DRAFTS, SpeculativeOptions
from jserve.errors import ConfigError
from jserve.model import draft_tree as tree
from jserve.model.arch import resized
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.mesh import make_mesh
from jserve.model.step import make_step
from jserve.model.view import Bucket
from jserve.ports import InFlight
from jserve.runner.batch import Packer
from jserve.runner.buckets import Ladder
from jserve.runner.moves import PageMover
from jserve.runner.runner import ModelRunner
from jserve.sampling import SamplingParams
from jserve.speculation.drafters.draft_model import draft_model
from jserve.speculation.drafters.drafter import split_over
from jserve.speculation.drafters.eagle3 import eagle3
from jserve.speculation.drafters.load import FINDERS, FoundDrafter, LoadedDrafter, load_speculation
from jserve.speculation.host.methods import shape
from jserve.types import PageFetch, PageMove, RowPlan, StepPlan
from tests.runner.harness import ARCH, Live, Rig, jobs, make_runner, shared, tiny_params
from tests.runner.test_equalities import alone, as_tuples, mixed_jobs
from tests.speculation.device import draft_oracle, drafters

TREE = (0, 0, 1, 1, 2)
MAKERS: dict[str, Callable[..., LoadedDrafter]] = {
    "same": drafters.same_model,
    "other": drafters.other_model,
    "eagle3": drafters.eagle,
    "medusa": drafters.heads,
    "flat": drafters.flat_model,
    "flat eagle3": drafters.flat_eagle,
}
NAMES: dict[tree.TreeShape, str] = {(): "chain", TREE: "tree"}
CASES = [
    pytest.param(kind, parents, id=f"{kind}-{NAMES[parents]}", marks=marks)
    for kind, parents, marks in (
        ("same", (), ()),
        ("eagle3", TREE, ()),
        ("medusa", TREE, ()),
        ("flat", TREE, ()),
        ("same", TREE, pytest.mark.slow),
        ("flat eagle3", TREE, pytest.mark.slow),
        ("other", (), pytest.mark.slow),
        ("other", TREE, pytest.mark.slow),
        ("eagle3", (), pytest.mark.slow),
        ("medusa", (), pytest.mark.slow),
    )
]


def n_of(parents: tree.TreeShape) -> int:
    return len(parents) or 3


def bucket(parents: tree.TreeShape) -> Bucket:
    n = n_of(parents)
    return Bucket(D=6, P=48, F=4, J=1 + n, n_draft=n, tree=parents)


@lru_cache
def drafting(kind: str, parents: tree.TreeShape, wished: int = 0, **options: Any) -> ModelRunner:
    """One program for all steps; a step may leave no drafts and use none."""
    made = partial(MAKERS[kind], n=n_of(parents), tree=parents, wished=wished)
    return make_runner((bucket(parents),), speculation=made, **options)


@pytest.mark.one_in(40)
@pytest.mark.parametrize(("kind", "parents"), CASES)
@pytest.mark.parametrize(("device", "depth"), [("all", 0), ("some", 1)])
def test_speculative_equals_not(kind, parents, device, depth):
    """Chunks of any length, decode rows and rows with any number of drafts in one step."""
    rig = Rig(drafting(kind, parents), device=device, depth=depth, chunk=-1, pick=0.8, seed=5)
    assert as_tuples(rig.run(mixed_jobs(1))) == alone(1)
    if kind in ("flat", "same") and device == "all":
        assert sum(rig.accepted) > 1.5 * len(rig.accepted)
    assert (len(set(rig.tried)) == 1) == (device == "all")


@pytest.mark.parametrize(
    "parents",
    [
        pytest.param((), id="chain"),
        pytest.param(TREE, id="tree", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_all_drafts_of_the_target_itself_are_accepted(parents, temperature):
    """Its logits and its noise are the target's where nothing but the temperature acts."""
    rig = Rig(drafting("same", parents), device="all", chunk=-1, pick=0.8, seed=5)
    rig.run(jobs(6, seed=2, temperature=temperature))
    if parents == TREE:
        assert set(rig.accepted) == {1 + max(tree.depths(TREE))}
    else:
        assert rig.accepted == rig.tried, "a right draft was rejected, or drafted wrong"


class Watched(Rig):
    """Notes what the device left in the slots, with the tokens it was left for."""

    def _apply(self, flight: InFlight, of_row: list[Live]) -> None:
        super()._apply(flight, of_row)
        slots = self.runner.state.slots
        for row, live in zip(flight.plan.rows, of_row, strict=True):
            if row.emits and flight.plan.n_draft and not live.done:
                held = np.asarray(slots.draft_CJ)[row.slot].tolist()
                self.left.append((list(live.seq.tokens), held))

    def run(self, jobs: Any) -> list[list[int]]:
        self.left: list[Any] = []
        """(tokens, drafts)"""
        return super().run(jobs)


def guess_of(kind: str, runner: ModelRunner) -> draft_oracle.Guess:
    assert runner.speculation is not None
    target, own = runner.params, runner.speculation.params
    if "eagle3" in kind:
        return draft_oracle.of_eagle(target, own)
    return draft_oracle.of_medusa(target, own) if kind == "medusa" else draft_oracle.of_model(own)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "parents"), CASES)
def test_drafts_are_those_of_the_whole_text_run_anew(kind, parents):
    """So the drafter's KV is right for prompts in chunks, for accepted and after rejected drafts."""
    runner = drafting(kind, parents)
    rig = Watched(runner, device="some", chunk=-1, seed=3)
    rig.run([replace(job, n=6) for job in jobs(3, seed=9, temperature=0.0)])
    guess = guess_of(kind, runner)
    assert len(rig.left) > 4
    for tokens, left in rig.left:
        assert left == draft_oracle.expected(guess, tokens, parents or tree.chain(3))


class Late(Watched):
    """The drafter sleeps for the first steps; then it is shown all of every sequence, two rows of it
    in one step."""

    asleep = 5
    lie = 0
    """Added to the tokens that are shown."""

    def _n_draft(self) -> int:
        return 0 if self.n_steps < self.asleep else self.runner.limits.device_drafts

    def _plan(self, lives: list[Live]) -> tuple[StepPlan, list[Live]]:
        first = self.n_steps == self.asleep
        plan, of_row = super()._plan(lives)
        if not first:
            return plan, of_row
        rows, tables = list(plan.rows), [plan.page_table_RM]
        for r, live in enumerate(lives):
            assert plan.rows[r].choice is live.seq.choice
            n = plan.rows[r].start
            for part in (range(n // 2), range(n // 2, n)):
                rows.append(shown_row(live, part, self.lie))
                tables.append(plan.page_table_RM[r : r + 1])
                of_row = [*of_row, live]
        self.before = kv_of(self.runner, lives)
        return replace(plan, rows=tuple(rows), page_table_RM=np.concatenate(tables)), of_row


def shown_row(live: Live, part: range, lie: int = 0) -> RowPlan:
    return RowPlan(
        choice=live.seq.choice,
        slot=live.seq.slot,
        start=part.start,
        count=len(part),
        from_slot=False,
        tokens=[(t + lie) % ARCH.V for t in live.seq.tokens[part.start : part.stop]],
        emits=False,
        next_token=live.seq.tokens[part.stop],
        backfill=True,
    )


def kv_of(runner: ModelRunner, lives: list[Live]) -> list[np.ndarray]:
    """The target's KV of every known token."""
    Z, found = runner.limits.page_size, []
    for live in lives:
        at = np.arange(live.seq.scheduled - 1)
        for layer in runner.state.kv[: ARCH.L]:
            found += [np.asarray(x)[live.pages[at // Z], :, at % Z] for x in layer]
    return found


ASLEEP = Bucket(D=6, P=48, F=4)
AWAKE = Bucket(D=6, P=96, F=6, J=4, n_draft=3)


@lru_cache
def waking(kind: str) -> ModelRunner:
    made = partial(MAKERS[kind], n=3)
    return make_runner((ASLEEP, AWAKE), speculation=made, max_num_batched_tokens=96)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["same", "eagle3", pytest.param("medusa", marks=pytest.mark.slow)])
def test_what_a_drafter_missed_can_be_shown_to_it(kind):
    """Its drafts are then those of one that never slept, and the target's KV keeps every bit."""
    runner = waking(kind)
    rig = Late(runner, device="all", seed=2)
    asked = [replace(job, prompt=job.prompt[:20], n=14) for job in jobs(3, seed=9, temperature=0.0)]
    assert rig.run(asked) == Rig(shared()).run(asked)
    after = kv_of(runner, rig.lives)
    for was, now in zip(rig.before, after, strict=True):
        np.testing.assert_array_equal(now[: len(was)], was)
    guess = guess_of(kind, runner)
    assert len(rig.left) > 4
    for tokens, drafts in rig.left:
        assert drafts == draft_oracle.expected(guess, tokens, tree.chain(3))
    if kind == "same":
        assert rig.accepted == rig.tried


@pytest.mark.slow
def test_showing_writes_nothing_of_the_target():
    """Whatever is shown: here other tokens than were computed, so drafts are bad and nothing else is."""
    runner = waking("same")
    rig = Late(runner, device="all", seed=2)
    rig.lie = 1
    asked = [replace(job, prompt=job.prompt[:20], n=14) for job in jobs(3, seed=9, temperature=0.0)]
    assert rig.run(asked) == Rig(shared()).run(asked)
    for was, now in zip(rig.before, kv_of(runner, rig.lives), strict=True):
        np.testing.assert_array_equal(now[: len(was)], was)
    assert rig.accepted != rig.tried


@pytest.mark.slow
def test_a_drafter_that_sleeps_is_not_in_the_program():
    """Neither its weights nor its KV are read; the step takes no more memory than one without it."""
    runner = drafting("eagle3", TREE)
    model, plain = runner.model, Bucket(D=6, P=48, F=4)
    assert "next_F" not in {f.name for f in model.fields(plain)}
    params, state = model.abstract_params(), model.abstract_state()
    buf = jax.ShapeDtypeStruct((sum(f.size for f in model.fields(plain)),), np.int32)
    step = jax.jit(make_step(model, plain), donate_argnums=(1,)).lower(params, state, buf)
    assert "draft/" not in step.as_text(debug_info=True)
    compiled = step.compile()
    alone = shared().programs.memory(plain).temp_size_in_bytes
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * alone
    assert compiled.memory_analysis().alias_size_in_bytes == sum(
        x.nbytes for x in jax.tree.leaves(runner.state)
    )


def test_a_program_without_a_drafter_is_shown_nothing():
    runner = drafting("same", ())
    packer = runner._packer
    live = Rig(runner)._admit(jobs(1))[0]
    plan = StepPlan(
        id=0,
        rows=(shown_row(live, range(4)),),
        page_table_RM=live.pages[None, :2].astype(np.int32),
        n_draft=0,
    )
    assert packer.pack(plan).bucket.n_draft, "the only program there is has one"
    model = runner.model
    small = Ladder(buckets=(Bucket(D=6, P=48, F=4),))
    plain = Packer(
        dims=model.dims,
        n_pages=runner.limits.n_pages,
        ladder=small,
        fields_of=model.fields,
        plan_attention=model.backend.plan,
    )
    with pytest.raises(ValueError, match="no drafter to show tokens to"):
        plain.pack(plan)


def test_a_row_at_the_end_of_its_context_gets_no_drafts():
    """Drafts that would lie beyond it write nothing: the others' pages stay as they are."""
    runner = drafting("same", ())
    long = replace(jobs(1, temperature=0.0)[0], prompt=list(range(120)), n=8)
    short = jobs(2, seed=4, temperature=0.0)[1]
    want = [Rig(shared()).run([job])[0] for job in (long, short)]
    assert Rig(runner, device="all", chunk=30).run([long, short]) == want


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parents", "tp", "wished"),
    [
        ("same", (), 2, 2),
        ("eagle3", TREE, 2, 1),
        ("same", (), 2, 1),
        ("medusa", (), 2, 2),
        ("eagle3", TREE, 2, 2),
        ("medusa", TREE, 2, 1),
        ("same", TREE, 4, 4),
        ("same", (), 4, 1),
        ("eagle3", (), 4, 4),
        ("eagle3", TREE, 4, 1),
        ("medusa", (), 4, 4),
        ("medusa", TREE, 4, 1),
    ],
)
def test_split_or_whole_a_drafter_drafts_the_same(kind, parents, tp, wished):
    """Its weights and its KV lie as was wished, before the steps and after them; no output changes."""
    runner = drafting(kind, parents, wished, tp=tp)
    assert runner.speculation is not None
    split = {
        path[-1].key
        for path, x in jax.tree.leaves_with_path(runner.speculation.params)
        if n_parts(x) > 1
    }
    assert split == (SPLIT[kind] if wished > 1 else set())
    rig = Watched(runner, device="some", chunk=-1, seed=5)
    assert as_tuples(rig.run(mixed_jobs(1))) == alone(1)
    if kind == "same" and not parents:  # of rows that filter or penalise, some are rejected
        assert sum(rig.accepted) > 0.7 * sum(rig.tried)
    left = Watched(runner, device="some", chunk=-1, seed=3)
    left.run([replace(job, n=6) for job in jobs(3, seed=9, temperature=0.0)])
    if tp <= drafters.HEAD.K:  # else the weights drawn are of more heads than the oracle has
        guess = guess_of(kind, runner)
        for tokens, held in left.left:
            assert held == draft_oracle.expected(guess, tokens, parents or tree.chain(3))
    target, own = runner.state.kv[: ARCH.L], runner.state.kv[ARCH.L :]
    assert {n_parts(x) for x in jax.tree.leaves(target)} == {tp}
    assert {n_parts(x) for x in jax.tree.leaves(own)} == (set() if kind == "medusa" else {wished})


MATRICES = {"qkv", "o", "gate_up", "down", "unembed"}
SPLIT = {"same": MATRICES | {"embed"}, "eagle3": MATRICES, "medusa": {"unembed"}}
"""Parameters of which each device holds a part."""


def n_parts(x: jax.Array) -> int:
    return x.size // x.addressable_shards[0].data.size


def test_a_drafter_that_cannot_be_split_is_held_whole_or_refused():
    odd = draft_model(LLAMA, resized(ARCH, N=6, K=3, D=48, H=8), ARCH)
    assert split_over(odd, 2).replicated
    assert split_over(draft_model(LLAMA, ARCH, ARCH), 2, 1).replicated
    assert not split_over(draft_model(LLAMA, ARCH, ARCH), 2).replicated
    with pytest.raises(ConfigError, match="num_key_value_heads 3 neither divides") as caught:
        split_over(odd, 2, 2)
    assert caught.value.field == "speculative.tensor_parallel_size"
    table = eagle3(
        replace(drafters.HEAD, V=100), replace(ARCH, V=102), taps=drafters.TAPS, own_embed=True
    )
    assert not split_over(table, 4).replicated  # its vocabulary is padded


@pytest.mark.slow
def test_a_drafter_that_cannot_be_split_on_two_devices():
    def odd(mesh: Any) -> LoadedDrafter:
        arch = resized(ARCH, N=3, K=3, D=24, H=8)
        drafter = split_over(draft_model(LLAMA, arch, ARCH), 2)
        params = drafters.drawn(LLAMA.specs(arch, 1), mesh, drafters.REPLICATED, seed=2)
        return LoadedDrafter(drafter=drafter, params=params, n_draft=2)

    wide = Bucket(D=6, P=48, F=4, J=3, n_draft=2)
    rig = Rig(make_runner((wide,), tp=2, speculation=odd), device="some", chunk=-1, seed=5)
    assert as_tuples(rig.run(mixed_jobs(1))) == alone(1)


# --- programs


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "parents"), CASES[:2])
def test_the_kv_of_both_is_updated_in_place(kind, parents):
    runner = drafting(kind, parents)
    shape = bucket(parents)
    memory, text = runner.programs.memory(shape), runner.programs.hlo(shape)
    state = jax.tree.leaves(runner.state)
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in state)
    assert memory.temp_size_in_bytes < 2 * runner.state.kv[0][0].nbytes
    for layer, _ in runner.state.kv:
        dims = ",".join(map(str, layer.shape))
        assert not re.findall(rf"= \w+\[{dims}\]\S* (?:copy|copy-start|convert|transpose)\(", text)


def test_without_a_drafter_nothing_of_one_is_in_the_step():
    """The program reads and writes what it did before there were drafters."""
    model = shared().model
    params, state = model.abstract_params(), model.abstract_state()
    assert set(params) == set(model.specs())
    assert state.slots.draft_CJ is None
    assert len(state.kv) == ARCH.L
    plain = Bucket(D=6, P=48, F=4)
    assert "next_F" not in {f.name for f in model.fields(plain)}
    buf = jax.ShapeDtypeStruct((sum(f.size for f in model.fields(plain)),), np.int32)
    text = jax.jit(make_step(model, plain)).lower(params, state, buf).as_text(debug_info=True)
    assert "advance" in text
    assert "draft/" not in text


def test_what_a_backend_cannot_serve_is_refused_before_anything_is_traced():
    def no_trees(layer, stored, trees):
        if trees:
            raise ConfigError(f"heads of {layer.H} in {stored.dtype}", field="speculative.tree")

    model = drafting("eagle3", TREE).model
    model = replace(model, backend=replace(model.backend, check=no_trees))
    make_step(model, Bucket(D=6, P=0, F=0))
    with pytest.raises(ConfigError, match="heads of 8 in float32") as caught:
        make_step(model, bucket(TREE))
    assert caught.value.field == "speculative.tree"


# --- what is refused


def test_a_draft_model_of_another_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="vocab_size is 64, the target's is 128") as caught:
        draft_model(LLAMA, replace(ARCH, V=64), ARCH)
    assert caught.value.field == "speculative.model"


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({"n": 0}, "speculative.num_tokens"),
        ({"n": 16}, "speculative.num_tokens"),
        ({"n": 2, "tree": (0, 0, 1)}, "speculative.tree"),
        ({"n": 2, "tree": (0, 3)}, "speculative.tree"),
    ],
)
def test_more_drafts_than_can_be_are_refused(how, field):
    with pytest.raises(ConfigError) as caught:
        drafters.same_model(make_mesh(1), **how)
    assert caught.value.field == field


def test_more_depth_than_medusa_has_heads_is_refused():
    with pytest.raises(ConfigError, match="at most 3 tokens ahead"):
        drafters.heads(make_mesh(1), n=4)
    drafters.heads(make_mesh(1), n=5, tree=TREE)


def test_by_default_there_are_as_many_drafts_as_the_drafter_makes(monkeypatch):
    mesh = make_mesh(1)
    for name, made, n in (
        ("medusa", drafters.heads(mesh), 3),
        ("draft", drafters.same_model(mesh), DEFAULT_DRAFTS),
    ):
        found = FoundDrafter(made.drafter, lambda *_, made=made: made.params)
        monkeypatch.setitem(FINDERS, name, lambda *_, found=found: found)
        given = (name, None, ARCH, mesh, drafters.RULES, np.float32)
        for wished, n_draft in ((0, n), (2, 2)):
            options = SpeculativeOptions(method=name, num_tokens=wished)
            done = load_speculation(*given, shape=partial(shape, options))  # type: ignore[arg-type]
            assert done.n_draft == n_draft


def test_drafts_that_the_slot_cannot_hold_are_refused():
    runner = drafting("same", ())
    rig = Rig(runner, drafter=lambda seq, most: (-1,) * 4, seed=0)
    with pytest.raises(ValueError, match="no bucket takes"):
        rig.run(jobs(1, temperature=0.0))
    rig = Rig(runner, drafter=lambda seq, most: (-1, 5), seed=0)
    with pytest.raises(ValueError, match="draft of the device"):
        rig.run(jobs(1, temperature=0.0))


def test_host_drafts_run_as_chains_only():
    right = alone(1)
    chain = Rig(
        drafting("same", ()), drafter=lambda s, m: right[int(s.request.id)][s.n_output :][:2]
    )
    assert as_tuples(chain.run(mixed_jobs(1))) == right
    rig = Rig(drafting("eagle3", TREE), drafter=lambda seq, most: (1, 2), seed=0)
    with pytest.raises(ValueError, match="no bucket takes"):
        rig.run(jobs(1, temperature=0.0))


def test_the_pool_counts_the_drafter():
    plain, with_head = shared().memory, drafting("eagle3", TREE).memory
    own = 2 * drafters.HEAD.K * drafters.HEAD.H * 8 * 4
    assert with_head.page_bytes == plain.page_bytes + own
    weights = sum(x.nbytes for x in jax.tree.leaves(tiny_params(make_mesh(1))))
    assert with_head.weight_bytes > weights == plain.weight_bytes


def test_params_of_the_target_are_swapped_alone():
    runner = drafting("same", ())
    params = SamplingParams(max_tokens=64, temperature=0.0)
    job = replace(jobs(1)[0], params=params)
    runner.update_weights(tiny_params(make_mesh(1), seed=1))
    other = Rig(runner, device="all").run([job])
    runner.update_weights(tiny_params(make_mesh(1), seed=0))
    assert other != Rig(runner, device="all").run([job]) == Rig(shared()).run([job])


@pytest.mark.slow
def test_a_head_that_shares_the_targets_embedding_sees_other_weights():
    runner = drafting("eagle3", TREE)
    first = jax.tree.map(np.asarray, runner.params)
    runner.update_weights(tiny_params(make_mesh(1), seed=1))
    rig = Watched(runner, device="some", chunk=-1, seed=3)
    rig.run([replace(job, n=6) for job in jobs(3, seed=9, temperature=0.0)])
    guess = guess_of("eagle3", runner)
    right = [left == draft_oracle.expected(guess, tokens, TREE) for tokens, left in rig.left]
    runner.update_weights(first)
    assert len(right) > 4
    assert all(right)


class Shelf:
    """A spill that keeps what is written and reads it back at once."""

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.asked: list[PageFetch] = []

    def write(self, digest: bytes, page: bytes, *, must: bool) -> None:
        self.pages[digest] = page

    def read(self, fetch: PageFetch) -> None:
        self.asked.append(fetch)

    def answers(self) -> list[tuple[PageFetch, bytes | None]]:
        asked, self.asked = self.asked, []
        return [(fetch, self.pages.get(fetch.digest)) for fetch in asked]


def test_pages_leave_and_return_with_the_drafters_part():
    """To host memory and back, and through the bytes of a file, into other pages."""
    runner = drafting("eagle3", TREE)
    model, rng = runner.model, np.random.default_rng(0)
    mover = PageMover(model, 4)
    mover.spill = shelf = Shelf()  # type: ignore[assignment]
    assert mover.page_nbytes == runner.memory.page_bytes
    kv = jax.tree.map(
        lambda a: jax.numpy.asarray(rng.standard_normal(a.shape), a.dtype), runner.state.kv
    )
    before = jax.tree.map(np.asarray, kv)
    out = [PageMove(page=p, host=h, out=True, digest=bytes([p])) for p, h in ((3, 1), (9, 0))]
    kv, leaving = mover.launch(kv, out)
    mover.land(leaving)
    assert {len(page) for page in shelf.pages.values()} == {mover.page_nbytes}
    mover.fetch([PageFetch(ticket=7, digest=bytes([9]), host=3)])
    assert mover.take_fetched() == [(7, True)]
    back = [PageMove(page=p, host=h, out=False) for p, h in ((5, 1), (6, 0), (7, 3))]
    kv, _ = mover.launch(kv, back)
    for was, now in zip(jax.tree.leaves(before), jax.tree.leaves(kv), strict=True):
        np.testing.assert_array_equal(np.asarray(now)[[5, 6, 7]], was[[3, 9, 9]])
        np.testing.assert_array_equal(np.asarray(now)[[3, 4, 8, 9]], was[[3, 4, 8, 9]])


@pytest.mark.slow
@pytest.mark.parametrize("wished", [1, 2])
def test_a_budget_of_host_memory_is_filled_by_pages_of_both(wished):
    """A page in host memory holds a drafter that every device has whole only once."""
    n_bytes = 1 << 20
    made = make_runner(
        (Bucket(D=6, P=48, F=4),),
        tp=2,
        speculation=lambda mesh: drafters.same_model(mesh, wished=wished),
        host_memory_gb=n_bytes / 2**30,
    )
    mover = made._mover
    assert mover is not None
    assert made.limits.n_host_pages == n_bytes // mover.page_nbytes
