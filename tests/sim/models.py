"""A model for rooflines."""

from __future__ import annotations

from typing import Any

from jserve.model.arch import Arch, Attention, DecoderLayer, Mlp
from jserve.sim.costs import SimulatedModel


def alike(*, L: int, N: int, K: int, H: int, F: int, **fields: Any) -> Arch:
    """A Llama of L layers."""
    layer = DecoderLayer(attn=Attention(N=N, K=K, H=H), ffn=Mlp(F=F))
    return Arch(family="llama", layers=(layer,) * L, **fields)


EIGHT_B = alike(L=32, D=4096, F=14336, N=32, K=8, H=128, V=128256, max_position=131072)
MODEL = SimulatedModel(name="8b", arch=EIGHT_B, itemsize=2)
