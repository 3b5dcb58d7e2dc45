"""A model for rooflines."""

from __future__ import annotations

from jserve.model.arch import Arch
from jserve.sim.costs import SimulatedModel

EIGHT_B = Arch(
    family="llama", L=32, D=4096, F=14336, N=32, K=8, H=128, V=128256, max_position=131072
)
MODEL = SimulatedModel(name="8b", arch=EIGHT_B, itemsize=2)
