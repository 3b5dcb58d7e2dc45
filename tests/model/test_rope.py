"""Rotary frequencies against transformers' own, at real model sizes; dynamic NTK as a function of
position."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jserve.model.families import family_for
from jserve.model.rope import for_context, for_requests, inverse_frequencies, rope_tables

BASE = {
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32,
    "max_position_embeddings": 131072,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama 3.1": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "qwen yarn": {**YARN, "original_max_position_embeddings": 32768},
    "yarn without original": YARN,
    "yarn not truncated": {**YARN, "original_max_position_embeddings": 4096, "truncate": False},
    "yarn, all numbers": {
        **YARN,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
    },
    "yarn mscale": {
        **YARN,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
}


def arch(rope: dict[str, Any], **changes: Any) -> Any:
    config = {**BASE, **changes, "architectures": ["LlamaForCausalLM"], "rope_parameters": rope}
    return family_for(config).arch(config)


def theirs(rope: dict[str, Any], changes: dict[str, Any], **where: int) -> Any:
    """(frequencies, factor) of transformers. Imported here: every worker collects this file, one runs it."""
    torch = pytest.importorskip("torch", reason="the oracle is transformers on CPU torch")
    config = pytest.importorskip("transformers").LlamaConfig
    made = config(**{**BASE, **changes}, rope_parameters=dict(rope))
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    return functions[rope["rope_type"]](made, torch.device("cpu"), **where)


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    want, factor = theirs(ROPES[name], {})
    a = arch(ROPES[name])
    got, scale = inverse_frequencies(a.H, a.ropes[0].theta, a.ropes[0].scaling)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)
    assert scale == pytest.approx(factor, rel=1e-7)


@pytest.mark.parametrize("pos", [0, 100, 2047, 2048, 5000])
def test_dynamic_rotates_by_position(pos: int) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    freq, _ = theirs(rope, {"max_position_embeddings": 2048}, seq_len=pos + 1)
    a = arch(rope, max_position_embeddings=2048)
    cos_T2H, sin_T2H = rope_tables(a.ropes[0], a.H, jnp.array([pos]))
    for half, sign in ((0, -1), (1, 1)):
        np.testing.assert_allclose(cos_T2H[0, half], np.cos(pos * freq.numpy()), atol=2e-3)
        np.testing.assert_allclose(sin_T2H[0, half], sign * np.sin(pos * freq.numpy()), atol=2e-3)


def test_tokens_of_rows_of_both_kinds_have_the_tables_of_their_own() -> None:
    factors = {"short_factor": [1.0] * 64, "long_factor": [3.0] * 64}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    config = {**BASE, "architectures": ["Phi3ForCausalLM"], "rope_parameters": rope}
    short = family_for(config).arch({**config, "original_max_position_embeddings": 4096})
    both, long = for_requests(short, 4097), for_context(short, 4097)
    pos_T, long_T = jnp.arange(100, 140), jnp.arange(40) % 3 == 0
    found = rope_tables(both.ropes[0], both.H, pos_T, long_T)
    for i, table in enumerate(found):
        of_short, of_long = (rope_tables(a.ropes[0], a.H, pos_T)[i] for a in (short, long))
        assert np.abs(np.asarray(of_short - of_long)).max() > 0.1
        want = jnp.where(long_T[:, None, None], of_long, of_short)
        np.testing.assert_allclose(table, want, atol=1e-5)
