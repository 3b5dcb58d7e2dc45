"""The EAGLE-3 head: one decoder layer that drafts from three layers of the target, in flax.linen.

Owns the architecture (Li et al., 2025; the layout of SafeAILab/EAGLE) and its unrolling over
several steps, which is both the training-time test and the drafting of the evaluation. It must not
know losses, text or files. Shapes as in `model`, and: Q rows that a chain starts at, I steps.

Row t pairs what the target computed at token t with the embedding of token t + 1 and predicts
token t + 2. A chain that starts there goes on without the target, fed its own output::

    step            0                 1                    2
    hidden     fc(taps[t])        out of step 0        out of step 1
    token         t + 1               t + 2                t + 3
    attends    rows <= t          rows <= t, 1         rows <= t, 1, 2     (position t + step)
    predicts      t + 2               t + 3                t + 4
"""

from dataclasses import dataclass, replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from checkpoints.recipe.model import Linear, Mlp, ModelConfig, Norm, packed_rows, rope

KV = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class EagleConfig:
    """`taps`: the target layers whose outputs are fused, counted from 0."""

    target: ModelConfig
    taps: tuple[int, int, int] = (1, 3, 4)
    ffn: int = 240
    vocab: int = 1024  # of the drafts: the tokens the assistant says most
    steps: int = 7
    fast_matmul: bool = False


def take(x_BT: jax.Array, rows_BQ: jax.Array) -> jax.Array:
    """`x[b, rows[b, q]]` for any trailing axes; rows past the end give the last row."""
    rows_BQ = jnp.minimum(rows_BQ, x_BT.shape[1] - 1)
    return jax.vmap(lambda x, rows: x[rows])(x_BT, rows_BQ)


class EagleHead(nn.Module):
    config: EagleConfig

    def setup(self):
        c, t = self.config, self.config.target
        linear = partial(Linear, fast=c.fast_matmul)
        self.fc = linear(t.hidden)
        self.input_norm, self.hidden_norm = Norm(t.eps), Norm(t.eps)
        self.q = linear(t.heads * t.head_dim)
        self.k = linear(t.kv_heads * t.head_dim)
        self.v = linear(t.kv_heads * t.head_dim)
        self.o = linear(t.hidden, closing=True)
        self.mlp_norm, self.norm = Norm(t.eps), Norm(t.eps)
        self.mlp = Mlp(replace(t, ffn=c.ffn, fast_matmul=c.fast_matmul))
        self.lm_head = linear(c.vocab)

    def __call__(self, taps_BTC, embedding_VD, tokens_BT, documents_BT, rows_BQ):
        """Draft logits, float32[B, Q, vocab] per step, of the chains that start at `rows_BQ`.

        The chains are fed the tokens of the text. They are those the head would draft for as long
        as its drafts are right, so the number of right drafts is that of free drafting.
        """
        positions_BT, mask_BTT = packed_rows(documents_BT)
        hidden_BTD = self.fc(taps_BTC)
        embeds_BTD = embedding_VD[jnp.roll(tokens_BT, -1, axis=1)]
        hidden_BTD, context = self._layer(embeds_BTD, hidden_BTD, positions_BT, mask_BTT, None, [])
        hidden_BQD, mask_BQT = take(hidden_BTD, rows_BQ), take(mask_BTT, rows_BQ)
        logits, chain = [self._logits(hidden_BQD)], []
        for i in range(1, self.config.steps):
            embeds_BQD = embedding_VD[take(tokens_BT, rows_BQ + 1 + i)]
            hidden_BQD, kv = self._layer(
                embeds_BQD, hidden_BQD, rows_BQ + i, mask_BQT, context, chain
            )
            chain = [*chain, kv]
            logits.append(self._logits(hidden_BQD))
        return logits

    def _logits(self, hidden_BQD):
        return self.lm_head(self.norm(hidden_BQD))

    def _layer(self, embeds, hidden, positions, mask, context: KV | None, chain: list[KV]):
        """(output, its keys and values) of the layer; without a context it is its own."""
        t, shape = self.config.target, hidden.shape[:2]
        x = jnp.concatenate([self.input_norm(embeds), self.hidden_norm(hidden)], -1)
        q = rope(self.q(x).reshape(*shape, t.heads, -1), positions, t.rope_theta)
        k = rope(self.k(x).reshape(*shape, t.kv_heads, -1), positions, t.rope_theta)
        kv = k, self.v(x).reshape(*shape, t.kv_heads, -1)
        attended = (
            _attend(q, kv, mask, []) if context is None else _attend(q, context, mask, [*chain, kv])
        )
        hidden = hidden + self.o(attended)
        return hidden + self.mlp(self.mlp_norm(hidden)), kv


def _attend(q_BQNH: jax.Array, context: KV, mask_BQT, chain: list[KV]) -> jax.Array:
    """float32[B, Q, N*H]: row q sees what its mask shows of the context, and its own chain."""
    B, Q, N, H = q_BQNH.shape
    q_BQKGH = q_BQNH.reshape(B, Q, context[0].shape[2], -1, H) * H**-0.5
    scores = jnp.einsum("bqkgh,btkh->bqkgt", q_BQKGH, context[0])
    scores = jnp.where(mask_BQT[:, :, None, None], scores, -1e30)
    own = [(q_BQKGH * k_BQKH[:, :, :, None]).sum(-1, keepdims=True) for k_BQKH, _ in chain]
    probs = jax.nn.softmax(jnp.concatenate([scores, *own], -1))
    T = mask_BQT.shape[-1]
    out = jnp.einsum("bqkgt,btkh->bqkgh", probs[..., :T], context[1])
    for i, (_, v_BQKH) in enumerate(chain):
        out = out + probs[..., T + i, None] * v_BQKH[:, :, :, None]
    return out.reshape(B, Q, N * H)
