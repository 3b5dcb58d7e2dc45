"""Attention of prefill chunks of several sequences over paged KV."""

from pallas_kernels.ragged_prefill.api import ragged_prefill as ragged_prefill
