"""Training speculative heads: what the frozen target computes, and how heads are judged against it.

Owns the draft vocabulary, where chains of drafts start, and the loss: cross-entropy with the
target's own distribution at every step ahead, later steps weighing less. It must not know files.
"""

from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from checkpoints.recipe import skills
from checkpoints.recipe.eagle import EagleConfig, EagleHead, take
from checkpoints.recipe.medusa import MedusaConfig, MedusaHeads
from checkpoints.recipe.model import Features, ModelConfig, packed_features
from checkpoints.recipe.packing import encode
from checkpoints.recipe.train import Task

HeadConfig = EagleConfig | MedusaConfig
HEADS: dict[str, type[EagleConfig] | type[MedusaConfig]] = {
    "eagle3": EagleConfig,
    "medusa": MedusaConfig,
}
_DECAY = 0.8  # of the loss from one step ahead to the next
_COUNTED = 4000
_SAID = 3 / 8  # of a row's tokens are drafted for at most; the assistant says a third of the text


def draft_vocabulary(tokenizer: Tokenizer, size: int, seed: int = 1) -> np.ndarray:
    """int32[size], ascending: the tokens the assistant says most in the training text."""
    rng = np.random.default_rng([seed, _COUNTED])
    counts: Counter[int] = Counter()
    for ids, weights in encode(tokenizer, [skills.draw(rng, "train") for _ in range(_COUNTED)]):
        counts.update(ids[weights == 1.0].tolist())
    order = sorted(range(tokenizer.get_vocab_size()), key=lambda token: (-counts[token], token))
    return np.array(sorted(order[:size]), np.int32)


def head_task(config: HeadConfig, target_params: Any, tokenizer: Tokenizer) -> Task:
    """Heads of `config` for a trained target, which stays as it is."""
    frozen = {"target": target_params, "draft_ids": _draft_ids(config, tokenizer)}
    return Task(partial(_init, config, frozen), partial(_loss, config), frozen)


def _draft_ids(config: HeadConfig, tokenizer: Tokenizer) -> np.ndarray:
    if config.vocab == config.target.vocab:
        return np.arange(config.vocab, dtype=np.int32)
    return draft_vocabulary(tokenizer, config.vocab)


def _init(config: HeadConfig, frozen: dict, seed: int) -> Any:
    one = jnp.zeros((1, 2), jnp.int32)

    @jax.jit
    def start(frozen, key):
        features = target_features(config.target, frozen["target"], one, one)
        return _module(config).init(key, *_inputs(config, frozen, features, one, one, one))

    params = start(frozen, jax.random.key(seed))["params"]
    if isinstance(config, EagleConfig):
        # The target knows what its tokens look like: a head that starts there learns much sooner.
        embedding_VD = frozen["target"]["embedding"]
        params["lm_head"]["kernel"] = embedding_VD[frozen["draft_ids"]].T
        params["norm"] = jax.tree.map(jnp.copy, frozen["target"]["final_norm"])
    return params


def _module(config: HeadConfig) -> EagleHead | MedusaHeads:
    return EagleHead(config) if isinstance(config, EagleConfig) else MedusaHeads(config)


def _inputs(config: HeadConfig, frozen: dict, features: Features, tokens_BT, documents_BT, rows_BQ):
    embedding_VD = frozen["target"]["embedding"]
    if isinstance(config, MedusaConfig):
        return take(features.final_BTD, rows_BQ), embedding_VD
    taps_BTC = jnp.concatenate([features.layers[i] for i in config.taps], -1)
    return taps_BTC, embedding_VD, tokens_BT, documents_BT, rows_BQ


def target_features(config: ModelConfig, params, tokens_BT, documents_BT) -> Features:
    return jax.lax.stop_gradient(packed_features(config, params, tokens_BT, documents_BT))


def draft_logits(
    config: HeadConfig, frozen: dict, params, features: Features, tokens_BT, documents_BT, rows_BQ
) -> list[jax.Array]:
    """float32[B, Q, config.vocab] per step: at step i row t predicts token t + 2 + i."""
    inputs = _inputs(config, frozen, features, tokens_BT, documents_BT, rows_BQ)
    return _module(config).apply({"params": params}, *inputs)  # type: ignore[return-value]


def _loss(config: HeadConfig, frozen: dict, params, batch: tuple) -> jax.Array:
    tokens_BT, documents_BT, weights_BT = batch
    features = target_features(config.target, frozen["target"], tokens_BT, documents_BT)
    said_BT = weights_BT == 1.0
    rows_BQ, ok_BQ = chain_starts(said_BT)
    logits = draft_logits(config, frozen, params, features, tokens_BT, documents_BT, rows_BQ)
    goal_BTV, known_BT = _goal(features.logits_BTV, frozen["draft_ids"])
    loss = jnp.zeros(())
    for i, logits_BQV in enumerate(logits):
        ahead_BQ = rows_BQ + 1 + i  # the row from which the target predicts the same token
        ok_BQ = ok_BQ & take(said_BT, ahead_BQ) & (ahead_BQ < said_BT.shape[1])
        losses_BQ = -(take(goal_BTV, ahead_BQ) * jax.nn.log_softmax(logits_BQV)).sum(-1)
        counts_BQ = ok_BQ & take(known_BT, ahead_BQ)
        loss += _DECAY**i * (losses_BQ * counts_BQ).sum() / jnp.maximum(counts_BQ.sum(), 1)
    return loss


def _goal(logits_BTV, draft_ids) -> tuple[jax.Array, jax.Array]:
    """The target's distribution over the draft vocabulary, and where that has its best token."""
    known_V = jnp.zeros(logits_BTV.shape[-1], bool).at[draft_ids].set(True)
    return jax.nn.softmax(logits_BTV[..., draft_ids]), known_V[logits_BTV.argmax(-1)]


def chain_starts(said_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(rows, which are real) int32 and bool[B, Q]: the first rows that a draft may start from.

    A row t may if token t + 1 and what follows are said by the assistant; `said[t]` is about the
    prediction of token t + 1, so it is false at the end of a document.
    """
    may_BT = said_BT & jnp.roll(said_BT, -1, axis=1).at[:, -1].set(False)
    rows_BQ = jnp.argsort(~may_BT, axis=1, stable=True)[:, : int(said_BT.shape[1] * _SAID)]
    return rows_BQ, take(may_BT, rows_BQ)
