"""Texts on their way through a model, a layer at a time.

It owns the residual stream of the texts, in batches of equal length, and what it shows of the inputs of each matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model.arch import Arch
from jserve.model.decoder import embedded
from jserve.model.layer_pass import PRODUCTS, layer_pass
from jserve.model.shard import Axes
from jserve.weights.quant.methods.stats import InputStats

LENGTH = 2048
"""Tokens of a text that are used."""
SHORTEST = 64
BATCH_TOKENS = 8192


@dataclass(slots=True)
class Batch:
    """Texts of about one length, padded at their ends."""

    tok_BS: np.ndarray
    kept_BS: np.ndarray
    """bool: tokens of a text."""
    x_BSD: Any = None
    """The residual stream, float32."""


def batches(texts: Sequence[Sequence[int]], arch: Arch) -> list[Batch]:
    """Token ids of texts as batches, in the same order for the same texts."""
    most = min(LENGTH, arch.max_position)
    by_length: dict[int, list[Sequence[int]]] = {}
    for ids in texts:
        ids, S = ids[:most], SHORTEST
        while len(ids) > S:
            S *= 2
        by_length.setdefault(S, []).append(ids)
    found = []
    for S, group in sorted(by_length.items()):
        size = max(1, BATCH_TOKENS // S)
        found += [_batch(group[i : i + size], S) for i in range(0, len(group), size)]
    return found


def _batch(texts: Sequence[Sequence[int]], S: int) -> Batch:
    tok_BS = np.zeros((len(texts), S), np.int32)
    lengths_B = np.array([len(ids) for ids in texts])
    for row, ids in zip(tok_BS, texts, strict=True):
        row[: len(ids)] = ids
    return Batch(tok_BS, np.arange(S) < lengths_B[:, None])


class LayerStream:
    """The residual stream of all batches before the next layer."""

    def __init__(self, arch: Arch, texts: Sequence[Sequence[int]]) -> None:
        self._arch, self.batches = arch, batches(texts, arch)

    def enter(self, table_VD: Any) -> None:
        """Begin with the rows of the embedding."""
        for batch in self.batches:
            x = embedded(
                self._arch, {"embed": table_VD}, jnp.asarray(batch.tok_BS.reshape(-1)), Axes()
            )
            batch.x_BSD = x.reshape(*batch.tok_BS.shape, -1)

    def pass_layer(self, layer: int, p: Mapping[str, Any]) -> None:
        """Replace the stream by what leaves a layer."""
        for batch in self.batches:
            batch.x_BSD = layer_pass(self._arch, layer, p, batch.x_BSD)[0]

    def stats(self, layer: int, p: Mapping[str, Any]) -> dict[str, InputStats]:
        """Of the inputs of each matrix of a layer; the stream stays before it."""
        found = {name: InputStats.empty(p[name].shape[-1]) for name in PRODUCTS}
        for x_TD, name, kept_T in self.inputs(layer, p):
            found[name] = found[name].with_more(x_TD, kept_T)
        return found

    def inputs(
        self, layer: int, p: Mapping[str, Any]
    ) -> Iterator[tuple[jax.Array, str, jax.Array]]:
        """(float32[T, D], name of the product that they enter, bool[T]: tokens of a text), batch by batch."""
        for batch in self.batches:
            found = layer_pass(self._arch, layer, p, batch.x_BSD)[1]
            kept_T = jnp.asarray(batch.kept_BS.reshape(-1))
            for name, x_BSD in found.items():
                yield x_BSD.reshape(-1, x_BSD.shape[-1]), name, kept_T
