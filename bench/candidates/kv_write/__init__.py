"""Norm, rotation and page write of what the attention projection gives, in one pass."""

from bench.candidates.kv_write.api import kv_write as kv_write
