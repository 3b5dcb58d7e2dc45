"""The arguments of the kernels of latent attention besides queries: pages, and what is static."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class LatentPages(NamedTuple):
    """A layer's pool and the pages of each row."""

    pool_PZC: Any
    """bfloat16 or float16: of a token the numbers that all heads share, first those that are values too. What no query
    of a row sees may be anything, also NaN."""
    table_RM: Any
    """int32 page ids; those beyond a row's last token are not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Everything static that a caller chooses."""

    rank: int
    """A: so many of a token's C numbers are its value, for every head."""
    scale: float
    """Of the scores."""
    tune: Mapping[str, Any] | None = None
    """Instead of entries of the kernel's tune.json."""
    interpret: Any = None
    """``plgpu.InterpretGPUParams()`` runs on a CPU."""
