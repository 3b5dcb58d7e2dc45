"""Computes what a model needs and reaches on given devices, without them: ``jserve plan``."""
