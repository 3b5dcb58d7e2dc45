"""Multi-head latent attention over paged latents, with queries that have taken in the heads' matrices."""

from pallas_kernels.mla_attention.api import (
    MAX_TOKENS as MAX_TOKENS,
    mla_attention as mla_attention,
    mla_chunks as mla_chunks,
    unserved as unserved,
)
from pallas_kernels.mla_attention.values import LatentPages as LatentPages, LatentSpec as LatentSpec
