"""The language model: a Qwen3 decoder in flax.linen, for training and for cached greedy decoding.

Owns the architecture and its numerics; the reference is `Qwen3ForCausalLM` of transformers (grouped
query attention, RMS norm on queries and keys, half-rotation RoPE, SwiGLU, tied embeddings). It must
not know text, optimisers or files. Shapes: B rows, T tokens, S cached positions, D model, F ffn,
N query heads, K kv heads, G = N/K, H head dim, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

Cache = list[tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class ModelConfig:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int = 2048
    context: int = 2048
    rope_theta: float = 10_000.0
    eps: float = 1e-6
    fast_matmul: bool = False  # bf16 operands, f32 sums: for training on CPUs with AVX512-BF16


MAIN = ModelConfig(hidden=256, layers=5, heads=4, kv_heads=2, head_dim=64, ffn=704)
DRAFT = ModelConfig(hidden=96, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=256)
TINY = ModelConfig(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=512)
SIZES = {"main": MAIN, "draft": DRAFT, "tiny": TINY}


def _dot(x, w, contract):
    return jax.lax.dot_general(x, w, (contract, ((), ())), preferred_element_type=jnp.float32)


@jax.custom_vjp
def _fast_matmul(x_MD: jax.Array, w_DF: jax.Array) -> jax.Array:
    return _dot(x_MD.astype(jnp.bfloat16), w_DF.astype(jnp.bfloat16), ((1,), (0,)))


def _fast_forward(x_MD, w_DF):
    return _fast_matmul(x_MD, w_DF), (x_MD, w_DF)


def _fast_backward(saved, dy_MF):
    # The weight gradient sums over all tokens; XLA:CPU is no faster there in bf16, so keep f32.
    x_MD, w_DF = saved
    dx_MD = _dot(dy_MF.astype(jnp.bfloat16), w_DF.astype(jnp.bfloat16), ((1,), (1,)))
    return dx_MD, _dot(x_MD, dy_MF, ((0,), (0,)))


_fast_matmul.defvjp(_fast_forward, _fast_backward)


def matmul(x_BTD: jax.Array, w_DF: jax.Array, fast: bool) -> jax.Array:
    if not fast:
        return x_BTD @ w_DF
    y_MF = _fast_matmul(x_BTD.reshape(-1, x_BTD.shape[-1]), w_DF)
    return y_MF.reshape(*x_BTD.shape[:-1], -1)


class Linear(nn.Module):
    """`closing` layers write to the residual stream and start at zero, which keeps it calm."""

    features: int
    fast: bool
    closing: bool = False

    @nn.compact
    def __call__(self, x_BTD):
        shape = (x_BTD.shape[-1], self.features)
        init = nn.initializers.normal(0.0 if self.closing else shape[0] ** -0.5)
        kernel = self.param("kernel", init, shape)
        return matmul(x_BTD, kernel, self.fast)


class Norm(nn.Module):
    eps: float

    @nn.compact
    def __call__(self, x):
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],))
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.eps) * weight


def rope(x_BTNH: jax.Array, positions_BT: jax.Array, theta: float) -> jax.Array:
    half = x_BTNH.shape[-1] // 2
    rates_H = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions_BT[:, :, None, None].astype(jnp.float32) * rates_H
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    a, b = x_BTNH[..., :half], x_BTNH[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _by_head(x_BTNH: jax.Array) -> jax.Array:
    B, T, N, H = x_BTNH.shape
    return x_BTNH.transpose(0, 2, 1, 3).reshape(B * N, T, H)


def _attend_one(q_BNH, k_BSKH, v_BSKH, mask_BS):
    """One query per row, as fused sums: a product would first copy the whole cache."""
    B, _, K, H = k_BSKH.shape
    q_BKGH = q_BNH.reshape(B, K, -1, H) * H**-0.5
    scores_BSKG = (q_BKGH[:, None] * k_BSKH[:, :, :, None]).sum(-1)
    probs_BSKG = jax.nn.softmax(jnp.where(mask_BS[:, :, None, None], scores_BSKG, -1e30), axis=1)
    return (probs_BSKG[..., None] * v_BSKH[:, :, :, None]).sum(1).reshape(B, 1, -1)


def attend(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    """Heads become rows of one batched product: grouped einsums are twice as slow on XLA:CPU."""
    B, T, N, H = q_BTNH.shape
    if T == 1:
        return _attend_one(q_BTNH[:, 0], k_BSKH, v_BSKH, mask_BTS[:, 0])
    G = N // k_BSKH.shape[2]
    k_RSH, v_RSH = (_by_head(jnp.repeat(x, G, axis=2)) for x in (k_BSKH, v_BSKH))
    scores_RTS = jnp.einsum("rth,rsh->rts", _by_head(q_BTNH) * H**-0.5, k_RSH)
    scores_BNTS = scores_RTS.reshape(B, N, T, -1)
    scores_BNTS = jnp.where(mask_BTS[:, None], scores_BNTS, -1e30)
    probs_RTS = jax.nn.softmax(scores_BNTS).reshape(scores_RTS.shape)
    out_BNTH = jnp.einsum("rts,rsh->rth", probs_RTS, v_RSH).reshape(B, N, T, H)
    return out_BNTH.transpose(0, 2, 1, 3).reshape(B, T, N * H)


class Attention(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD, positions_BT, mask_BTS, cache=None):
        c, (B, T, _) = self.config, x_BTD.shape
        linear = partial(Linear, fast=c.fast_matmul)
        q = linear(c.heads * c.head_dim, name="q")(x_BTD).reshape(B, T, c.heads, c.head_dim)
        k = linear(c.kv_heads * c.head_dim, name="k")(x_BTD).reshape(B, T, c.kv_heads, c.head_dim)
        v = linear(c.kv_heads * c.head_dim, name="v")(x_BTD).reshape(B, T, c.kv_heads, c.head_dim)
        q = rope(Norm(c.eps, name="q_norm")(q), positions_BT, c.rope_theta)
        k = rope(Norm(c.eps, name="k_norm")(k), positions_BT, c.rope_theta)
        if cache is not None:
            rows = jnp.arange(B)[:, None]
            k = cache[0].at[rows, positions_BT].set(k)
            v = cache[1].at[rows, positions_BT].set(v)
        out = linear(c.hidden, closing=True, name="o")(attend(q, k, v, mask_BTS))
        return out, (k, v)


class Mlp(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD):
        linear = partial(Linear, fast=self.config.fast_matmul)
        gate_BTF = linear(self.config.ffn, name="gate")(x_BTD)
        up_BTF = linear(self.config.ffn, name="up")(x_BTD)
        return linear(self.config.hidden, closing=True, name="down")(jax.nn.silu(gate_BTF) * up_BTF)


class Layer(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD, positions_BT, mask_BTS, cache=None):
        normed = Norm(self.config.eps, name="attention_norm")(x_BTD)
        mixed, cache = Attention(self.config, name="attention")(
            normed, positions_BT, mask_BTS, cache
        )
        x_BTD = x_BTD + mixed
        return x_BTD + Mlp(self.config, name="mlp")(
            Norm(self.config.eps, name="mlp_norm")(x_BTD)
        ), cache


class Decoder(nn.Module):
    """Tokens to logits. With a cache, keys and values are written at `positions_BT` first."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BT, positions_BT, mask_BTS, cache: Cache | None = None):
        c = self.config
        shape = (c.vocab, c.hidden)
        embedding_VD = self.param("embedding", nn.initializers.normal(0.02), shape)
        x_BTD, new_cache = embedding_VD[tokens_BT], []
        for i in range(c.layers):
            old = None if cache is None else cache[i]
            x_BTD, kv = Layer(c, name=f"layer_{i}")(x_BTD, positions_BT, mask_BTS, old)
            new_cache.append(kv)
            self.sow("features", "layers", x_BTD)
        x_BTD = Norm(c.eps, name="final_norm")(x_BTD)
        self.sow("features", "final", x_BTD)
        return matmul(x_BTD, embedding_VD.T, c.fast_matmul), new_cache


def init_params(config: ModelConfig, seed: int) -> Any:
    tokens_BT = jnp.zeros((1, 2), jnp.int32)
    mask_BTS = jnp.ones((1, 2, 2), bool)
    variables = Decoder(config).init(jax.random.key(seed), tokens_BT, tokens_BT, mask_BTS)
    return variables["params"]


def packed_rows(documents_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(positions_BT, mask_BTS): a token sees the earlier tokens of its own document only."""
    T = documents_BT.shape[1]
    same_BTS = documents_BT[:, :, None] == documents_BT[:, None, :]
    mask_BTS = same_BTS & jnp.tril(jnp.ones((T, T), bool))
    return jnp.broadcast_to(jnp.arange(T), documents_BT.shape), mask_BTS


def packed_logits(config: ModelConfig, params, tokens_BT, documents_BT) -> jax.Array:
    """Logits of packed rows."""
    rows = packed_rows(documents_BT)
    return Decoder(config).apply({"params": params}, tokens_BT, *rows)[0]


class Features(NamedTuple):
    """What a speculative head may read of a forward pass over packed rows."""

    layers: tuple[jax.Array, ...]  # [B, T, D] after each layer, before any norm
    final_BTD: jax.Array  # after the final norm
    logits_BTV: jax.Array


def packed_features(config: ModelConfig, params, tokens_BT, documents_BT) -> Features:
    """The same pass as `packed_logits`, with what it passes through."""
    (logits_BTV, _), sown = Decoder(config).apply(
        {"params": params}, tokens_BT, *packed_rows(documents_BT), mutable=["features"]
    )
    features: Any = sown["features"]
    return Features(features["layers"], features["final"][0], logits_BTV)


def parameter_count(params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
