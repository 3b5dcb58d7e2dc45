"""Gumbel noise of every token at every draw, counter-based.

It owns the hash. The noise of a token is a function of the request's seed, the position that is drawn, the purpose
and the token's id in the whole vocabulary, so it is the same in every batch, bucket and sharding, and for whoever
drafts for that position. argmax(log p + noise) is distributed as p (Gumbel, 1954), and two distributions that share
the noise choose the same token with probability (1 - TV) / (1 + TV) or more, TV being their total variation
distance.

One threefry block per draw makes a key of 64 bits; a token's bits are its id mixed with one half of the key,
then with the other, by the finaliser of MurmurHash3: some twenty integer operations, which XLA fuses with the
pass over the logits that reads the noise.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

Purpose = int | jax.Array
"""One for all draws, or int32[E]."""
_SPREAD = 0x9E3779B9
"""2 ** 32 over the golden ratio: ids that follow one another differ in many bits."""
_BELOW_ONE = 1.0 - 2.0**-24
_LOG_2 = 0.6931471805599453
_ROOT_HALF = 0x3F3504F3
"""The bits of float32(sqrt(0.5))."""
_TAIL = (
    0.0873457776,
    -0.143074133,
    0.149180179,
    -0.165705246,
    0.199620696,
    -0.250017546,
    0.333339503,
    -0.499999916,
)
"""(log(1 + f) - f) / f ** 2 over the f of ``_split``, fitted for the least relative error: 3e-8."""


def gumbel(
    seed_E2: jax.Array,
    pos_E: jax.Array,
    V: int,
    purpose: Purpose = 0,
    first: jax.Array | int = 0,
) -> jax.Array:
    """float32[E, V], between -2.9 and 22.2, of V tokens from ``first`` on.

    Args:
        seed_E2: uint32, the seeds of the requests.
        pos_E: int32, positions of the tokens to be drawn.
    """
    key_E, other_E = _keys(seed_E2, pos_E, purpose)
    id_V = jnp.arange(V, dtype=jnp.uint32) + jnp.uint32(first)
    token_V = id_V * jnp.uint32(_SPREAD)
    bits_EV = _mixed(_mixed(token_V + key_E[:, None]) ^ other_E[:, None])
    return _gumbel(_unit(bits_EV))


def keys(seed_E2: jax.Array, pos_E: jax.Array, purpose: Purpose) -> jax.Array:
    """A key of ``jax.random`` for each draw, [E], of what ``gumbel`` makes its own of."""
    bits_E2 = jnp.stack(_keys(seed_E2, pos_E, purpose), axis=1)
    return jax.random.wrap_key_data(bits_E2, impl="threefry2x32")


def _keys(seed_E2: jax.Array, pos_E: jax.Array, purpose: Purpose) -> tuple[jax.Array, jax.Array]:
    pos_E = pos_E.astype(jnp.uint32)
    key_E, other_E = threefry2x32_p.bind(
        seed_E2[:, 0], seed_E2[:, 1], pos_E, jnp.full_like(pos_E, purpose)
    )
    return key_E, other_E


def _mixed(h: jax.Array) -> jax.Array:
    """uint32: every bit depends on every bit; one to one."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def _unit(bits: jax.Array) -> jax.Array:
    """float32 strictly between 0 and 1. Steps of 2 ** -31 next to 0, which decides the largest noise; there
    float32 is fine enough, and what rounds to 1 is kept below it."""
    half = (bits >> 1).astype(jnp.int32).astype(jnp.float32)
    return jnp.minimum((half + 0.5) * 2.0**-31, _BELOW_ONE)


def _gumbel(u: jax.Array) -> jax.Array:
    """-log(-log(1 - u)), within 2e-6; takes XLA:CPU half as long as its own two logarithms do."""
    e, f = _split(1.0 - u)
    small = u < 0.29  # where 1 - u has lost digits of u
    exponential = -_log(jnp.where(small, 0.0, e), jnp.where(small, -u, f))
    return -_log(*_split(exponential))


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 (e, f) with x = 2 ** e * (1 + f), f between -0.293 and 0.414; x is positive and normal."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    e = (bits - _ROOT_HALF) >> 23
    m = jax.lax.bitcast_convert_type(bits - (e << 23), jnp.float32)
    return e.astype(jnp.float32), m - 1.0


def _log(e: jax.Array, f: jax.Array) -> jax.Array:
    """log(2 ** e * (1 + f)), to a few units of float32's last place."""
    tail = jnp.full_like(f, _TAIL[0])
    for c in _TAIL[1:]:
        tail = tail * f + jnp.float32(c)
    return e * _LOG_2 + (f + f * f * tail)
