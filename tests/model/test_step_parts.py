"""The small pieces of a step: acceptance of drafts, the embedding, and the slots as loads and steps leave them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model import slots as slot_rows
from jserve.model.dot import dot, narrow_dot, product_as
from jserve.model.layers import embed
from jserve.model.shard import Axes
from jserve.model.slots import LOAD_PAIRS, NONE
from jserve.model.vocab_rows import IN_PROMPT
from jserve.sampling import SamplingParams
from jserve.speculation.device.verify import accept
from jserve.types import SlotLoad

C, V, J, U = 5, 700, 4, 3
_ADVANCE = jax.jit(slot_rows.advance)
_LOAD = jax.jit(slot_rows.load)


def test_accept_counts_the_drafts_that_equal_what_was_drawn():
    rng = np.random.default_rng(0)
    token_RJ = rng.integers(0, 2, (400, J))
    drawn_RJ = rng.integers(0, 2, (400, J))
    count_R = rng.integers(1, J + 1, 400)
    got = np.asarray(accept(*(jnp.asarray(x, jnp.int32) for x in (token_RJ, drawn_RJ, count_R))))
    for r in range(400):
        n = 1
        while n < count_R[r] and token_RJ[r, n] == drawn_RJ[r, n - 1]:
            n += 1
        assert got[r] == n


@pytest.mark.parametrize("width", [1, 2, J])
def test_accept_stays_within_the_row_whatever_stands_behind_its_end(width):
    """What lies in the columns past ``count_R`` is padding, which may well equal what was drawn there."""
    count_R = np.arange(1, width + 1, dtype=np.int32)
    right_RJ = jnp.full((width, width), 7, jnp.int32)
    assert accept(right_RJ, right_RJ, jnp.asarray(count_R)).tolist() == count_R.tolist()
    assert accept(right_RJ, right_RJ + 1, jnp.asarray(count_R)).tolist() == [1] * width


def test_advance_moves_the_slots_of_emitting_rows_only():
    rng = np.random.default_rng(1)
    slots = jax.tree.map(
        lambda a: jnp.asarray(rng.integers(0, 50, a.shape).astype(a.dtype)),
        slot_rows.empty(C, V, n_vocab_rows=U),
    )
    row_C = jnp.asarray(
        [U, 2, 0, 1, 2], jnp.int32
    )  # slots 1 and 4 had the same row, one after the other
    slots = replace(slots, vocab=replace(slots.vocab, row_C=row_C))
    before = jax.tree.map(np.asarray, slots)
    slot_R = np.array([3, C, 0, 1, C])
    n_ok_R = np.array([3, 1, 0, 1, 0])
    len_R = np.array([30, 31, 32, 33, 34])
    token_RJ = rng.integers(0, V, (5, J))
    token_RJ[0] = [8, 9, 8, 7]
    args = (jnp.asarray(x, jnp.int32) for x in (slot_R, len_R, token_RJ, n_ok_R))
    penalised_R = jnp.asarray([True, True, True, False, False])
    after = jax.tree.map(np.asarray, _ADVANCE(slots, *args, penalised_R))
    assert after.len_C.tolist() == [before.len_C[0], 33, before.len_C[2], 30, before.len_C[4]]
    assert after.last_C[[3, 1]].tolist() == [8, token_RJ[3, 0]]
    np.testing.assert_array_equal(after.last_C[[0, 2, 4]], before.last_C[[0, 2, 4]])
    for slot, n, r in ((3, 3, 0), (1, 1, 3)):
        tail = [*before.recent_CB[slot], *token_RJ[r, :n]][n:]
        assert after.recent_CB[slot].tolist() == tail
    counts = before.vocab.counts_UV[1] + np.bincount(token_RJ[0, :3], minlength=V)
    np.testing.assert_array_equal(after.vocab.counts_UV[1], counts)
    np.testing.assert_array_equal(after.vocab.counts_UV[[0, 2]], before.vocab.counts_UV[[0, 2]])
    np.testing.assert_array_equal(after.recent_CB[[0, 2, 4]], before.recent_CB[[0, 2, 4]])


def test_advance_leaves_counts_alone_when_no_row_has_penalties():
    slots = slot_rows.empty(C, V, n_vocab_rows=U)
    slots = replace(slots, vocab=replace(slots.vocab, row_C=jnp.zeros(C, jnp.int32)))
    one = jnp.ones(1, jnp.int32)
    after = _ADVANCE(slots, one, one, one[:, None], one, jnp.asarray([False]))
    assert not np.any(np.asarray(after.vocab.counts_UV))
    counted = _ADVANCE(slots, one, one, one[:, None], one, jnp.asarray([True]))
    assert np.asarray(counted.vocab.counts_UV).nonzero() == ([0], [1])


def test_slots_without_vocab_rows_advance_and_load():
    one, word = jnp.ones(1, jnp.int32), SamplingParams(bad_token_ids=((1, 2),))
    after = _ADVANCE(slot_rows.empty(C, V), one, one, one[:, None], one, jnp.asarray([False]))
    assert after.vocab is None
    (buf,) = slot_rows.load_buffers(SlotLoad(slot=1, tokens=[3, 4], n_prompt=1, params=word), V)
    loaded = _LOAD(after, buf)
    assert loaded.bad_CWK[1, 0].tolist() == [NONE] * 6 + [1, 2]


def _load(item: SlotLoad):
    rng = np.random.default_rng(2)
    slots = jax.tree.map(
        lambda a: jnp.asarray(rng.integers(1, 9, a.shape).astype(a.dtype)),
        slot_rows.empty(C, V, n_vocab_rows=U),
    )
    buffers = slot_rows.load_buffers(item, V)
    for buf in buffers:
        slots = _LOAD(slots, buf)
    return jax.tree.map(np.asarray, slots), len(buffers)


def test_load_fills_counts_over_several_chunks():
    rng = np.random.default_rng(3)
    prompt, output = np.arange(600).tolist(), rng.integers(0, V, 900).tolist()
    params = SamplingParams(presence_penalty=1.0, max_tokens=None)
    tokens = [*prompt, *output]
    item = SlotLoad(slot=2, tokens=tokens, n_prompt=600, params=params, vocab_row=1)
    slots, n = _load(item)
    assert n == -(-len({*prompt, *output}) // LOAD_PAIRS) > 1
    assert slots.vocab.row_C[2] == 1
    got = slots.vocab.counts_UV[1]
    np.testing.assert_array_equal(got & (IN_PROMPT - 1), np.bincount(output, minlength=V))
    np.testing.assert_array_equal(got >= IN_PROMPT, np.arange(V) < 600)
    assert slots.recent_CB[2].tolist() == output[-7:]
    assert not slots.vocab.bias_UV[1].any()
    assert slots.vocab.counts_UV[2].all(), "another vocab row was touched"
    assert slots.bad_CWK[1].all(), "another slot was touched"


def test_load_fills_biases_and_bad_words():
    params = SamplingParams(
        allowed_token_ids=tuple(range(0, V, 7)),
        logit_bias={0: 2.5, 7: -100.0, 8: 50.0},
        bad_token_ids=((14,), (1, 2), (1, 2, 3, 4, 5, 6, 7, 8)),
    )
    item = SlotLoad(slot=4, tokens=[1, 2, 3], n_prompt=1, params=params, vocab_row=0)
    slots, _ = _load(item)
    want = np.full(V, -np.inf)
    want[0:V:7] = 0
    want[0] = 2.5
    want[[7, 14]] = -np.inf
    np.testing.assert_array_equal(slots.vocab.bias_UV[0], want)
    assert slots.recent_CB[4].tolist() == [NONE] * 5 + [2, 3]
    assert slots.bad_CWK[4, 0].tolist() == [NONE] * 6 + [1, 2]
    assert slots.bad_CWK[4, 1].tolist() == list(range(1, 9))
    assert (slots.bad_CWK[4, 2:] == NONE).all()


def test_a_loop_of_drafts_does_not_widen_the_embedding() -> None:
    """XLA:CPU picks rows of float32 only, and would make all of a bfloat16 table float32 before the loop."""
    table_VD = jnp.ones((4096, 64), jnp.bfloat16)

    def drafts(table_VD, tok_T):
        def one(i, tok_T):
            return jnp.int32(embed(table_VD, tok_T, Axes()).sum(axis=1)) % 4096

        return jax.lax.fori_loop(0, 3, one, tok_T)

    compiled = jax.jit(drafts).lower(table_VD, jnp.zeros(2, jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < table_VD.nbytes
    assert compiled(table_VD, jnp.zeros(2, jnp.int32)).tolist() == [64, 64]


def test_a_narrow_product_is_the_wide_one_rounded_once() -> None:
    """What GPUs compute, run here; a CPU computes the wide one, and float32 weights lose nothing anywhere."""
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((4, 64), (96, 64)))
    wide = np.asarray(dot(x, w))
    rounded = np.asarray(product_as(x, w, w.dtype), np.float32)
    assert (rounded != wide).mean() > 0.5
    np.testing.assert_allclose(rounded, wide, rtol=2**-8)
    np.testing.assert_array_equal(narrow_dot(x, w), wide)
    w = w.astype(jnp.float32)
    np.testing.assert_array_equal(product_as(x, w, w.dtype), dot(x, w))
