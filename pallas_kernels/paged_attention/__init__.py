"""Attention of decode and verification rows over paged KV."""

from pallas_kernels.paged_attention.api import paged_attention as paged_attention
from pallas_kernels.paged_attention.tree import Tree as Tree
