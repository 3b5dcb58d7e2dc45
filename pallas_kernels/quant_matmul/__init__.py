"""Product of few rows with a matrix of 4- or 8-bit weights whose scales are of groups."""

from pallas_kernels.quant_matmul.api import (
    MAX_ROWS as MAX_ROWS,
    quant_matmul as quant_matmul,
    serves as serves,
)
from pallas_kernels.quant_matmul.bits import KINDS as KINDS
from pallas_kernels.quant_matmul.values import Weights as Weights
