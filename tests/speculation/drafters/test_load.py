"""Draft models as their files are read."""

from __future__ import annotations

from typing import Any

import pytest

from jserve.model.families import family_for
from jserve.model.rope import for_requests, short_context
from jserve.speculation.drafters.load import find_drafter
from jserve.weights.source import Source

PHI = {
    "architectures": ["Phi3ForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 64,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}
LLAMA = {**PHI, "architectures": ["LlamaForCausalLM"], "rope_scaling": None}
del LLAMA["original_max_position_embeddings"]


@pytest.mark.parametrize(
    ("target", "original", "by_row", "factor"),
    [
        (PHI, 64, True, 1.0),
        (PHI, 128, False, 2.0),
        (LLAMA, 64, False, 2.0),
    ],
)
def test_longrope_of_a_draft_model_goes_by_row_where_the_target_changes_at_one_length(
    target: dict[str, Any], original: int, by_row: bool, factor: float
) -> None:
    """Otherwise all its rows have the long factors."""
    arch = for_requests(family_for(target).arch(target), 256)
    config = {**PHI, "original_max_position_embeddings": original}
    source = Source(
        name="d", directory=None, format="dummy", weights=None, config=config, generation={}
    )  # type: ignore[arg-type]
    drafter = find_drafter("draft", source, arch).drafter
    assert short_context(drafter.arch) == (short_context(arch) if by_row else 0)
    assert drafter.arch.ropes[0].scaling.factors == (factor,) * 4
