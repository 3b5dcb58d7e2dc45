"""The weights of ``quant_matmul``: numbers, and what they are multiplied by."""

from __future__ import annotations

from typing import Any, NamedTuple


class Weights(NamedTuple):
    """A matrix [N, D] whose weights are ``(q - zero) * scale``."""

    q: Any
    """int8 or float8_e4m3fn[N, D], or uint8[N, D / 2]: byte j of 16 has input j of 32 in its low half and input 16 + j
    in its high one. What a half stands for is said by the kind (``bits.KINDS``)."""
    scale_NB: Any
    """float32, of D / B neighbouring inputs."""
    zero_NB: Any = None
    """int8; None: 0."""
