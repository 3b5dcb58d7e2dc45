"""Kernels that no step calls yet: ``bench.gpu_candidates`` times them against XLA on a device.

A kernel moves to ``pallas_kernels`` once it is right on a device and takes less than 1 / 1.05 of XLA's time at every
shape of ``bench.gpu_candidates``; one that does not is deleted. Evidence so far, from compiled code:

* ``sample_threshold``: not timed; 6 kernels for XLA's 60 and more, 21 of them a sort.
* ``kv_write``: not timed; 1 kernel for XLA's 3, or 7 with norms of queries and keys.
* ``quant_matmul``: not timed, and no checkpoint of 4 bits is read yet.
"""
