"""Steps of well-known models as shapes, for compiling without a device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jserve.model.attention import backend
from jserve.model.families import family_for
from jserve.model.family import Arch
from jserve.model.shard import ShardRules, make_mesh
from jserve.model.step import StepModel, make_step
from jserve.model.view import Bucket, StepDims, buffer_size
from pallas_kernels import aot

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LLAMA3 = {"family": "llama", "V": 128256, "max_position": 131072, "rope_theta": 500000.0}
_QWEN = {"V": 151936 + 128, "max_position": 32768, "rope_theta": 1e6}
ARCHS = {
    "llama-3.2-1b": Arch(L=16, D=2048, F=8192, N=32, K=8, H=64, tied=True, **_LLAMA3),
    "llama-3.1-8b": Arch(L=32, D=4096, F=14336, N=32, K=8, H=128, **_LLAMA3),
    "llama-3.1-70b": Arch(L=80, D=8192, F=28672, N=64, K=8, H=128, **_LLAMA3),
    "qwen2.5-7b": Arch(
        family="qwen2", L=28, D=3584, F=18944, N=28, K=4, H=128, qkv_bias=True, **_QWEN
    ),
    "qwen3-8b": Arch(
        family="qwen3", L=36, D=4096, F=12288, N=32, K=8, H=128, qk_norm=True, **_QWEN
    ),
}


def step_model(arch: Arch, *, tp: int = 1, n_pages: int = 2048, C: int = 256) -> StepModel:
    """A step over described H200s; KV of ``n_pages`` pages of 64 tokens, 8192 tokens a row."""
    attention = backend("hopper", "cuda")
    return StepModel(
        family=family_for({"architectures": [ARCHITECTURES[arch.family]]}),
        arch=arch,
        backend=attention,
        dims=StepDims(C=C, M=128, Z=64, V=arch.V),
        mesh=make_mesh(tp, aot.h200(tp)),
        rules=ShardRules(),
        n_pages=n_pages,
        kv_dtype=attention.kv_dtype(jnp.bfloat16),
        dtype=jnp.bfloat16,
    )


def compile_step(model: StepModel, bucket: Bucket) -> aot.Report:
    whole = NamedSharding(model.mesh, PartitionSpec())
    size = buffer_size(model.fields(bucket))
    buf: Any = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=whole)
    args = (model.abstract_params(), model.abstract_state(), buf)
    return aot.compile_for(make_step(model, bucket), *args, donate=(1,))
