"""Prompt lookup on the device: copies drafts from the latest earlier occurrence of the text's end.

The text of a row is a ring of its newest tokens, the one at position p in place ``p % S``. The longest n-gram that
ends it is looked for further back, the latest place of equals is taken, and what followed there is the guess; a
place so near the end that the copy runs into it goes on with its own period::

    age      8 7 6 5 4 3 2 1 0
    tokens   a b c d e x b c d        "b c d" occurred before, at age 5: e x b ...
    tokens         a b a b a b        "a b a b" stood before, at age 2: a b a ...

What it finds is what ``host.ngram.NgramIndex`` finds in the same text, for all rows in one pass over ``S`` tokens
each, without weights or KV. So drafts need no word from the host, and steps follow one another as they do without.

Idea: prompt lookup decoding (A. Saxena, 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jserve.model.arch import Arch
from jserve.speculation.drafters.drafter import Drafter

_NO_TOKEN, _NO_END = -1, -2
"""Before the first token of a text, and in an n-gram that is longer than the text: equal to nothing."""


def ngram(target: Arch, *, least: int, most: int, window: int) -> Drafter:
    """A drafter that copies: n-grams of ``least`` to ``most`` tokens over the newest ``window`` tokens."""
    found = PromptLookup(least=least, most=most)
    return Drafter(
        name="ngram",
        arch=target,
        n_max=window,
        reads_next=True,
        specs=lambda tp: {},
        text=window,
        copy=found.copy,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookup:
    """N-grams of ``least`` to ``most`` tokens."""

    least: int
    most: int

    def copy(self, text_RS: jax.Array, newest_R: jax.Array, n: int) -> jax.Array:
        """int32[R, n]: what may come next; where nothing is found, the newest token again and again.

        Args:
            text_RS: int32, the rings.
            newest_R: int32, position of the newest token of each row.
        """
        S = text_RS.shape[1]
        age_S = jnp.arange(S, dtype=jnp.int32)
        by_age_RS = jnp.take_along_axis(text_RS, (newest_R[:, None] - age_S) % S, axis=1)
        by_age_RS = jnp.where(age_S <= newest_R[:, None], by_age_RS, _NO_TOKEN)
        length_RS = self._matched(by_age_RS)
        # The longest, and of these the latest; the end itself is no match.
        score_RS = jnp.where(age_S > 0, length_RS * S - age_S, -S)
        best_R = jnp.argmax(score_RS, axis=1).astype(jnp.int32)
        found_R = jnp.take_along_axis(length_RS, best_R[:, None], axis=1)[:, 0] >= self.least
        best_R = jnp.where(found_R, best_R, 1)
        ahead_n = jnp.arange(n, dtype=jnp.int32)
        at_Rn = best_R[:, None] - 1 - ahead_n % best_R[:, None]
        return jnp.take_along_axis(by_age_RS, at_Rn, axis=1)

    def _matched(self, by_age_RS: jax.Array) -> jax.Array:
        """int32: of the n-gram that ends the text, how many tokens also end at each age."""
        S, K = by_age_RS.shape[1], self.most
        padded_RS = jnp.pad(by_age_RS, ((0, 0), (0, K)), constant_values=_NO_TOKEN)
        end_RK = jnp.where(padded_RS[:, :K] == _NO_TOKEN, _NO_END, padded_RS[:, :K])
        length_RS, goes_on_RS = jnp.zeros_like(by_age_RS), jnp.ones(by_age_RS.shape, bool)
        for back in range(K):
            goes_on_RS &= padded_RS[:, back : back + S] == end_RK[:, back : back + 1]
            length_RS += goes_on_RS
        return length_RS
