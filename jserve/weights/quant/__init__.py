"""Formats of quantised checkpoints, and quantisation on load: from tensors of a file to ``model.quant.QTensor``."""
