"""Trees of drafts: their arithmetic against brute force, and attention under their mask."""

from __future__ import annotations

import dataclasses
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.kv_layout import Span
from jserve.model import draft_tree as tree
from jserve.model.attention import AttendArgs, backend
from jserve.model.hand import Row, pack
from jserve.model.slots import empty
from jserve.model.view import Bucket, StepDims, layout, unpack
from jserve.speculation.device.accepted_path import as_chain, straightened
from jserve.speculation.device.verify import accept, accept_tree

SHAPES = [(0,), (0, 0), (0, 1, 2), (0, 0, 1, 1, 2), (0, 0, 0, 1, 2, 2, 4, 5), (0, 1, 0, 2, 3, 3)]


def passes(parents: tuple[int, ...], token: list[int], drawn: list[int], count: int) -> list[int]:
    """The nodes that stand, by walking."""
    path = [0]
    while True:
        children = [c for c in tree.children(parents, path[-1]) if c < count]
        fit = [c for c in children if token[c] == drawn[path[-1]]]
        if not fit:
            return path
        path.append(fit[0])


@pytest.mark.parametrize("parents", SHAPES, ids=str)
def test_the_path_is_the_one_that_a_walk_takes(parents: tuple[int, ...]) -> None:
    rng, J = np.random.default_rng(0), 1 + len(parents)
    token_RJ, drawn_RJ = rng.integers(0, 3, (2, 500, J))
    count_R = rng.integers(1, J + 1, 500)
    args = (jnp.asarray(x, jnp.int32) for x in (token_RJ, drawn_RJ, count_R))
    accepted = jax.jit(partial(accept_tree, mask=tree.mask_of(parents)))(*args)
    n_ok_R, path_RJ = map(np.asarray, accepted)
    for r in range(500):
        want = passes(parents, token_RJ[r].tolist(), drawn_RJ[r].tolist(), count_R[r])
        assert path_RJ[r, : n_ok_R[r]].tolist() == want
        assert path_RJ[r, n_ok_R[r] :].tolist() == list(range(n_ok_R[r], J))


def test_a_chain_is_accepted_as_a_tree_that_is_one() -> None:
    rng = np.random.default_rng(1)
    args = [jnp.asarray(rng.integers(0, 2, (300, 4)), jnp.int32) for _ in range(2)]
    count_R = jnp.asarray(rng.integers(1, 5, 300), jnp.int32)
    as_tree = jax.jit(partial(accept_tree, mask=tree.mask_of(tree.chain(3))))
    n_ok_R, path_RJ = as_tree(*args, count_R)
    np.testing.assert_array_equal(n_ok_R, jax.jit(accept)(*args, count_R))
    np.testing.assert_array_equal(path_RJ, np.tile(np.arange(4), (300, 1)))


def test_a_node_before_its_parent_is_refused() -> None:
    tree.check((0, 0, 2))
    for wrong in ((1,), (0, 2), (0, -1)):
        with pytest.raises(ConfigError, match="parent"):
            tree.check(wrong)


DIMS = StepDims(C=4, M=6, Z=8, V=50)
K, G, H = 2, 2, 8
PAGES = 20


@lru_cache
def _view_of(name: str, bucket: Bucket) -> Any:
    """The view that a buffer is, for use under jit."""
    fields = layout(bucket, DIMS, backend(name).plan_shapes(bucket, DIMS))
    return lambda buf: unpack(buf, fields, bucket, DIMS, empty(DIMS.C, DIMS.V))


@lru_cache
def _write(name: str, bucket: Bucket) -> Any:
    attn, view_of = backend(name), _view_of(name, bucket)
    return jax.jit(lambda buf, kv, k, v: attn.write_kv(kv, k, v, view_of(buf)))


@lru_cache
def _attend(name: str, bucket: Bucket, span: Span) -> Any:
    """(attention as a tree, the KV as a chain along the path, attention along that chain)"""
    attn, view_of = backend(name), _view_of(name, bucket)

    def attend(buf: Any, q: Any, kv: Any, q_chain: Any, path: Any) -> Any:
        view = view_of(buf)
        args = AttendArgs(q_TNH=q, window=span.window, chunk=span.chunk, scale=0.3)
        seen = attn.attend(args, kv, view)
        moved = straightened(attn, view, [kv], path)[0]
        chain = as_chain(view, path)
        return seen, attn.attend(dataclasses.replace(args, q_TNH=q_chain), moved, chain)

    return jax.jit(attend)


@lru_cache
def attended(name: str, parents: tuple[int, ...], span: Span) -> tuple[Any, Any, np.ndarray]:
    """((queries, attention) of two rows with a tree each, the same with the KV moved along 0 -> its last
    node, keys and values of all places)."""
    J, attn = 1 + len(parents), backend(name)
    bucket = Bucket(D=2, P=0, F=0, J=J, tree=parents)
    rows = [Row([3, 7, 2, 9, 5, 1], 13, [4] * J), Row([11, 4, 8, 6, 12, 10], 6, [4] * (J - 1))]
    shape = attn.kv_shape(K, H, PAGES, DIMS.Z)
    rng = np.random.default_rng(2)
    x_NKH = rng.standard_normal((2, 2, 48, K, H)).astype(np.float32)
    kv = (jnp.full(shape, jnp.nan), jnp.full(shape, jnp.nan))
    for r, row in enumerate(rows):  # the context, then the drafts at their places
        context = Bucket(D=0, P=48, F=1)
        before = Row(row.pages, 0, [1] * row.start, slot=r)
        buf = pack(context, DIMS, attn, [], [before])
        kv = _write(name, context)(buf, kv, x_NKH[0, r], x_NKH[1, r])
    at_TKH = [
        np.stack([x_NKH[i, r, row.start + j] for r, row in enumerate(rows) for j in range(J)])
        for i in range(2)
    ]
    buf = pack(bucket, DIMS, attn, rows, [])
    kv = _write(name, bucket)(buf, kv, *at_TKH)
    q, q_chain = rng.standard_normal((2, 2 * J, K * G, H)).astype(np.float32)
    o, o_chain = _attend(name, bucket, span)(buf, q, kv, q_chain, _path(parents))
    return (q, np.asarray(o)), (q_chain, np.asarray(o_chain)), x_NKH


def _path(parents: tuple[int, ...]) -> np.ndarray:
    """int32[2, J]: of both rows, from 0 to the last node."""
    J = 1 + len(parents)
    return np.array([[*(0, *tree.paths(parents)[-1]), *range(9)][:J]] * 2, np.int32)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("span", [Span(), Span(window=5), Span(chunk=7)], ids=str)
@pytest.mark.parametrize("name", ["ref", "xla", "dense"])
@pytest.mark.parametrize("parents", SHAPES[3:5], ids=str)
def test_a_node_sees_the_context_and_its_ancestors(
    parents: tuple[int, ...], name: str, span: Span
) -> None:
    (q, o), _, x_NKH = attended(name, parents, span)
    J = 1 + len(parents)
    depth, path = tree.depths(parents), tree.paths(parents)
    for r, start, count in ((0, 13, J), (1, 6, J - 1)):
        for j in range(count):
            at = [*range(start), *(start + x for x in (0, *path[j]))]
            pos = [*range(start), *(start + depth[x] for x in (0, *path[j]))]
            own = start + depth[j]
            low = own - own % span.chunk if span.chunk else own + 1 - (span.window or own + 1)
            seen = [a for a, p in zip(at, pos, strict=True) if p >= low]
            k, v = x_NKH[0, r, seen], x_NKH[1, r, seen]
            for n in range(K * G):
                score = k[:, n // G] @ q[r * J + j, n] * 0.3
                p = np.exp(score - score.max())
                want = (p / p.sum()) @ v[:, n // G]
                np.testing.assert_allclose(o[r * J + j, n], want, atol=2e-6)


@pytest.mark.parametrize("name", ["ref", "xla", "dense"])
def test_the_path_that_stands_lies_as_a_chain(name: str) -> None:
    parents = SHAPES[4]
    _, (q, got), x_NKH = attended(name, parents, Span())
    path, J = _path(parents), 1 + len(parents)
    n = 1 + len(tree.paths(parents)[-1])
    for r, start in ((0, 13), (1, 6)):
        for j in range(n - (r == 1)):  # the second row lacks the last node
            at = [*range(start), *(start + int(x) for x in path[r, : j + 1])]
            k, v = x_NKH[0, r, at], x_NKH[1, r, at]
            score = np.einsum("skh,kgh->kgs", k, q[r * J + j].reshape(K, G, H)) * 0.3
            p = np.asarray(jax.nn.softmax(score, axis=-1))
            want = np.einsum("kgs,skh->kgh", p, v).reshape(K * G, H)
            np.testing.assert_allclose(got[r * J + j], want, atol=2e-6)
