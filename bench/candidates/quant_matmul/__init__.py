"""Product of few rows with a matrix of 4-bit weights."""

from bench.candidates.quant_matmul.api import quant_matmul as quant_matmul
