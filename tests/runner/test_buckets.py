"""The ladder of step shapes: whatever fits the limits has a program, and drafts add few."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from jserve.config import EngineConfig
from jserve.model.feature import StepFeature
from jserve.model.features import MASK, SCORE
from jserve.model.view import Bucket
from jserve.runner.buckets import APART, MOST_VERIFIED, Ladder, Needs, beside_prefill
from jserve.runner.sizes import draft_rows
from jserve.speculation.policy.draft_count import widths


def ladder(n_drafts: int, rows: int = 32, **options) -> Ladder:
    return Ladder.of(
        max_decode_rows=rows,
        max_prefill_tokens=512,
        max_prefill_rows=8,
        max_drafts=n_drafts,
        **options,
    )


@pytest.mark.parametrize("rows", [1, 3, 8, 20, 32, 100])
@pytest.mark.parametrize("n_drafts", [1, 3, 7, 15])
def test_a_step_of_drafts_alone_has_a_program_of_its_width(n_drafts, rows):
    """Where that leaves arithmetic to spare, and at the narrowest width for any number of rows."""
    made = ladder(n_drafts, rows)
    for n in range(1, rows + 1):
        for width in range(2, n_drafts + 2):
            bucket = made.choose(Needs(D=n, P=0, F=0, J=width))
            rung = next(w for w in widths(n_drafts) if w >= width)
            if 4 * n * rung <= MOST_VERIFIED or rung == widths(n_drafts)[1]:
                assert (0, rung) == (bucket.P, bucket.J)
                assert max(8, 4 * n) >= bucket.D
            assert bucket.P or widths(n_drafts)[1] == bucket.J or bucket.T <= MOST_VERIFIED


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("n_drafts", [1, 3, 7, 15])
@pytest.mark.parametrize("draft_rows", [1, 8, 0])
def test_whatever_a_drafting_step_may_hold_has_a_program(n_drafts, rows, draft_rows):
    """Any rows and widths that the policy may ask for, with prompts, masks and scores; and no step
    that drafts nothing runs a drafter."""
    how = {"device_drafts": n_drafts, "draft_rows": draft_rows, "masks": True}
    made = ladder(n_drafts, rows, **how)
    most, narrow = min(rows, draft_rows or rows), beside_prefill(n_drafts)
    for d in range(most + 1):
        for j in range(1, n_drafts + 2):
            for masks in ((), (MASK,)):
                alone = Needs(D=d, P=0, F=0, J=j, n_draft=j - 1, features=masks)
                assert made.choose(alone).P == 0
                for p, f in ((1, 1), (64, 8), (70, 8), (512, 8)):
                    if j <= narrow:
                        for scores in ((), (SCORE,)):
                            made.choose(
                                Needs(D=d, P=p, F=f, J=j, n_draft=j - 1, features=(*masks, *scores))
                            )
    for d in range(rows + 1):
        for p in (0, 1, 64, 512):
            asleep = Needs(D=d, P=p, F=min(p, 8), features={1: (MASK,), 64: (SCORE,)}.get(p, ()))
            assert made.choose(asleep).n_draft == 0


def test_asleep_the_programs_are_those_of_an_engine_without_a_drafter():
    plain, drafting = ladder(0, masks=True), ladder(7, masks=True, device_drafts=7, draft_rows=8)
    assert set(plain.buckets) == {b for b in drafting.buckets if not b.n_draft}
    assert all(b.n_draft == b.J - 1 for b in drafting.buckets)


def test_a_tree_is_verified_whole():
    tree = (0, 0, 1, 1, 2)
    made = ladder(5, device_drafts=5, draft_rows=8, tree=tree, masks=True)
    drafting = [b for b in made.buckets if b.n_draft]
    assert {(b.J, b.n_draft, b.tree) for b in drafting} == {(6, 5, tree)}


def test_drafts_beside_prefill_and_masks_have_one_too():
    made = ladder(7, masks=True)
    for needs in (
        Needs(D=2, P=32, F=1, J=8),
        Needs(D=1, P=100, F=4, J=3),
        Needs(D=32, P=512, F=8, J=8),
        Needs(D=5, P=0, F=0, J=2, features=(MASK,)),
        Needs(D=32, P=512, F=8, J=8, features=(MASK, SCORE)),
    ):
        assert needs.fit(made.choose(needs))


def test_the_number_of_programs_is_what_the_docs_say():
    none, some = ladder(0, masks=True), ladder(7, masks=True)
    cpu, gpu = (ladder(7, masks=True, device_drafts=7, draft_rows=n) for n in (8, 32))
    counts = [len(made.buckets) for made in (none, some, cpu, gpu)]
    assert counts == [16, 16 + 12, 16 + 17, 16 + 19]
    assert len(ladder(0, masks=True, skips_padding=True).buckets) == 7
    assert set(none.buckets) - set(some.buckets) <= {b for b in none.buckets if b.P == 512}


@pytest.mark.parametrize("options", [{}, {"masks": True}, {"masks": True, "scores": False}])
@pytest.mark.parametrize(("rows", "drafts"), [(1, 0), (2, 0), (20, 0), (32, 0), (32, 7)])
def test_where_padding_is_skipped_fewer_programs_take_as_much(rows, drafts, options):
    usual, fewer = (ladder(drafts, rows, skips_padding=n, **options) for n in (False, True))
    few, all_take_masks = Bucket(D=min(2, rows), P=64, F=8), "masks" in options and not drafts
    known = {*usual.buckets} | {few}
    assert {*fewer.buckets} <= known | {b.with_also(MASK) for b in known if all_take_masks}
    if all_take_masks:
        assert all(MASK in b.features for b in fewer.buckets)
    assert len(fewer.buckets) <= len(usual.buckets)
    for size in usual.sizes:
        needs = Needs(D=size.D, P=size.P, F=size.F, J=size.J, features=size.features)
        assert needs.fit(fewer.choose(needs))
    plain = {b for b in usual.buckets if not b.features}
    assert plain <= {*fewer.sizes}, "steps are timed in as many sizes"
    assert usual.between == ()


def test_synthetic_runs_have_masks_at_every_width():
    made = ladder(7, masks=True, masks_drafts=True)
    for n, width in ((1, 4), (1, 8), (4, 4), (4, 8), (16, 8), (32, 4)):
        bucket = made.choose(Needs(D=n, P=0, F=0, J=width, features=(MASK,)))
        assert (n, width) == (bucket.D, bucket.J)


@pytest.mark.parametrize(
    ("platform", "seqs", "wished", "rows"),
    [
        ("cpu", 64, 0, 8),
        ("gpu", 64, 0, 32),
        ("gpu", 4, 0, 4),
        ("cpu", 64, 3, 3),
        ("cpu", 64, 20, 20),
    ],
)
def test_how_many_rows_may_draft(platform, seqs, wished, rows):
    speculative = {"method": "draft", "model": "x", "max_rows": wished}
    config = EngineConfig.of(max_num_seqs=seqs, speculative=speculative)
    assert draft_rows(config, platform) == rows


@pytest.mark.parametrize(
    "how",
    [
        {"n_drafts": 0},
        {"n_drafts": 7, "masks": True},
        {"n_drafts": 7, "masks": True, "masks_drafts": True},
        {"n_drafts": 3, "masks": True, "device_drafts": 3, "draft_rows": 8},
    ],
    ids=str,
)
def test_whatever_has_a_program_has_one_with_the_registered_features(how):
    """All of them in one, and steps that ask for none run where they ran before."""
    own = (StepFeature(name="hot"), StepFeature(name="entropy"))
    plain, made = ladder(**how), ladder(**how, registered=own)
    assert made.features == (own[1], own[0], MASK, SCORE)
    assert plain.features == (MASK, SCORE)
    assert [b for b in made.buckets if own[0] not in b.features] == list(plain.buckets)
    for bucket in plain.buckets:
        sizes = {name: getattr(bucket, name) for name in ("D", "P", "F", "J", "n_draft")}
        needs = Needs(**sizes, features=bucket.features)
        assert made.choose(needs) == plain.choose(needs)
        chosen = made.choose(replace(needs, features=tuple(sorted((*bucket.features, *own)))))
        assert {*own} <= {*chosen.features}
        assert bucket.P or not chosen.P
        assert (SCORE in chosen.features) == (SCORE in bucket.features)


@pytest.mark.parametrize("skips_padding", [False, True])
def test_a_row_that_asks_pays_for_few_others(skips_padding: bool) -> None:
    """However many rows decode or tokens are computed, its program has at most ``APART`` times the tokens of the one
    that would do without it, and there are at most as many programs more as those steps need."""
    own = (StepFeature(name="hot"),)
    limits = {"max_decode_rows": 64, "max_prefill_tokens": 2048, "max_prefill_rows": 64}
    plain, made = (
        Ladder.of(**limits, masks=True, registered=given, skips_padding=skips_padding)
        for given in ((), own)
    )
    for rows, tokens in itertools.product((0, 1, 2, 3, 9, 33, 64), (0, 20, 100, 300, 1500, 2048)):
        if rows + tokens:
            needs = Needs(D=rows, P=tokens, F=min(tokens, 1))
            bare, asked = (plain.choose(needs), made.choose(replace(needs, features=own)))
            assert asked.T <= APART * bare.T, (rows, tokens)
    assert made.choose(Needs(D=1, P=0, F=0, features=own)).T == 2
    assert len(made.buckets) - len(plain.buckets) <= 9
