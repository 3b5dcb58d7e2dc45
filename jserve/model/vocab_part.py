"""The part of a split vocabulary that a device has, and what of all parts sampling needs.

It owns the collectives of sampling: numbers of each row, and lists of its largest logits; rows of the vocabulary in
steps whose features read them (``whole``) and in no others. ``WHOLE`` is all of a vocabulary, and none of its methods
leaves a collective in the program::

    ids      | 0 .. 39 | 40 .. 79 | 80 .. 99 -- |     V = 100 on three devices, 40 columns each
    first    | 0       | 40       | 80          |     the last 20 columns are no ids: their logits are -inf
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jserve.model import largest as local
from jserve.model.collectives import gather, maximum, minimum, reduce, shard_index
from jserve.model.mesh import MeshAxis
from jserve.model.shard import Axes


@dataclass(frozen=True, slots=True)
class VocabPart:
    """Columns of rows of logits: ids from ``first`` on."""

    axis: MeshAxis = None
    """The mesh axes over which the vocabulary is split; None: a row is whole."""
    V: int = 0
    """Ids of the whole vocabulary; meaningless without ``axis``."""

    @classmethod
    def of(cls, axes: Axes, V: int) -> VocabPart:
        return cls(axes.vocab, V) if axes.split_logits and axes.vocab is not None else WHOLE

    def n_ids(self, x_EV: jax.Array) -> int:
        """Ids of the whole vocabulary."""
        return x_EV.shape[1] if self.axis is None else self.V

    def first(self, n: int) -> jax.Array | int:
        """int32: the id of the first of ``n`` columns."""
        return 0 if self.axis is None else shard_index(self.axis) * n

    def real(self, x_EV: jax.Array) -> jax.Array:
        """``x_EV`` with -inf in the columns that only make the parts equal."""
        return x_EV if self.axis is None else jnp.where(self._is_id(x_EV), x_EV, -jnp.inf)

    def all_finite(self, x_EV: jax.Array) -> jax.Array:
        """bool[E]: whether all logits of a row are."""
        if self.axis is None:
            return jnp.all(jnp.isfinite(x_EV), axis=-1)
        bad_EV = ~jnp.isfinite(x_EV) & self._is_id(x_EV)
        return self.sum(jnp.sum(bad_EV, axis=1, dtype=jnp.int32)) == 0

    def _is_id(self, x_EV: jax.Array) -> jax.Array:
        n = x_EV.shape[1]
        return self.first(n) + jnp.arange(n, dtype=jnp.int32) < self.V

    def whole(self, x_EV: jax.Array) -> jax.Array:
        """float32[E, V]: whole rows, on every device."""
        return x_EV if self.axis is None else gather(x_EV, self.axis, 1)[:, : self.V]

    def sum(self, x: jax.Array) -> jax.Array:
        return reduce(x, self.axis)

    def max(self, x: jax.Array) -> jax.Array:
        return maximum(x, self.axis)

    def best(self, value_E: jax.Array, column_E: jax.Array, n: int) -> jax.Array:
        """int32[E]: the id of the largest value, of equal ones the lowest, of the best of each part's ``n`` columns."""
        if self.axis is None:
            return column_E
        id_E = jnp.where(value_E == self.max(value_E), self.first(n) + column_E, self.V - 1)
        return minimum(id_E, self.axis)

    def columns(self, x_UV: jax.Array, n: int) -> jax.Array:
        """The ``n`` columns of this part of rows of the whole vocabulary; beyond its end zeros."""
        if self.axis is None:
            return x_UV
        spare = n * -(-self.V // n) - x_UV.shape[1]
        x_UV = jnp.pad(x_UV, ((0, 0), (0, spare))) if spare > 0 else x_UV
        return lax.dynamic_slice_in_dim(x_UV, self.first(n), n, axis=1)

    def places(self, ids: jax.Array, n: int) -> jax.Array:
        """int32: the columns of ids, and ``n`` for an id below 0 or of another part."""
        at = ids - self.first(n)
        return jnp.where((ids < 0) | (at < 0) | (at >= n), n, at)

    def at(self, x_EV: jax.Array, id_EK: jax.Array) -> jax.Array:
        """[E, K]: the logits of these ids."""
        if self.axis is None:
            return jnp.take_along_axis(x_EV, id_EK, axis=1)
        n = x_EV.shape[1]
        at_EK = self.places(id_EK, n)
        found_EK = jnp.take_along_axis(x_EV, jnp.minimum(at_EK, n - 1), axis=1)
        return self.sum(jnp.where(at_EK < n, found_EK, 0.0))

    def logsumexp(self, x_EV: jax.Array) -> jax.Array:
        """float32[E]."""
        if self.axis is None:
            return jax.nn.logsumexp(x_EV, axis=-1)
        top_E = self.max(jnp.max(x_EV, axis=1))
        return top_E + jnp.log(self.sum(jnp.sum(jnp.exp(x_EV - top_E[:, None]), axis=1)))

    def largest(self, x_EV: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
        """``largest.largest`` of the whole rows."""
        if self.axis is None:
            return local.largest(x_EV, n)
        own = min(n, x_EV.shape[1])
        best_En, n_sure_E = local.largest(x_EV, own)
        sure_En = jnp.arange(own, dtype=jnp.int32) < n_sure_E[:, None]
        least_E = jnp.min(jnp.where(sure_En, best_En, jnp.inf), axis=1)
        # What a part did not list is at most the least of what is sure there.
        unseen_E = self.max(jnp.where(n_sure_E < x_EV.shape[1], least_E, -jnp.inf))
        best_En = lax.top_k(gather(best_En, self.axis, 1), n)[0]
        return best_En, jnp.sum(best_En >= unseen_E[:, None], axis=1, dtype=jnp.int32)

    def largest_ids(self, x_EV: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
        """``largest.largest_ids`` of the whole rows."""
        top_En, at_En = local.largest_ids(x_EV, min(n, x_EV.shape[1]))
        if self.axis is None:
            return top_En, at_En
        id_En = gather(at_En + self.first(x_EV.shape[1]), self.axis, 1)
        # Parts follow each other in order of their ids, and top_k takes the first of equal ones.
        top_En, at_En = lax.top_k(gather(top_En, self.axis, 1), n)
        return top_En, jnp.take_along_axis(id_En, at_En, axis=1)


WHOLE = VocabPart()
