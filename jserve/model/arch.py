"""One decoder as values: each layer's own description, and what all layers share.

It owns ``Arch``, which everything that computes or sizes a model reads. A layer says itself which heads, rope, window
and norms it has, so families differ in values and the decoder has no switch for any of them::

    Arch  D, V, norm, ...      layers[0]  DecoderLayer   attn  Attention  N K H  rope  window  scale  ...
                               layers[1]  ...            ffn   Mlp        F  activation
                               ...                       parallel  residual_scale
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jserve.kv_layout import KVLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Rotary scaling as config.json states it; ``kind`` is one of ``rope.KINDS``."""

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
    short_factor: tuple[float, ...] = ()
    """Of longrope: what each frequency is divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The rotation of queries and keys by their position."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    rotary: int = 0
    """First dimensions of a head that turn, the rest stay; 0: all turn."""
    pairs: bool = False
    """Dimensions 2i and 2i + 1 turn together; else i and i + H/2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """A layer's attention: N query heads over K kv heads of H numbers."""

    N: int
    K: int
    H: int
    rope: Rope | None = Rope()
    """None: positions show in the order of the tokens alone."""
    window: int = 0
    """Newest positions that a token sees, its own among them; 0: all."""
    scale: float = 0.0
    """Of the scores; 0: H ** -0.5."""
    soft_cap: float = 0.0
    """c: scores become c * tanh(score / c); 0: they stay."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str = ""
    """Norm of queries and keys before they turn: ``head`` of each head, ``width`` of all heads together; empty:
    none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A layer's gated MLP: down(activation(gate x) * up x), F wide."""

    F: int
    activation: str = "silu"
    """silu, gelu or gelu_tanh."""
    mlp_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer. Where its norms lie, the parameters say (``decoder.decoder_layer``)."""

    attn: Attention
    ffn: Mlp
    parallel: bool = False
    """Attention and MLP read the same normed input, and both are added to the residual stream."""
    residual_scale: float = 1.0
    """Multiplies what attention and MLP add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """The norm of a decoder, one kind for all places."""

    eps: float = 1e-6
    centered: bool = False
    """LayerNorm without a bias: the mean is taken off; else RMS norm."""
    plus_one: bool = False
    """Its scales are stored less 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One decoder, normalised from config.json. Hashable: a static jit argument."""

    family: str
    D: int
    V: int
    max_position: int
    layers: tuple[DecoderLayer, ...]
    norm: Norm = Norm()
    tied: bool = False
    embed_scale: float = 1.0
    """Of the embedding's rows, rounded to the type of the table."""
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    """As ``Attention.soft_cap``, of logits; after their scale."""
    kv_scales: bool = False
    """The checkpoint has scales for KV of 8 bits."""
    sinks: int = 0
    """First tokens that stay visible beside the windows (an option of the engine, not of config.json)."""

    @property
    def L(self) -> int:
        return len(self.layers)

    @property
    def N(self) -> int:
        """Query heads; as K, H and F the same in all layers (``hf_config.decoder_arch``)."""
        return self.layers[0].attn.N

    @property
    def K(self) -> int:
        return self.layers[0].attn.K

    @property
    def H(self) -> int:
        return self.layers[0].attn.H

    @property
    def F(self) -> int:
        return self.layers[0].ffn.F

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different ones, by first layer."""
        found = [layer.attn.rope for layer in self.layers]
        return tuple(dict.fromkeys(rope for rope in found if rope is not None))

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        """The KV that each layer keeps of a token."""
        return tuple(
            KVLayer.attention(a.K, a.H, window=a.window) for a in (x.attn for x in self.layers)
        )


def resized(arch: Arch, *, L: int = 0, windows: Sequence[int] = (), **fields: Any) -> Arch:
    """``arch`` with other values of fields of ``Arch``, ``Attention`` or ``Mlp``, in all layers alike.

    Args:
        L: layers, as the first ones are, or more like these; 0: as many as before.
        windows: of each layer; empty: as before.
    """
    attn, ffn = (
        {name: fields.pop(name) for name in list(fields) if name in of.__dataclass_fields__}
        for of in (Attention, Mlp)
    )
    n, before = L or len(windows) or arch.L, arch.layers
    layers = [before[i % len(before)] for i in range(n)]
    layers = [replace(x, attn=replace(x.attn, **attn), ffn=replace(x.ffn, **ffn)) for x in layers]
    if windows:
        layers = [
            replace(x, attn=replace(x.attn, window=w)) for x, w in zip(layers, windows, strict=True)
        ]
    return replace(arch, layers=tuple(layers), **fields)
