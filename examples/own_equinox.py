"""A transformer of one's own, in Equinox, served: its modules take one token, vmap gives them those of a step.

python examples/own_equinox.py   # needs equinox
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from own_check import check

from jserve import family_of, register_family

V, D, N, H, CONTEXT = 2048, 64, 4, 16, 256
WINDOWS = (8, 0, 8)
"""Of each layer, the newest positions that it sees; 0: all."""


class Block(eqx.Module):
    """One layer; ``attend`` is whatever gives a token what it sees."""

    norms: list[eqx.nn.RMSNorm]
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.norms = [eqx.nn.RMSNorm(D) for _ in range(2)]
        self.qkv = eqx.nn.Linear(D, 3 * N * H, use_bias=False, key=keys[0])
        self.out = eqx.nn.Linear(N * H, D, use_bias=False, key=keys[1])
        self.mlp = eqx.nn.MLP(D, D, 4 * D, depth=1, activation=jax.nn.gelu, key=keys[2])

    def __call__(self, i: int, x_TD: jax.Array, attend) -> jax.Array:
        y_TD = jax.vmap(self.norms[0])(x_TD)
        q, k, v = jnp.moveaxis(jax.vmap(self.qkv)(y_TD).reshape(-1, 3, N, H), 1, 0)
        x_TD = x_TD + jax.vmap(self.out)(attend(i, q, k, v).reshape(-1, N * H))
        return x_TD + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x_TD))


class Transformer(eqx.Module):
    tokens: eqx.nn.Embedding
    places: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.RMSNorm

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 2 + len(WINDOWS))
        self.tokens = eqx.nn.Embedding(V, D, key=keys[0])
        self.places = eqx.nn.Embedding(CONTEXT, D, key=keys[1])
        self.blocks = [Block(key) for key in keys[2:]]
        self.norm = eqx.nn.RMSNorm(D)

    def __call__(self, tok_T: jax.Array, pos_T: jax.Array, attend) -> jax.Array:
        x_TD = jax.vmap(self.tokens)(tok_T) + jax.vmap(self.places)(pos_T)
        for i, block in enumerate(self.blocks):
            x_TD = block(i, x_TD, attend)
        return jax.vmap(self.norm)(x_TD)

    def logits(self, x_TD: jax.Array) -> jax.Array:
        return x_TD @ self.tokens.weight.T


def causal(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of one text, as it is trained."""
    window = (WINDOWS[i] - 1, 0) if WINDOWS[i] else None
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=window)


@eqx.filter_jit
def following(model: Transformer, tok_T: jax.Array) -> jax.Array:
    """int32[T]: the likeliest token after each."""
    return model.logits(model(tok_T, jnp.arange(len(tok_T)), causal)).argmax(axis=-1)


def register(model: Transformer) -> list[jax.Array]:
    """All that serving it takes; the parameters, as the engine is given them."""
    arrays, static = eqx.partition(model, eqx.is_array)
    params, tree = jax.tree.flatten(arrays)

    def module(params: list[jax.Array]) -> Transformer:
        return eqx.combine(jax.tree.unflatten(tree, params), static)

    register_family(
        family_of(
            "Equinox",
            lambda params, *given: module(params)(*given),
            params,
            logits=lambda params, x_ED: module(params).logits(x_ED),
            vocab=V,
            layers=len(WINDOWS),
            windows=WINDOWS,
            heads=N,
            head_dim=H,
            context=CONTEXT,
        )
    )
    return params


def main() -> None:
    model = Transformer(jax.random.key(0))
    params = register(model)
    check("Equinox", params, partial(following, model), CONTEXT)


if __name__ == "__main__":
    main()
