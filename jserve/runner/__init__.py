"""The border between host and device: numpy in, numpy out, jax inside."""
