"""The largest logits of each row, in the form that each platform has fast code for.

XLA:GPU has a kernel for up to 16 values of a row (``BY_KERNEL``) and sorts the whole row for more: 21 passes over the
vocabulary. So there a row is taken apart, or looked at twice. XLA:CPU selects without a sort, and does it once.

``largest`` deals the tokens of a row out to parts, takes 16 of each and the best of these::

    token   0  1  2 .. 7 | 8  9 ..            part p: tokens p, p + 8, ...   neighbours in the vocabulary,
    part    0  1  2 .. 7 | 0  1 ..            of which the frequent ones come first, lie in different parts

All logits above the least of what each part gave are found. The rest of the answer is not sure, and a row says how
much of its answer is.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

BY_KERNEL = 16
PARTS = 8


def largest(x_EV: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """The ``n`` largest of each row, in falling order, and how many of them are sure.

    Returns:
        x.dtype[E, n], and int32[E]: so many of them, from the first on, are those of ``lax.top_k``. On a CPU all,
        elsewhere all unless more than 16 lie in one part.
    """
    return jax.lax.platform_dependent(
        x_EV, cpu=functools.partial(_at_once, n=n), default=functools.partial(by_parts, n=n)
    )


def largest_ids(x_EV: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """The ``n`` largest of each row and their int32 ids, equal ones by id: ``lax.top_k``. More than 32 are a sort on
    a GPU."""
    if n <= BY_KERNEL:
        return _top_k(x_EV, n)
    return jax.lax.platform_dependent(
        x_EV, cpu=functools.partial(_top_k, n=n), default=functools.partial(in_two_rounds, n=n)
    )


def by_parts(x_EV: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """``largest`` where more than 16 of a whole row would be a sort."""
    E, V = x_EV.shape
    if V <= PARTS * BY_KERNEL:
        return _at_once(x_EV, n)
    x_EV = jnp.pad(x_EV, ((0, 0), (0, -V % PARTS)), constant_values=-jnp.inf)
    x_EPX = x_EV.reshape(E, -1, PARTS).swapaxes(1, 2)
    some_EPB = jax.lax.top_k(x_EPX, BY_KERNEL)[0]
    # Not some_EPB[..., -1]: a second slice of what top_k lowers to makes it a full sort.
    least_E = jnp.max(jnp.min(some_EPB, axis=2), axis=1)
    best_En = jax.lax.top_k(some_EPB.reshape(E, -1), n)[0]
    return best_En, jnp.sum(best_En >= least_E[:, None], axis=1, dtype=jnp.int32)


def in_two_rounds(x_EV: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """``largest_ids`` as the 16 largest, then the rest of them among the tokens that come after those."""
    first_EB, id_EB = _top_k(x_EV, BY_KERNEL)
    last_E1 = jnp.min(first_EB, axis=1, keepdims=True)
    at_E1 = jnp.max(jnp.where(first_EB == last_E1, id_EB, -1), axis=1, keepdims=True)
    id_V = jnp.arange(x_EV.shape[1], dtype=jnp.int32)
    after_EV = (x_EV < last_E1) | ((x_EV == last_E1) & (id_V > at_E1))
    more_EB, more_id_EB = _top_k(jnp.where(after_EV, x_EV, -jnp.inf), n - BY_KERNEL)
    return jnp.concatenate([first_EB, more_EB], 1), jnp.concatenate([id_EB, more_id_EB], 1)


def _at_once(x_EV: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    return jax.lax.top_k(x_EV, n)[0], jnp.full(x_EV.shape[:1], n, jnp.int32)


def _top_k(x_EV: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    top_En, id_En = jax.lax.top_k(x_EV, n)
    return top_En, id_En.astype(jnp.int32)
