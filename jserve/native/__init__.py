"""Kernels in C for the CPU: matrix products of few rows and decode attention, called through XLA's FFI."""
