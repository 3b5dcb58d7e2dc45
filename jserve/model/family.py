"""What a model family is: a value of plain functions over one architecture description.

Owns the ``Arch`` and ``Family`` types. Must not know any particular family;
``jserve.model.families`` has the registry, and each family file composes ``jserve.model.layers``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from jserve.model.attention import AttentionBackend, LayerKV
from jserve.model.view import StepView

if TYPE_CHECKING:
    from jserve.model.drafter import Drafter


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
    def widest(self) -> int:
        """Tokens that any layer sees beside the sinks; 0 where some layer sees all."""
        return max(self.windows) if self.windows and all(self.windows) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family. All functions are pure; ``axis`` is the tensor-parallel mesh axis inside
    shard_map.

    arch:    config.json as a mapping -> Arch. Raises ConfigError naming the key it cannot honour.
    specs:   (arch, tp) -> tree of ParamSpec (global shapes; kv heads repeated when tp > K).
    forward: (arch, params, view, kv, attn, axis) -> (x_TD after the final norm, new kv).
             ``params`` and ``kv`` are this shard's.
    logits:  (arch, params, x_ED, axis) -> float32[E, V], the whole vocabulary on every shard.
    tapped:  forward with a last argument more, layer numbers, that also gives the residual stream
             float32[T, D] entering each of them (L: entering the final norm). None: heads that read
             hidden states cannot draft for this family.
    embed:   (params, tok_T, axis) -> float32[T, D]. None: nor can those without a table of their own.
    mtp:     (config.json, arch) -> the ``Drafter`` made of the multi-token-prediction weights that
             lie in the model's own checkpoint, whose specs name their tensors. Raises ConfigError
             where this checkpoint has none. None: no checkpoint of the family has any.
    """

    name: str
    architectures: tuple[str, ...]
    arch: Callable[[Mapping[str, Any]], Arch]
    specs: Callable[[Arch, int], Any]
    forward: Callable[
        [Arch, Any, StepView, list[LayerKV], AttentionBackend, str | None],
        tuple[jax.Array, list[LayerKV]],
    ]
    logits: Callable[[Arch, Any, jax.Array, str | None], jax.Array]
    tapped: Callable[..., tuple[jax.Array, list[LayerKV], list[jax.Array]]] | None = None
    embed: Callable[[Any, jax.Array, str | None], jax.Array] | None = None
    mtp: Callable[[Mapping[str, Any], Arch], Drafter] | None = None
