"""Stage of ``bench.gpu``: the attention of others at the shapes of ``decode_times`` and ``prefill_times``.

It owns torch's backends of scaled_dot_product_attention, flex attention, jax's cuDNN attention, and
FlashAttention-3 and FlashInfer where their wheels were carried. Those without pages read dense keys, which is
easier. Whoever is not on the machine is skipped by name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from bench.gpu_facts import timed
from bench.gpu_record import NotHere, Record
from bench.gpu_torch import device, seconds, torch

PAGE = 64
FP16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Load:
    """``B`` rows of ``T`` new tokens that see ``S`` keys each, themselves the last of them."""

    B: int
    T: int
    S: int
    N: int = 32
    K: int = 8
    H: int = 128

    @property
    def n_bytes(self) -> int:
        return self.B * self.S * 2 * self.K * self.H * FP16_BYTES

    @property
    def flops(self) -> float:
        return 4.0 * self.B * self.N * self.H * self.T * (self.S - (self.T - 1) / 2)


DECODE = {"64 x 2k": Load(64, 1, 2048), "64 x 8k": Load(64, 1, 8192), "8 x 2k": Load(8, 1, 2048)}
PREFILL = {"1 x 4k": Load(1, 4096, 4096), "8 x 1k": Load(8, 1024, 1024)}
TINY_DECODE, TINY_PREFILL = Load(2, 1, 128, 4, 2, 64), Load(1, 128, 128, 4, 2, 64)


def attention_peers(record: Record) -> None:
    """Microseconds, and bytes of keys and values a second (decode) or TFLOP/s (prefill)."""
    loads = {"tiny": TINY_DECODE} if record.tiny else DECODE
    prompts = {"tiny prompt": TINY_PREFILL} if record.tiny else PREFILL
    for title, load in (loads | prompts).items():
        for name, peer in PEERS.items():
            measure = functools.partial(_figures, peer, load)
            record.attempt(f"{name}, {title}", measure)


def _figures(peer: Callable[[Load], float], load: Load) -> dict[str, float]:
    try:
        spent = peer(load)
    except ModuleNotFoundError as missing:
        raise NotHere(f"{missing.name} is not installed") from None
    if load.T == 1:
        return {"us": spent * 1e6, "bytes_per_s": load.n_bytes / spent}
    return {"us": spent * 1e6, "tflops": load.flops / spent / 1e12}


def _dense(load: Load) -> tuple[Any, Any, Any]:
    where = {"device": device(), "dtype": torch.bfloat16}
    q = torch.randn(load.B, load.N, load.T, load.H, **where)
    k, v = (torch.randn(load.B, load.K, load.S, load.H, **where) for _ in range(2))
    return q, k, v


def _sdpa(load: Load, backend: str) -> float:
    q, k, v = _dense(load)
    attention = importlib.import_module("torch.nn.attention")
    if backend != "MATH" and device() == "cpu":
        raise NotHere(f"torch's {backend} needs a GPU")
    call = torch.nn.functional.scaled_dot_product_attention
    with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
        return seconds(lambda: call(q, k, v, is_causal=load.T > 1, enable_gqa=True))


def _flex(load: Load) -> float:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    q, k, v = _dense(load)
    on_gpu = device() == "cuda"
    mask = None
    if load.T > 1:
        seen = functools.partial(_not_later)
        mask = flex.create_block_mask(seen, None, None, load.T, load.S, device=device())
    call = torch.compile(flex.flex_attention, backend="inductor" if on_gpu else "eager")
    return seconds(lambda: call(q, k, v, block_mask=mask, enable_gqa=True))


def _not_later(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def _jax_dense(load: Load) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    heads = ((load.T, load.N), (load.S, load.K), (load.S, load.K))
    q, k, v = (
        jax.random.normal(key, (load.B, n, h, load.H), jnp.bfloat16)
        for key, (n, h) in zip(keys, heads, strict=True)
    )
    return q, k, v


def _cudnn(load: Load) -> float:
    """On a CPU jax's own, so that the call is proved."""
    kind: Any = "cudnn" if jax.default_backend() == "gpu" else "xla"

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=load.T > 1, implementation=kind)

    return timed(jax.jit(call), *_jax_dense(load))


def _carried(package: str) -> Any:
    if importlib.util.find_spec(package) is None:
        raise NotHere(f"{package} was not carried")
    if jax.default_backend() != "gpu":
        raise NotHere(f"{package} needs a GPU")
    return importlib.import_module(package)


def _flash3(load: Load) -> float:
    """Paged for decode, with its splits chosen best of three."""
    fa3 = _carried("flash_attn3_jax")
    q, k, v = _jax_dense(load)
    if load.T > 1:
        return timed(jax.jit(lambda q, k, v: fa3.flash_mha(q, k, v, is_causal=True)), q, k, v)
    paged = (-1, PAGE, load.K, load.H)
    pools = (k.reshape(paged), v.reshape(paged))
    table = jnp.arange(load.B * load.S // PAGE, dtype=jnp.int32).reshape(load.B, -1)
    lengths = jnp.full(load.B, load.S, jnp.int32)

    def call(splits: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        options = {"cache_seqlens": lengths, "page_table": table, "num_splits": splits}
        return fa3.flash_mha_with_kvcache(q, k, v, **options)

    splits = (1, 4, 16)
    return min(timed(jax.jit(functools.partial(call, n)), q, *pools) for n in splits)


def _flashinfer(load: Load) -> float:
    """Compiles its kernels at first use, which takes most of a minute."""
    flashinfer = _carried("flashinfer")
    q, k, v = _dense(load)
    if load.T > 1:
        if load.B > 1:
            raise NotHere("asked for one prompt only: each shape costs a compile")
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        return seconds(lambda: flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True))
    per_row = load.S // PAGE
    pool = torch.randn(
        load.B * per_row, 2, load.K, PAGE, load.H, device=device(), dtype=torch.bfloat16
    )
    whole = {"device": device(), "dtype": torch.int32}
    space = torch.zeros(128 << 20, device=device(), dtype=torch.uint8)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(0, load.B + 1, **whole) * per_row,
        torch.arange(load.B * per_row, **whole),
        torch.full((load.B,), PAGE, **whole),
        load.N,
        load.K,
        load.H,
        PAGE,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    rows = q[:, :, 0].contiguous()
    return seconds(lambda: wrapper.run(rows, pool))


PEERS: dict[str, Callable[[Load], float]] = {
    "torch sdpa, math": functools.partial(_sdpa, backend="MATH"),
    "torch sdpa, flash": functools.partial(_sdpa, backend="FLASH_ATTENTION"),
    "torch sdpa, cuDNN": functools.partial(_sdpa, backend="CUDNN_ATTENTION"),
    "torch flex": _flex,
    "jax cuDNN": _cudnn,
    "FlashAttention-3": _flash3,
    "FlashInfer": _flashinfer,
}
