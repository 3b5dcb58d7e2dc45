/* The part of the C ABI of XLA's FFI that the kernels use. Filled in with the kernels. */
