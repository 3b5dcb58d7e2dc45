"""Maps each element of a parameter to its place in the checkpoint (``Part`` arithmetic).

Owns: cutting a shard of a parameter into regions of checkpoint tensors (``pieces``), and the way from one layout of
a parameter to another (``split``, ``join``, ``relayout``). Pure Python and array methods: works on numpy and on jax
arrays.

A parameter is its parts laid along ``concat``; a part is a tensor seen as ``view``, axis 0
repeated::

    concat axis  ->   0        a.extent       a.extent + b.extent
                      |<- part a ->|<------- part b ------->|
    shard index               [=====================]
    pieces                    [ a' ][       b'      ]          out: where in the shard

    axis 0 of a part with repeat 2:   view rows       0   1   2
                                      part rows      0 1 2 3 4 5
    part rows 3:6 are cut from view rows 1:3 (each twice), less the first one (skip = 1)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jserve.model.param_spec import ParamSpec, Part

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPiece:
    """A region of one part, and the region of the shard it fills."""

    part: Part
    rows: Index
    """Region of the part in view coordinates after the repeat on axis 0."""
    out: Index
    """Region of the shard (shard coordinates) that it fills; same shape as ``rows``."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.rows)

    def cut(self, tensor: Any) -> Any:
        """The region of ``tensor`` (shape ``part.shape``); a view of it unless axis 0 repeats."""
        view = self.part.seen(tensor)
        r = self.part.repeat
        if r == 1:
            return view[self.rows]
        first, last = self.rows[0].start, self.rows[0].stop
        source = view[(slice(first // r, -(-last // r)), *self.rows[1:])]
        skip = first % r
        return source.repeat(r, axis=0)[skip : skip + last - first]

    def copy(self, tensor: Any, target: np.ndarray) -> None:
        """Write the region into ``target``, casting; without a temporary of its size."""
        if self.part.order:
            self._copy_ordered(tensor, target)
            return
        r = self.part.repeat
        view = self.part.seen(tensor)
        if r == 1:
            target[...] = view[self.rows]
            return
        for i, row in enumerate(range(self.rows[0].start, self.rows[0].stop)):
            target[i] = view[(row // r, *self.rows[1:])]

    def _copy_ordered(self, tensor: Any, target: np.ndarray) -> None:
        for i, row in enumerate(range(self.rows[0].start, self.rows[0].stop)):
            target[i] = self.part.entry(tensor, row)[self.rows[1:]]


def check(spec: ParamSpec, name: str) -> None:
    """Assert that the parts fill the parameter exactly (a wrong spec is our own bug)."""
    c = spec.concat
    assert len(spec.axes) == len(spec.shape), f"{name}: {spec.axes} against {spec.shape}"
    for part in spec.parts:
        shape = _repeated(part)
        n_entries = math.prod(part.cut) if part.cut else part.n_rows * math.prod(part.shape[1:])
        if part.within is not None:
            n_entries = n_entries // part.cut[1] * (part.within[1] - part.within[0])
        plain = part.repeat == 1 and part.within is None and part.order[:1] == (0,)
        assert not part.order or plain, f"{name}: {part.name} has an order and more"
        fits = math.prod(part.view) == n_entries and part.first + part.n_rows <= part.shape[0]
        assert fits, f"{name}: {part.name} viewed as {part.view}"
        fits = (*shape[:c], *shape[c + 1 :]) == (*spec.shape[:c], *spec.shape[c + 1 :])
        assert fits, f"{name}: {part.name} is {shape} in {spec.shape}"
    assert not (spec.copies and c), f"{name}: copies along axis {c}"
    total = sum(_repeated(p)[c] for p in spec.parts) + spec.pad + spec.copies
    assert total == spec.shape[c], f"{name}: parts give {total}, not {spec.shape}"


def pieces(spec: ParamSpec, index: Index) -> Iterator[ShardPiece]:
    """The pieces, in order, that fill the shard ``index`` (steps of 1) of ``spec``, but for its
    padding."""
    want = [range(*s.indices(n)) for s, n in zip(index, spec.shape, strict=True)]
    start = 0
    for part, extent in laid(spec):
        low = max(want[spec.concat].start, start)
        high = min(want[spec.concat].stop, start + extent)
        if low < high:
            rows = [slice(w.start, w.stop) for w in want]
            out = [slice(0, len(w)) for w in want]
            rows[spec.concat] = slice(low - start, high - start)
            begin = want[spec.concat].start
            out[spec.concat] = slice(low - begin, high - begin)
            yield ShardPiece(part=part, rows=tuple(rows), out=tuple(out))
        start += extent


def laid(spec: ParamSpec) -> Iterator[tuple[Part, int]]:
    """Each part and the entries of it along ``concat``, one after the other; those that are repeated come again, the
    last one as far as it is."""
    left = spec.copies
    extents = [(part, _repeated(part)[spec.concat]) for part in spec.parts]
    yield from extents
    for part, extent in extents:
        if left > 0:
            yield part, min(extent, left)
        left -= extent


def shard_shape(spec: ParamSpec, index: Index) -> tuple[int, ...]:
    """The shape of one shard of a parameter."""
    return tuple(len(range(*s.indices(n))) for s, n in zip(index, spec.shape, strict=True))


def whole(spec: ParamSpec) -> Index:
    """The index of all of a parameter."""
    return tuple(slice(0, n) for n in spec.shape)


def split(spec: ParamSpec, array: Any, concatenate: Any = np.concatenate) -> dict[str, Any]:
    """The checkpoint tensors inside a parameter (repeats and padding dropped): the inverse of
    ``join``."""
    found: dict[str, list[Any]] = {}
    start = 0
    for part in spec.parts:
        extent = _repeated(part)[spec.concat]
        at = tuple(
            slice(start, start + extent) if d == spec.concat else slice(None)
            for d in range(len(spec.shape))
        )
        rows = _unseen(part, array[at][:: part.repeat], concatenate)
        found.setdefault(part.name, []).append(rows)
        start += extent
    return {
        name: rows[0] if len(rows) == 1 else concatenate(rows, axis=0)
        for name, rows in found.items()
    }


def _unseen(part: Part, seen: Any, concatenate: Any) -> Any:
    """The rows of the tensor that the part's entries come from; zeros where others read them."""
    if not part.cut:
        return seen.reshape(part.n_rows, *part.shape[1:])
    order = part.order or tuple(range(len(part.cut)))
    shape = [part.cut[axis] for axis in order]
    if part.within is not None:
        first, end = part.within
        around = [(shape[0], n, *shape[2:]) for n in (first, shape[1] - end)]
        before, after = (np.zeros(s, seen.dtype) for s in around)
        seen = seen.reshape(shape[0], end - first, *shape[2:])
        seen = concatenate([before, seen, after], axis=1)
    back = [order.index(axis) for axis in range(len(order))]
    return seen.reshape(shape).transpose(back).reshape(part.shape)


def join(spec: ParamSpec, tensors: Mapping[str, Any], concatenate: Any = np.concatenate) -> Any:
    """The parameter out of its checkpoint tensors. ``concatenate`` is numpy's or jax.numpy's."""
    cuts = [p.cut(tensors[p.part.name]) for p in pieces(spec, whole(spec))]
    if spec.pad:
        c = spec.concat
        zeros = (*spec.shape[:c], spec.pad, *spec.shape[c + 1 :])
        cuts.append(np.zeros(zeros, cuts[0].dtype))
    return cuts[0] if len(cuts) == 1 else concatenate(cuts, axis=spec.concat)


def relayout(array: Any, src: ParamSpec, dst: ParamSpec, concatenate: Any = np.concatenate) -> Any:
    """The parameter ``array``, laid out by ``src``, as ``dst`` lays it out (heads repeated, the
    vocabulary padded)."""
    return join(dst, split(src, array, concatenate), concatenate)


def _repeated(part: Part) -> tuple[int, ...]:
    return (part.view[0] * part.repeat, *part.view[1:])
