"""What constraints leave to be drawn, against their definition token by token."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings, strategies as st

from jserve.sampling import SamplingParams
from jserve.sched.admission.constraints import excluded
from jserve.types import Request, Sequence

V = 40  # more than one word of a mask
ids = st.integers(0, V - 1)
few = st.lists(st.sampled_from([0, 1, 2, 31, 32, 33, 39]), max_size=5)


def may(token: int, output: list[int], request: Request, mask: set[int] | None) -> bool:
    params = request.params
    said = [*output, token]
    return (
        (params.allowed_token_ids is None or token in params.allowed_token_ids)
        and params.logit_bias.get(token, 0.0) > -100.0
        and not any(tuple(said[-len(w) :]) == w for w in params.bad_token_ids if len(said) >= len(w))
        and (len(output) >= params.min_tokens or token not in (*request.eos_ids, *params.stop_token_ids))
        and (mask is None or token in mask)
    )  # fmt: skip


def bits(mask: set[int]) -> np.ndarray:
    words = np.zeros(2, np.uint32)
    for token in mask:
        words[token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return words.view(np.int32)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    prompt=few.filter(bool),
    output=few,
    drawn=few,
    allowed=st.none() | few.filter(bool),
    banned=few,
    words=st.lists(few.filter(bool), max_size=4),
    stops=few,
    min_tokens=st.integers(0, 4),
    masks=st.none() | st.lists(st.sets(ids, max_size=3), min_size=6, max_size=6),
)
def test_it_is_the_definition(
    prompt, output, drawn, allowed, banned, words, stops, min_tokens, masks
):
    params = SamplingParams(
        max_tokens=20,
        min_tokens=min_tokens,
        allowed_token_ids=None if allowed is None else tuple(allowed),
        logit_bias={token: -100.0 if token % 2 else -99.0 for token in banned},
        bad_token_ids=tuple(tuple(w) for w in words),
        stop_token_ids=tuple(stops),
    )
    request = Request(id="a", prompt_ids=tuple(prompt), params=params, eos_ids=(39,))
    tokens = [*prompt, *output]
    n_prompt = len(prompt)
    seq = Sequence(request=request, index=0, max_len=99, seed=0, tokens=tokens, n_prompt=n_prompt)
    if masks is not None:
        rows = np.stack([bits(mask) for mask in masks[: len(drawn) + 1]])
        seq.guide = SimpleNamespace(mask=lambda drafts: rows)
    wanted = any(
        not any(
            may(token, [*output, *drawn[:j]], request, None if masks is None else masks[j])
            for token in range(V)
        )
        for j in range(len(drawn) + 1)
    )
    assert (excluded(seq, drawn, V) is not None) == wanted
