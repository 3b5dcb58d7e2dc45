"""Kernels for Hopper in Pallas Mosaic GPU; they import jax alone and stand on their own."""
