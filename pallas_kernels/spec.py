"""The arguments of the attention kernels besides queries: pages, rows of the batch, and what is static.

It owns these values, which both kernels, their references and their callers pass on whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Pages(NamedTuple):
    """A layer's pool and the pages of each row."""

    keys_PKZH: Any
    """bfloat16, float16, float8_e4m3fn or int8. What no query of a row sees may be anything, also NaN."""
    values_PKZH: Any
    table_RM: Any
    """int32 page ids; those beyond a row's last key are not read."""
    k_scales_PKZ: Any = None
    """float32, of int8 alone: what each key is multiplied by. Where no query sees one it may be anything, too."""
    v_scales_PKZ: Any = None
    """The same of values."""


class Rows(NamedTuple):
    """Rows of as many query tokens each, int32."""

    start_D: Any
    """Position of the first token."""
    len_D: Any
    """Keys of the row, its own tokens included; 0 for a row without any."""


class Chunks(NamedTuple):
    """Sequences whose tokens are neighbours among the queries, int32."""

    first_F: Any
    """Index of the sequence's first token among the queries."""
    start_F: Any
    """Position of that token."""
    count_F: Any
    """Tokens of the sequence; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Everything static that a caller chooses."""

    scale: float
    """Of the scores."""
    window: int = 0
    """Keys that each token sees, itself included; 0 for all."""
    soft_cap: float = 0.0
    """Scores become ``soft_cap * tanh(score / soft_cap)``; 0 for none."""
    tune: Mapping[str, Any] | None = None
    """Instead of entries of the kernel's tune.json."""
    interpret: Any = None
    """``plgpu.InterpretGPUParams()`` runs on a CPU."""
