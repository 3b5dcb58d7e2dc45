"""``jserve quantize``: from a checkpoint in 16 or 32 bits to a compressed-tensors directory, a layer at a time."""
