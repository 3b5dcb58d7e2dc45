"""Attention of decode and verification rows over paged KV."""

from pallas_kernels.paged_attention.api import (
    paged_attention as paged_attention,
    paged_attention_of_heads as paged_attention_of_heads,
    q_rows_of as q_rows_of,
)
from pallas_kernels.paged_attention.tree import Tree as Tree
