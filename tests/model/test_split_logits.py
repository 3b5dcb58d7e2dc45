"""Sampling over a vocabulary that lies in parts on eight devices, against sampling over whole rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jserve.model import sample as sampling, vocab_part
from jserve.model.mesh import make_mesh
from jserve.model.slots import NONE
from jserve.model.view import LOGPROBS
from jserve.model.vocab_part import VocabPart
from jserve.sampling import SamplingParams
from tests.model import test_sample
from tests.model.sample_reference import Context
from tests.model.sample_rig import draws_of, jitted, slots_of

V, N = 1003, 8
FIELDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"temperature": 2.0, "top_k": 20},
    {"temperature": 2.0, "top_k": 300},
    {"temperature": 1.5, "top_p": 0.6},
    {"temperature": 2.0, "top_p": 0.97},
    {"temperature": 2.0, "min_p": 0.02},
    {"top_k": 90, "top_p": 0.95, "min_p": 0.001, "temperature": 2.0},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 3.0, "frequency_penalty": 2.0},
    {"logit_bias": {4: 9.0, 1002: 8.0}, "temperature": 0.7},
    {"allowed_token_ids": (1, 130, 500, 999)},
    {"temperature": 0.0, "bad_token_ids": ((9, 501), (700,))},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": (700, 1001)},
)


def split(name: str, n: int = N, width: int = V) -> Any:
    """A sampling function of whole rows, which computes on ``n`` parts of them."""
    part, whole = VocabPart("tp", width), PartitionSpec()

    def run(raw_EV: Any, *rest: Any) -> Any:
        # What lies in the columns beyond the last id is no logit: large numbers, so that it shows.
        raw_EV = jnp.pad(raw_EV, ((0, 0), (0, -width % n)), constant_values=1e4)
        # An array of no columns as an argument of several devices ends the compiler of jax 0.11.2.
        none = jnp.full((raw_EV.shape[0], 1), NONE, jnp.int32)
        rest = jax.tree.map(lambda x: x if x.size else none, rest)
        return jax.shard_map(
            lambda x, *a: getattr(sampling, name)(x, *a, part=part),
            mesh=make_mesh(n),
            in_specs=(PartitionSpec(None, "tp"), *(whole for _ in rest)),
            out_specs=whole,
            check_vma=False,
        )(raw_EV, *rest)

    return jax.jit(run)


def batch(mask: bool = False) -> tuple[Any, Any, Any, int]:
    rng, rows = np.random.default_rng(3), []
    for i in range(4 * len(FIELDS)):
        context = Context(
            prompt=rng.integers(0, V, 6).tolist(),
            output=[*rng.integers(0, V, 4).tolist(), 9],
            mask=rng.random(V) < 0.3 if mask and i % 2 else None,
        )
        rows.append((SamplingParams(**FIELDS[i % len(FIELDS)]), context))
    raw_EV = rng.standard_normal((len(rows), V)).astype(np.float32) * 2
    raw_EV[:, 700] += 6
    raw_EV[::5] = np.round(raw_EV[::5])  # equal logits on several devices
    draws, flags = draws_of(rows, J=3)
    prefix_EJ = jnp.asarray(rng.integers(0, V, draws.prefix_EJ.shape), jnp.int32)
    n_prefix_E = jnp.full(len(rows), 2, jnp.int32)
    draws = replace(draws, prefix_EJ=prefix_EJ, n_prefix_E=n_prefix_E)
    return raw_EV, draws, slots_of(rows, V), flags


def check_all() -> None:
    check_tokens()
    check_logprobs()


def check_tokens() -> None:
    for mask in (False, True):
        args = batch(mask)
        want_E, ok_E = jitted()["sample"](*args)
        got_E, got_ok_E = split("sample")(*args)
        np.testing.assert_array_equal(got_E, want_E)
        np.testing.assert_array_equal(got_ok_E, ok_E)


def check_logprobs() -> None:
    raw_EV = batch()[0]
    token_E = jnp.arange(len(raw_EV), dtype=jnp.int32) * 17
    pick_EK = jnp.asarray(np.random.default_rng(0).integers(0, V, (len(raw_EV), 5)), jnp.int32)
    args = raw_EV, token_E, jnp.int32(LOGPROBS), pick_EK
    want, got = jitted()["logprobs"](*args), split("logprobs")(*args)
    np.testing.assert_array_equal(got.top_ids_EL, want.top_ids_EL)
    np.testing.assert_array_equal(got.rank_E, want.rank_E)
    for name in ("logprob_E", "top_logprobs_EL", "picked_EK"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=2e-6)


@pytest.mark.slow
def test_every_field_draws_the_token_of_whole_rows() -> None:
    check_tokens()


def test_log_probabilities_ranks_and_best_ids_are_those_of_whole_rows() -> None:
    check_logprobs()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_broken_logit_of_one_part_is_told_by_all(bad: float) -> None:
    raw_EV, draws, slots, flags = batch()
    raw_EV[2, 990] = bad
    token_E, ok_E = split("sample")(raw_EV, draws, slots, flags)
    assert np.flatnonzero(~np.asarray(ok_E)).tolist() == [2]
    assert 0 <= int(token_E[2]) < V


def test_no_collective_has_a_row_of_the_vocabulary() -> None:
    args = batch(mask=True)
    text = split("sample").lower(*args).compile().as_text()
    E, sizes = len(args[0]), []
    for line in text.splitlines():
        head = line.split("=", 1)[-1].split("(", 1)[0]
        if " all-" in head or " collective" in head:
            dims = head[head.index("[") + 1 : head.index("]")]
            sizes.append(int(np.prod([int(n) for n in dims.split(",") if n])))
    assert sizes
    assert max(sizes) <= E * N * sampling.PREFILTER < E * V


@pytest.mark.slow
@pytest.mark.parametrize(
    "kw", [{}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}, test_sample.SETTINGS[-1]], ids=str
)
def test_draws_follow_the_distribution(kw: dict[str, Any], monkeypatch: Any) -> None:
    assert chi_square(kw, monkeypatch) < 1.0


def chi_square(kw: dict[str, Any], monkeypatch: Any) -> float:
    over_parts = {"sample": split("sample", n=4, width=200)}
    with monkeypatch.context() as patch:
        patch.setattr(test_sample, "jitted", lambda: over_parts)
        return test_sample._chi_square(kw, n=20_000)


BUGS: dict[str, tuple[str, Any]] = {
    "offset of ids off": ("first", lambda right: lambda p, n: right(p, n) + 1),
    "offset of ids missing": ("first", lambda right: lambda p, n: 0 * right(p, n)),
    "padded ids drawn": ("real", lambda right: lambda p, x: x),
    "masses not summed": ("sum", lambda right: lambda p, x: x),
    "masses added twice": ("sum", lambda right: lambda p, x: right(p, right(p, x))),
    "maximum of one part": ("max", lambda right: lambda p, x: x),
    "wrong columns of biases": ("columns", lambda right: lambda p, x, n: x[:, :n]),
    "ids of every part": ("places", lambda right: lambda p, ids, n: ids % n),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_seen(name: str, monkeypatch: Any) -> None:
    method, broken = BUGS[name]
    right = getattr(VocabPart, method)
    bug = broken(right)

    def planted(part: VocabPart, *args: Any) -> Any:
        # Whole rows, whose programs other tests use too, stay right.
        return right(part, *args) if part.axis is None else bug(part, *args)

    monkeypatch.setattr(vocab_part.VocabPart, method, planted)
    with pytest.raises(AssertionError):
        check_all()


def test_the_chi_square_test_sees_a_planted_bug(monkeypatch: Any) -> None:
    """Noise of the same ids on every device."""
    right = sampling.gumbel
    monkeypatch.setattr(sampling, "gumbel", lambda *a: right(*a[:4]))
    with pytest.raises(AssertionError):
        assert chi_square({"temperature": 1.5}, monkeypatch) < 1.0
