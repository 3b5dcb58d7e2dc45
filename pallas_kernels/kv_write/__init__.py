"""Norm, rotation and page write of what the attention projection gives, in one pass."""

from pallas_kernels.kv_write.api import kv_write as kv_write
from pallas_kernels.kv_write.hopper import Angles as Angles, Places as Places
