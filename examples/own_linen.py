"""A transformer of one's own, in flax.linen, served: grouped heads and rotary positions, both its own code.

python examples/own_linen.py
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from own_check import check

from jserve import family_of, register_family

V, D, L, N, K, H, CONTEXT = 2048, 64, 3, 4, 2, 16, 256


def rotary(x_TNH: jax.Array, pos_T: jax.Array) -> jax.Array:
    turn_TH = pos_T[:, None] * 10000.0 ** (-jnp.arange(H // 2) / (H // 2))
    cos, sin = jnp.cos(turn_TH)[:, None], jnp.sin(turn_TH)[:, None]
    a, b = jnp.split(x_TNH, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Block(nn.Module):
    """One layer; ``attend`` is whatever gives a token what it sees."""

    layer: int

    @nn.compact
    def __call__(self, x_TD: jax.Array, pos_T: jax.Array, attend) -> jax.Array:
        y_TD = nn.RMSNorm()(x_TD)
        q = nn.DenseGeneral((N, H), use_bias=False, name="q")(y_TD)
        k, v = (nn.DenseGeneral((K, H), use_bias=False, name=name)(y_TD) for name in "kv")
        o_TNH = attend(self.layer, rotary(q, pos_T), rotary(k, pos_T), v)
        x_TD = x_TD + nn.DenseGeneral(D, axis=(-2, -1), use_bias=False, name="out")(o_TNH)
        return x_TD + nn.Dense(D)(nn.gelu(nn.Dense(4 * D)(nn.RMSNorm()(x_TD))))


class Transformer(nn.Module):
    def setup(self) -> None:
        self.tokens = nn.Embed(V, D)
        self.blocks = [Block(i) for i in range(L)]
        self.norm = nn.RMSNorm()

    def __call__(self, tok_T: jax.Array, pos_T: jax.Array, attend) -> jax.Array:
        x_TD = self.tokens(tok_T)
        for block in self.blocks:
            x_TD = block(x_TD, pos_T, attend)
        return self.norm(x_TD)

    def logits(self, x_TD: jax.Array) -> jax.Array:
        return self.tokens.attend(x_TD)


MODULE: Any = Transformer()  # linen's apply may give state beside the result; this module has none


def causal(_: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of one text, as it is trained."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@jax.jit
def following(params, tok_T: jax.Array) -> jax.Array:
    """int32[T]: the likeliest token after each."""
    x_TD = MODULE.apply({"params": params}, tok_T, jnp.arange(len(tok_T)), causal)
    logits_TV = MODULE.apply({"params": params}, x_TD, method="logits")
    return logits_TV.argmax(axis=-1)


def register(params) -> None:
    """All that serving it takes."""
    register_family(
        family_of(
            "Linen",
            lambda params, *given: MODULE.apply({"params": params}, *given),
            params,
            logits=lambda params, x_ED: MODULE.apply({"params": params}, x_ED, method="logits"),
            vocab=V,
            layers=L,
            heads=N,
            kv_heads=K,
            head_dim=H,
            context=CONTEXT,
        )
    )


def main() -> None:
    tok_T = jnp.arange(8)
    params = Transformer().init(jax.random.key(0), tok_T, tok_T, causal)["params"]
    register(params)
    check("Linen", params, partial(following, params), CONTEXT)


if __name__ == "__main__":
    main()
