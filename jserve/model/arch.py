"""The dimensions and switches of one decoder, as values.

It owns ``Arch``, which everything that computes or sizes a model reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jserve.kv_layout import KVLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Rotary scaling as config.json states it; ``kind`` is linear, dynamic, llama3 or yarn."""

    kind: str
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One decoder's dimensions and switches, normalised from config.json. Hashable: a static jit
    argument."""

    family: str
    L: int
    D: int
    F: int
    N: int
    K: int
    H: int
    V: int
    max_position: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary: int = 0
    """First dimensions of a head that turn with the position, the rest stay; 0: all turn."""
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    kv_scales: bool = False
    """The checkpoint has scales for KV of 8 bits."""
    windows: tuple[int, ...] = field(default=())
    """Sliding window of each layer in tokens, 0 for full attention; empty: all full."""
    sinks: int = 0
    """First tokens that stay visible beside the windows (an option of the engine, not of config.json)."""

    @property
    def G(self) -> int:
        return self.N // self.K

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        """The KV that each layer keeps of a token."""
        windows = map(self.window, range(self.L))
        return tuple(KVLayer.attention(self.K, self.H, window=window) for window in windows)
