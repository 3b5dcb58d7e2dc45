"""The MLPs of a mixture of experts, each over the tokens that chose it."""

from pallas_kernels.grouped_matmul.api import (
    SERVED_DTYPES as SERVED_DTYPES,
    grouped_mlp as grouped_mlp,
    serves as serves,
)
from pallas_kernels.grouped_matmul.values import (
    Activation as Activation,
    Experts as Experts,
    ExpertSpec as ExpertSpec,
)
