"""Packing: what a plan says is what the device reads, and nothing out of range gets through."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jserve.model import slots as slot_rows, view as v
from jserve.model.draws import draws_of
from jserve.model.features import FEATURES, MASK, SCORE
from jserve.model.view import Bucket, StepDims, buffer_size, layout, unpack
from jserve.runner.batch import Packer, uses
from jserve.runner.buckets import Ladder, Needs
from jserve.sampling import SamplingParams
from jserve.types import Request, RowPlan, Sequence, StepPlan

DIMS = StepDims(C=6, M=8, Z=4, V=1000)
LADDER = Ladder.of(
    max_decode_rows=6, max_prefill_tokens=64, max_prefill_rows=4, max_drafts=2, masks=True
)


def fields_of(bucket: Bucket):
    return layout(bucket, DIMS, {"seen_start_R": (bucket.R,)})


def plan_attention(views, bucket, dims):
    views["attn.seen_start_R"][...] = views["start_R"]


def packer() -> Packer:
    return Packer(
        dims=DIMS, n_pages=50, ladder=LADDER, fields_of=fields_of, plan_attention=plan_attention
    )


def seq(slot: int, n_prompt: int = 9, **params) -> Sequence:
    sampling = SamplingParams(max_tokens=None, **params)
    prompt = tuple(range(100 * slot, 100 * slot + n_prompt))
    request = Request(id=str(slot), prompt_ids=prompt, params=sampling, eos_ids=(2, 3))
    return Sequence(
        request=request,
        index=0,
        seed=-(2**40) - slot,
        tokens=list(prompt),
        n_prompt=n_prompt,
        max_len=32,
        slot=slot,
    )


def prefill(s: Sequence, start: int, count: int, **kw) -> RowPlan:
    tokens = s.tokens[start : start + count]
    return RowPlan(
        choice=s.choice, slot=s.slot, start=start, count=count, from_slot=False, tokens=tokens, **kw
    )


def decode(s: Sequence, start: int, drafts=(), **kw) -> RowPlan:
    return RowPlan(
        choice=s.choice,
        slot=s.slot,
        start=start,
        count=1 + len(drafts),
        from_slot=True,
        drafts=drafts,
        **kw,
    )


def plan(*rows: RowPlan, width: int = 6) -> StepPlan:
    table = 1 + np.arange(len(rows) * width, dtype=np.int32).reshape(len(rows), width)
    return StepPlan(id=0, rows=rows, page_table_RM=table)


def view_of(batch, slots=None):
    slots = slot_rows.empty(DIMS.C, 4) if slots is None else slots
    return unpack(jnp.asarray(batch.buf), fields_of(batch.bucket), batch.bucket, DIMS, slots)


def test_what_the_device_reads_is_what_the_plan_says():
    a, b, c, d = seq(0, temperature=0.5, top_k=9), seq(3, min_tokens=4), seq(5), seq(2)
    p = plan(decode(a, 12, (7, 8)), decode(b, 10), prefill(c, 2, 5, emits=False), prefill(d, 0, 9))
    pk = packer()
    pk.pack(plan(*(prefill(seq(i), 0, 9) for i in range(4))))  # leaves its marks in the buffer
    batch = pk.pack(p)
    slots = replace(
        slot_rows.empty(DIMS.C, 4),
        len_C=jnp.asarray([11, 0, 0, 10, 0, 0]),
        last_C=jnp.asarray([41, 0, 0, 44, 0, 0]),
    )
    view, bucket = view_of(batch, slots), batch.bucket
    J, D = bucket.J, bucket.D
    assert J == 3
    where = {0: 0, 1: J, 2: D * J, 3: D * J + 5}
    want = {0: ([41, 7, 8], 11), 1: ([44], 10), 2: (c.tokens[2:7], 2), 3: (d.tokens, 0)}
    tok, pos, row = (np.asarray(x) for x in (view.tok_T, view.pos_T, view.row_T))
    page, off = np.asarray(view.write_page_T), np.asarray(view.write_off_T)
    used = np.zeros(bucket.T, bool)
    for i, at in where.items():
        tokens, start = want[i]
        r = i if i < 2 else D + i - 2
        part = slice(at, at + len(tokens))
        used[part] = True
        assert tok[part].tolist() == list(tokens)
        assert row[part].tolist() == [r] * len(tokens)
        assert pos[part].tolist() == list(range(start, start + len(tokens)))
        assert page[part].tolist() == [int(p.page_table_RM[i, x // 4]) for x in pos[part]]
        assert off[part].tolist() == [x % 4 for x in pos[part]]
        assert int(view.kv_len_R[r]) == start + len(tokens)
        assert int(view.first_R[r]) == at
        assert int(view.slot_R[r]) == p.rows[i].slot
        assert bool(view.emit_R[r]) == p.rows[i].emits
    assert (row[~used] == bucket.R).all()
    assert (pos[~used] == -1).all()
    assert not page[~used].any()
    idle = np.setdiff1d(np.arange(bucket.R), [0, 1, D, D + 1])
    assert (np.asarray(view.slot_R)[idle] == DIMS.C).all()
    assert not np.asarray(view.kv_len_R)[idle].any()
    seen = np.asarray(view.attn["seen_start_R"])
    assert seen[[0, 1, D, D + 1]].tolist() == [12, 10, 2, 0], "upper bounds for the backend's plan"
    assert (int(view.n_decode), int(view.n_prefill)) == (2, 2)


def test_sampling_fields_reach_their_rows():
    s = seq(
        4,
        temperature=0.7,
        top_p=0.8,
        min_p=0.1,
        top_k=5,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        min_tokens=3,
        stop_token_ids=(9,),
    )
    view = view_of(packer().pack(plan(decode(seq(1), 9), decode(s, 9))))
    got = [
        float(getattr(view, f"{n}_R")[1])
        for n in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
    ]
    np.testing.assert_allclose(got, [0.7, 0.8, 0.1, 1.2, 0.3, 0.4], rtol=1e-6)
    assert (int(view.top_k_R[1]), int(view.min_pos_R[1])) == (5, 12)
    assert np.asarray(view.stop_RS[1])[:4].tolist() == [2, 3, 9, -1]
    assert np.asarray(view.seed_R2[1]).view(np.int64)[0] == s.seed
    assert int(view.flags) == v.RANDOM | v.TRUNCATE | v.PENALTY | v.MIN_TOKENS
    assert int(view.uses_R[0]) == v.RANDOM


def test_rows_say_whether_their_text_is_long_and_programs_skip_no_less_for_it():
    s = seq(1)
    s.choice = replace(s.choice, request=replace(s.request, is_long=True))
    batch = packer().pack(plan(decode(s, 9), decode(seq(4), 9)))
    view = view_of(batch)
    assert np.asarray(view.uses_R[:2] & v.LONG).tolist() == [v.LONG, 0]
    assert np.asarray(view.long_T)[:2].tolist() == [True, False]
    assert int(view.flags) & v.LONG == batch.flags & v.LONG == 0


def test_a_slot_that_changes_hands_takes_the_new_sampling_fields():
    pk = packer()
    pk.pack(plan(decode(seq(1, temperature=0.3), 9)))
    view = view_of(pk.pack(plan(decode(seq(1, temperature=0.9), 9))))
    assert float(view.temperature_R[0]) == pytest.approx(0.9)


def test_a_narrower_page_table_leaves_nothing_of_a_wider_one():
    pk = packer()
    pk.pack(plan(decode(seq(1), 9), decode(seq(2), 9), width=8))
    view = view_of(pk.pack(plan(decode(seq(1), 9), width=3)))
    assert not np.asarray(view.page_table_RM)[:, 3:].any()


def test_score_targets_stand_beside_their_rows_tokens():
    s = seq(1, prompt_logprobs=1)
    s.tokens.extend([901, 902])
    batch = packer().pack(plan(prefill(s, 4, 6, targets=s.tokens[5:9])))
    assert SCORE in batch.bucket.features
    at = batch.bucket.D * batch.bucket.J
    target = np.asarray(view_of(batch).extra["target_T"])[at : at + 6]
    assert target.tolist() == [*s.tokens[5:9], -1, -1]


def test_masks_reach_their_rows_and_others_are_free():
    words = np.arange(2 * 32, dtype=np.int32).reshape(2, 32)
    batch = packer().pack(plan(decode(seq(0), 9, (5,), mask=words), decode(seq(1), 9)))
    assert MASK in batch.bucket.features
    mask = np.asarray(view_of(batch).extra["mask_RJW"])
    np.testing.assert_array_equal(mask[0, :2], words)
    assert (mask[1] == -1).all()


def test_masks_of_prefill_rows_reach_theirs():
    """Prefill rows begin after all decode rows of the bucket, however few of them are in use."""
    first, last = (np.full((1, 32), word, np.int32) for word in (5, 9))
    rows = (
        decode(seq(0), 9),
        prefill(seq(1), 0, 9, emits=True, mask=first),
        prefill(seq(2), 0, 9, emits=True),
        prefill(seq(3), 0, 9, emits=True, mask=last),
    )
    batch = packer().pack(plan(*rows))
    D = batch.bucket.D
    assert D > 1
    mask = np.asarray(view_of(batch).extra["mask_RJW"])
    np.testing.assert_array_equal(mask[D, 0], first[0])
    np.testing.assert_array_equal(mask[D + 2, 0], last[0])
    others = [r for r in range(len(mask)) if r not in (D, D + 2)]
    assert (mask[others] == -1).all()


def test_redraws_reach_their_rows_and_others_have_none():
    words = np.zeros((1, 32), np.int32)
    first = msgspec.structs.replace(prefill(seq(2), 0, 5), mask=words, redraw=(7,))
    verify = decode(seq(0), 9, (5,), mask=np.zeros((2, 32), np.int32))
    verify = msgspec.structs.replace(verify, redraw=(-1, 3))
    batch = packer().pack(plan(verify, decode(seq(1), 9), first))
    view, D = view_of(batch), batch.bucket.D
    redraw = np.asarray(view.extra["redraw_RJ"])
    assert redraw[0, :2].tolist() == [-1, 3]
    assert redraw[D, 0] == 7
    assert (redraw[1] == -1).all()
    drawn = np.asarray(draws_of(view).redraw_E)
    J = batch.bucket.J
    assert drawn[:2].tolist() == [-1, 3]
    assert drawn[D * J] == 7
    assert (np.delete(drawn, [1, D * J]) == -1).all()
    free = packer().pack(plan(decode(seq(1), 9)))
    assert "redraw_RJ" not in view_of(free).extra


def _bad_plans():
    s = seq(1)
    ok = prefill(s, 0, 9)
    change = msgspec.structs.replace
    yield "slot", plan(change(ok, slot=6))
    yield "slot", plan(change(ok, slot=-1))
    yield "start", plan(change(ok, start=-3))
    yield "count", plan(change(ok, start=30))
    yield "count", plan(prefill(s, 0, 9), width=2)
    yield "tokens", plan(change(ok, tokens=[1, 2]))
    yield "token id", plan(change(ok, tokens=[1] * 8 + [1000]))
    yield "token id", plan(change(ok, tokens=[1] * 8 + [-1]))
    yield "draft", plan(decode(s, 9, (4, 1000)))
    yield "drafts", plan(change(decode(s, 9), count=2))
    yield "page", dataclasses.replace(plan(ok), page_table_RM=np.full((1, 6), 50, np.int32))
    yield "page", dataclasses.replace(plan(ok), page_table_RM=np.full((1, 6), -1, np.int32))
    yield "page table", dataclasses.replace(plan(ok), page_table_RM=np.ones((2, 6), np.int32))
    yield "page table", plan(ok, width=9)
    yield "no bucket", plan(*[decode(seq(i % 6), 9) for i in range(7)])
    yield "no bucket", plan(decode(s, 9, (1, 2, 3)))
    many = seq(1, stop_token_ids=tuple(range(16))).choice
    many = dataclasses.replace(
        many, request=dataclasses.replace(many.request, eos_ids=tuple(range(20)))
    )
    yield "stop ids", plan(change(decode(s, 9), choice=many))
    yield "target", plan(prefill(s, 0, 4, targets=(1, 2, 3, 1000)))


@pytest.mark.parametrize(("what", "bad"), list(_bad_plans()))
def test_a_plan_out_of_range_is_refused(what, bad):
    with pytest.raises(ValueError, match=what):
        packer().pack(bad)


@pytest.mark.parametrize(
    ("params", "bits"),
    [
        ({"temperature": 0.0}, 0),
        ({"temperature": 1e-6, "top_p": 0.5}, 0),
        ({"temperature": 1.0}, v.RANDOM),
        ({"top_p": 0.9}, v.RANDOM | v.TRUNCATE),
        ({"temperature": 0.0, "logprobs": 0}, v.LOGPROBS),
        ({"temperature": 0.0, "bad_token_ids": ((4,),)}, v.BIAS),
        ({"temperature": 0.0, "bad_token_ids": ((4, 5),)}, v.BAD_WORDS),
        ({"temperature": 0.0, "allowed_token_ids": (4,)}, v.BIAS),
        ({"temperature": 0.0, "repetition_penalty": 0.9}, v.PENALTY),
    ],
)
def test_flags_say_what_the_parameters_need(params, bits):
    assert uses(SamplingParams(**params)) == bits


def test_every_plan_inside_the_limits_has_a_bucket():
    rng = np.random.default_rng(0)
    for _ in range(500):
        needs = Needs(
            D=int(rng.integers(0, 7)),
            P=int(rng.integers(0, 65)),
            F=int(rng.integers(0, 5)),
            J=int(rng.integers(1, 4)),
            features=tuple(feature for feature in FEATURES if rng.integers(2)),
        )
        bucket = LADDER.choose(needs)
        assert needs.fit(bucket)
        cheaper = [b for b in LADDER.buckets if needs.fit(b) and b.T < bucket.T]
        assert all(asked(b) > asked(bucket) for b in cheaper)


def asked(bucket: v.Bucket) -> tuple[bool, bool]:
    return SCORE in bucket.features, MASK in bucket.features


@pytest.mark.parametrize("limits", [(1, 1, 1), (32, 512, 8), (256, 8192, 8), (5, 40, 3)])
def test_the_ladder_is_short_and_has_no_bucket_of_one_row(limits):
    rows, tokens, prefill_rows = limits
    ladder = Ladder.of(
        max_decode_rows=rows, max_prefill_tokens=tokens, max_prefill_rows=prefill_rows
    )
    assert all(b.T >= 2 and b.D * b.J + b.F >= 2 for b in ladder.buckets)
    assert len(ladder.buckets) <= 32
    assert len(set(ladder.buckets)) == len(ladder.buckets)
    if limits == (32, 512, 8):
        assert len(ladder.buckets) == 12


def test_buffer_sizes_follow_the_fields():
    batch = packer().pack(plan(decode(seq(0), 9)))
    assert batch.buf.shape == (buffer_size(fields_of(batch.bucket)),)
