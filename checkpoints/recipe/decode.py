"""Batched decoding with a key-value cache, for judging a model while it trains.

Owns padding and the decoding loop, nothing about skills. Prompts are padded on the right: positions
past a prompt hold rubbish that is overwritten before any token may look at it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from checkpoints.recipe.model import Decoder, ModelConfig

_BUCKET = 128
_STOPS = (2, 0)  # <|im_end|>, <|endoftext|>: fixed by the tokenizer's trainer


def _empty_cache(config: ModelConfig, rows: int, length: int):
    shape = (rows, length, config.kv_heads, config.head_dim)
    return [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.layers)]


@partial(jax.jit, static_argnums=(0, 4, 6))
def _decode(
    config: ModelConfig,
    params,
    prompts_BT,
    lengths_B,
    new: int,
    stops: jax.Array,
    temperature: float,
    key: jax.Array,
):
    """int32[B, new]: greedy at temperature 0, else draws; filled up with the first stop."""
    B, T = prompts_BT.shape
    slots_S = jnp.arange(T + new)
    positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
    rows_B = jnp.arange(B)

    def forward(tokens_BT, positions_BT, cache):
        mask_BTS = slots_S <= positions_BT[:, :, None]
        return Decoder(config).apply({"params": params}, tokens_BT, positions_BT, mask_BTS, cache)

    def pick(i, logits_BV):
        if temperature == 0:
            return logits_BV.argmax(-1)
        return jax.random.categorical(jax.random.fold_in(key, i), logits_BV / temperature)

    logits_BTV, cache = forward(prompts_BT, positions_BT, _empty_cache(config, B, T + new))
    first_B = pick(0, logits_BTV[rows_B, lengths_B - 1])

    def advance(carry):
        i, token_B, done_B, out_BN, cache = carry
        out_BN = out_BN.at[:, i].set(jnp.where(done_B, stops[0], token_B))
        done_B = done_B | (token_B[:, None] == stops).any(-1)
        positions_B1 = (lengths_B + i)[:, None]
        logits_B1V, cache = forward(token_B[:, None], positions_B1, cache)
        return i + 1, pick(i + 1, logits_B1V[:, 0]), done_B, out_BN, cache

    def busy(carry):
        return (carry[0] < new) & ~carry[2].all()

    out_BN = jnp.full((B, new), stops[0])
    start = (0, first_B, jnp.zeros(B, bool), out_BN, cache)
    return jax.lax.while_loop(busy, advance, start)[3]


def continue_ids(
    config: ModelConfig,
    params,
    prompts: list[list[int]],
    new: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[np.ndarray]:
    """The tokens after each prompt, at most `new`; the last is the end of the turn, if reached."""
    width = -(-max(map(len, prompts)) // _BUCKET) * _BUCKET
    prompts_BT = np.zeros((len(prompts), width), np.int32)
    for row, tokens in zip(prompts_BT, prompts, strict=True):
        row[: len(tokens)] = tokens
    lengths_B = np.array([len(tokens) for tokens in prompts])
    key = jax.random.key(seed)
    out_BN = _decode(
        config, params, prompts_BT, lengths_B, new, jnp.array(_STOPS), temperature, key
    )
    return [row[: _end(row) + 1] for row in np.asarray(out_BN)]


def _end(tokens: np.ndarray) -> int:
    ended = np.flatnonzero(np.isin(tokens, _STOPS))
    return int(ended[0]) if len(ended) else len(tokens)


def complete(
    config: ModelConfig, params, tokenizer: Tokenizer, prompts: list[str], new: int = 128
) -> list[str]:
    """What the model says after each prompt, up to the end of its turn."""
    ids = [encoding.ids for encoding in tokenizer.encode_batch(prompts)]
    said = continue_ids(config, params, ids, new)
    return [tokenizer.decode(row[: _end(row)].tolist(), skip_special_tokens=False) for row in said]
