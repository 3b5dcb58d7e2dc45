"""Muon for the matrices inside the layers, Adam for the rest, and the learning-rate schedule.

Owns which parameter gets which rule. Muon (Jordan et al., 2024) orthogonalises the momentum of each
matrix and learns far more per token than Adam at this size. The schedule is warmup-stable-decay: it
can be ended at any moment by starting the decay, which is what makes wall-clock budgets possible.
"""

import jax
import jax.numpy as jnp
import optax

# Batches are small, so the gradient is noisy and the rates are half of what is usual for Muon.
MUON_RATE, ADAM_RATE, WEIGHT_DECAY = 0.01, 0.0015, 0.03
_MOMENTUM = 0.95
_TABLES = ("embedding", "lm_head")  # one row per token: no matrix to orthogonalise
# The quintic whose repeated use drives all singular values of a matrix towards one.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(x: jax.Array, rounds: int = 5) -> jax.Array:
    """Roughly the nearest matrix with singular values one, by Newton-Schulz iteration."""
    tall = x.shape[0] > x.shape[1]
    x = (x.T if tall else x) / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.T
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.T if tall else x


def _direction(momentum: jax.Array, gradient: jax.Array) -> jax.Array:
    """The step for one matrix; wide outputs move as much per unit as narrow ones."""
    fan_in, fan_out = gradient.shape
    nesterov = _MOMENTUM * momentum + (1 - _MOMENTUM) * gradient
    return orthogonalise(nesterov) * max(1.0, fan_out / fan_in) ** 0.5


def scale_by_muon() -> optax.GradientTransformation:
    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates, state, params=None):
        del params
        momentum = jax.tree.map(lambda m, g: _MOMENTUM * m + (1 - _MOMENTUM) * g, state, updates)
        return jax.tree.map(_direction, momentum, updates), momentum

    return optax.GradientTransformation(init, update)


def _rules(params) -> dict:
    def rule(path, leaf):
        table = any(key.key in _TABLES for key in path)
        return "muon" if leaf.ndim == 2 and not table else "adam"

    return jax.tree_util.tree_map_with_path(rule, params)


def make_optimizer(params) -> optax.GradientTransformation:
    """Updates at full rate; the caller multiplies them by the schedule's value."""
    muon = optax.chain(
        scale_by_muon(), optax.add_decayed_weights(WEIGHT_DECAY), optax.scale(-MUON_RATE)
    )
    adam = optax.chain(optax.scale_by_adam(0.9, 0.95), optax.scale(-ADAM_RATE))
    split = optax.partition({"muon": muon, "adam": adam}, _rules(params))
    return optax.chain(optax.clip_by_global_norm(1.0), split)


def rate_at(step: int, done: float, decay: float, warmup: int = 60) -> float:
    """The multiplier of the full rate. `done` is the spent share of the budget."""
    warm = min(1.0, (step + 1) / warmup)
    return warm * min(1.0, max(0.02, (1.0 - done) / decay))
