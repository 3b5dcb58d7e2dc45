"""Arithmetic of quantisation with data: statistics of activations, GPTQ, scales of inputs, rotations."""
