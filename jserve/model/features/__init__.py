"""Every feature of a step, in the order of their names."""

from jserve.model.features.mask import MASK
from jserve.model.features.score import SCORE

FEATURES = (MASK, SCORE)
