"""Prompt lookup on the device finds what the index of the host finds, and the slots hold the text it reads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jserve.model import slots as slot_rows
from jserve.sampling import SamplingParams
from jserve.speculation.drafters.prompt_lookup import PromptLookup
from jserve.speculation.host.ngram import NgramIndex
from jserve.types import SlotLoad

S, N = 48, 7


def _jitted(least: int, most: int):
    how = PromptLookup(least=least, most=most)
    return jax.jit(lambda text_RS, newest_R: how.copy(text_RS, newest_R, N))


_RUN = {how: _jitted(*how) for how in ((1, 1), (2, 4), (3, 3))}


def ring(tokens: list[int], rng: np.random.Generator) -> np.ndarray:
    """The newest S of ``tokens`` where they belong, among tokens of whoever had the slot before."""
    text_S = rng.integers(0, 4, S).astype(np.int32)
    for p, token in list(enumerate(tokens))[-S:]:
        text_S[p % S] = token
    return text_S


def indexed(tokens: list[int], least: int, most: int) -> list[int]:
    index = NgramIndex(least, most, window=10 * S)
    for token in tokens[-S:]:
        index.append(token)
    return index.after(N) or [tokens[-1]] * N


texts = st.integers(1, 4).flatmap(
    lambda v: st.lists(st.integers(0, v - 1), min_size=1, max_size=3 * S)
)


@settings(max_examples=150, deadline=None)
@given(st.lists(texts, min_size=3, max_size=3), st.sampled_from(sorted(_RUN)), st.integers(0, 9))
def test_it_finds_what_the_index_of_the_host_finds(rows, how, seed) -> None:
    rng = np.random.default_rng(seed)
    text_RS = np.stack([ring(tokens, rng) for tokens in rows])
    newest_R = np.array([len(tokens) - 1 for tokens in rows], np.int32)
    found_RN = np.asarray(_RUN[how](text_RS, newest_R)).tolist()
    assert found_RN == [indexed(tokens, *how) for tokens in rows]


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 5, 9, 2, 3, 4], [5, 9, 2, 3, 4, 5, 9]),
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2, 1, 2, 1]),
        ([7, 8, 1, 7, 8, 2, 7, 8], [2, 7, 8, 2, 7, 8, 2]),
        ([1, 2, 3], [3] * N),
    ],
)
def test_a_copy_goes_on_with_its_own_period(tokens, drafts) -> None:
    text_RS = ring(tokens, np.random.default_rng(0))[None]
    newest_R = np.array([len(tokens) - 1], np.int32)
    assert np.asarray(_RUN[2, 4](text_RS, newest_R))[0].tolist() == drafts


# --- the text of the slots

_LOAD_TEXT, _ADVANCE = jax.jit(slot_rows.load_text), jax.jit(slot_rows.advance)


def written(slots: slot_rows.SlotState, slot: int, tokens: list[int]) -> slot_rows.SlotState:
    item = SlotLoad(slot=slot, tokens=tokens, n_prompt=1, params=SamplingParams())
    for buf in slot_rows.text_buffers(item, S):
        slots = _LOAD_TEXT(slots, jnp.asarray(buf))
    return slots


@pytest.mark.parametrize("n", [1, S - 1, S, S + 1, slot_rows.LOAD_TOKENS + 3])
def test_a_slot_holds_its_text_through_loads_and_steps(n) -> None:
    rng = np.random.default_rng(n)
    texts = [rng.integers(0, 99, n + c).tolist() for c in range(3)]
    slots = slot_rows.empty(3, 100, text=S)
    for c in (2, 0, 1):
        slots = written(slots, c, texts[c])
    for _ in range(40):
        token_RJ = rng.integers(0, 99, (3, 4)).astype(np.int32)
        slot_R, n_ok_R = np.array([1, 2, 3], np.int32), rng.integers(0, 5, 3).astype(np.int32)
        for r, c in ((0, 1), (1, 2)):  # row 2 is of no slot
            texts[c] += token_RJ[r, : n_ok_R[r]].tolist()
        len_R = np.array([len(texts[1]) - 1, len(texts[2]) - 1, 5], np.int32)
        slots = _ADVANCE(slots, slot_R, len_R, token_RJ, n_ok_R, jnp.zeros(3, bool))
    texts[0] = texts[0][: S // 2]
    slots = written(slots, 0, texts[0])  # another sequence
    got_RS = np.asarray(slot_rows.text_of(slots, jnp.arange(3)))
    for c, text in enumerate(texts):
        assert [got_RS[c, p % S] for p in range(len(text))][-S:] == text[-S:]
