"""Partial sums of a product, residual and root mean square norm in one pass."""

from pallas_kernels.add_norm.api import add_norm as add_norm, serves as serves
