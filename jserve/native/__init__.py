"""Kernels in C for the CPU: matrix products, attention and writes of KV, called through XLA's FFI."""
