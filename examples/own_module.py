"""A transformer of one's own, in flax.nnx, served: its code computes all but attention, which reads the engine's pages.

python examples/own_module.py
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from own_check import check

from jserve import family_of, register_family

V, D, L, N, H, CONTEXT = 2048, 64, 3, 4, 16, 256


class Block(nnx.Module):
    """One layer; ``attend`` is whatever gives a token what it sees."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.RMSNorm(D, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(D, 3 * N * H, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(N * H, D, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(D, 4 * D, rngs=rngs)
        self.down = nnx.Linear(4 * D, D, rngs=rngs)

    def __call__(self, i: int, x_TD: jax.Array, attend) -> jax.Array:
        q, k, v = jnp.moveaxis(self.qkv(self.norms[0](x_TD)).reshape(-1, 3, N, H), 1, 0)
        x_TD = x_TD + self.out(attend(i, q, k, v).reshape(-1, N * H))
        return x_TD + self.down(nnx.gelu(self.up(self.norms[1](x_TD))))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(V, D, rngs=rngs)
        self.places = nnx.Embed(CONTEXT, D, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(L)])
        self.norm = nnx.RMSNorm(D, rngs=rngs)

    def __call__(self, tok_T: jax.Array, pos_T: jax.Array, attend) -> jax.Array:
        x_TD = self.tokens(tok_T) + self.places(pos_T)
        for i, block in enumerate(self.blocks):
            x_TD = block(i, x_TD, attend)
        return self.norm(x_TD)


def causal(_: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of one text, as it is trained."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@nnx.jit
def following(model: Transformer, tok_T: jax.Array) -> jax.Array:
    """int32[T]: the likeliest token after each."""
    return model.tokens.attend(model(tok_T, jnp.arange(len(tok_T)), causal)).argmax(axis=-1)


def register(model: Transformer) -> dict:
    """All that serving it takes; the parameters, as the engine is given them."""
    graph, state = nnx.split(model)
    params = nnx.to_pure_dict(state)

    def module(params) -> Transformer:
        return nnx.merge(graph, params)

    register_family(
        family_of(
            "Tutorial",
            lambda params, *given: module(params)(*given),
            params,
            logits=lambda params, x_ED: module(params).tokens.attend(x_ED),
            vocab=V,
            layers=L,
            heads=N,
            head_dim=H,
            context=CONTEXT,
        )
    )
    return params


def main() -> None:
    model = Transformer(nnx.Rngs(0))
    params = register(model)
    check("Tutorial", params, partial(following, model), CONTEXT)


if __name__ == "__main__":
    main()
