"""Kernels that no step calls yet: ``bench.gpu_candidates`` times them against XLA on a device.

A kernel moves to ``pallas_kernels`` once it is right on a device and takes less than 1 / 1.05 of XLA's time at every
shape of ``bench.gpu_candidates``; one that does not is deleted. Evidence so far, from compiled code:

* ``sample_threshold``: not timed; 5 kernels for XLA's 35 to 41, none of which sorts the vocabulary any more.
"""
