"""Trees of drafts: their arithmetic against brute force, and attention under their mask."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.model import draft_tree
from jserve.model.attention import AttendArgs, backend
from jserve.model.hand import Row, pack
from jserve.model.slots import empty
from jserve.model.view import Bucket, StepDims, layout, unpack
from jserve.speculation.device.accepted_path import as_chain, straightened
from jserve.speculation.device.verify import accept, accept_tree
from jserve.types import Grown

SHAPES = [(0,), (0, 0), (0, 1, 2), (0, 0, 1, 1, 2), (0, 0, 0, 1, 2, 2, 4, 5), (0, 1, 0, 2, 3, 3)]


def passes(parents: tuple[int, ...], token: list[int], drawn: list[int], count: int) -> list[int]:
    """The nodes that stand, by walking."""
    path = [0]
    while True:
        children = [c for c in draft_tree.children(parents, path[-1]) if c < count]
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
    accepted = jax.jit(partial(accept_tree, mask=draft_tree.mask_of(parents)))(*args)
    n_ok_R, path_RJ = map(np.asarray, accepted)
    for r in range(500):
        want = passes(parents, token_RJ[r].tolist(), drawn_RJ[r].tolist(), count_R[r])
        assert path_RJ[r, : n_ok_R[r]].tolist() == want
        assert path_RJ[r, n_ok_R[r] :].tolist() == list(range(n_ok_R[r], J))


def random_parents(n_rows: int, n: int) -> np.ndarray:
    """int32[n_rows, n]: any trees, chains and stars among them."""
    rng = np.random.default_rng(7)
    found = np.stack([rng.integers(0, np.arange(1, n + 1)) for _ in range(n_rows)])
    found[0], found[1] = np.arange(n), 0
    return found.astype(np.int32)


@pytest.mark.parametrize("n", [1, 2, 5, 15])
def test_trees_that_grew_are_trees(n: int) -> None:
    """The masks of many rows, each with a tree of its own, say what those of each tree say."""
    parent_DN = random_parents(40, n)
    masks = jax.jit(draft_tree.masks_of)(parent_DN)
    path_DJN, parent_DJ = (np.asarray(f(masks)) for f in (draft_tree.path_to, draft_tree.parent_of))
    for r, row in enumerate(parent_DN.tolist()):
        one = draft_tree.mask_of(tuple(row))
        np.testing.assert_array_equal(masks.sees_DJX[r], one.sees_DJX[0])
        np.testing.assert_array_equal(masks.depth_DX[r], draft_tree.depths(tuple(row)))
        assert parent_DJ[r].tolist() == [0, *row]
        for node, path in enumerate(draft_tree.paths(tuple(row))):
            assert [x for x in path_DJN[r, node].tolist() if x] == list(path)


def test_the_path_of_a_tree_that_grew_is_the_one_that_a_walk_takes() -> None:
    rng, n = np.random.default_rng(0), 7
    parent_DN = random_parents(500, n)
    token_RJ, drawn_RJ = rng.integers(0, 3, (2, 500, 1 + n)).astype(np.int32)
    count_R = rng.integers(1, 2 + n, 500).astype(np.int32)
    masks = draft_tree.masks_of(jnp.asarray(parent_DN))
    n_ok_R, path_RJ = map(np.asarray, accept_tree(token_RJ, drawn_RJ, count_R, masks))
    for r, row in enumerate(parent_DN.tolist()):
        want = passes(tuple(row), token_RJ[r].tolist(), drawn_RJ[r].tolist(), count_R[r])
        assert path_RJ[r, : n_ok_R[r]].tolist() == want
        assert path_RJ[r, n_ok_R[r] :].tolist() == list(range(n_ok_R[r], 1 + n))


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("first", [0, 3])
def test_rows_with_trees_of_their_own_see_what_each_would_alone(window: int, first: int) -> None:
    """All nodes of a tree, or those from ``first`` on beside the others' places."""
    n, n_rows = 6, 9
    parent_DN = random_parents(n_rows, n)
    whole = draft_tree.masks_of(jnp.asarray(parent_DN))
    masks = draft_tree.RowMasks(whole.sees_DJX[:, first:], whole.depth_DX)
    order_W = np.random.default_rng(3).permutation(n_rows)
    start_W = 5 + first + order_W
    pos_WS = (order_W % 4)[:, None] + np.arange(24)
    seen = draft_tree.seen_in_tree(masks.rows(order_W), start_W, pos_WS, window)
    for w, r in enumerate(order_W):
        one = draft_tree.mask_of(tuple(parent_DN[r].tolist()))
        one = draft_tree.DraftMask(one.sees[first:], one.depth)
        want = draft_tree.seen_in_tree(one, start_W[w : w + 1], pos_WS[w : w + 1], window)
        np.testing.assert_array_equal(seen[w], want[0])


def test_a_chain_is_accepted_as_a_tree_that_is_one() -> None:
    rng = np.random.default_rng(1)
    args = [jnp.asarray(rng.integers(0, 2, (300, 4)), jnp.int32) for _ in range(2)]
    count_R = jnp.asarray(rng.integers(1, 5, 300), jnp.int32)
    n_ok_R, path_RJ = accept_tree(*args, count_R, draft_tree.mask_of(draft_tree.chain(3)))
    np.testing.assert_array_equal(n_ok_R, accept(*args, count_R))
    np.testing.assert_array_equal(path_RJ, np.tile(np.arange(4), (300, 1)))


def test_a_node_before_its_parent_is_refused() -> None:
    draft_tree.check((0, 0, 2))
    for wrong in ((1,), (0, 2), (0, -1)):
        with pytest.raises(ConfigError, match="parent"):
            draft_tree.check(wrong)


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
def _attend(name: str, bucket: Bucket, window: int) -> Any:
    """(attention as a tree, the KV as a chain along the path, attention along that chain)"""
    attn, view_of = backend(name), _view_of(name, bucket)

    def attend(buf: Any, q: Any, kv: Any, q_chain: Any, path: Any) -> Any:
        view = view_of(buf)
        seen = attn.attend(AttendArgs(q_TNH=q, window=window, scale=0.3), kv, view)
        moved = straightened(attn, view, [kv], path)[0]
        chain = as_chain(view, path)
        return seen, attn.attend(AttendArgs(q_TNH=q_chain, window=window, scale=0.3), moved, chain)

    return jax.jit(attend)


@lru_cache
def attended(name: str, parents: tuple[int, ...], window: int) -> tuple[Any, Any, np.ndarray]:
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
    o, o_chain = _attend(name, bucket, window)(buf, q, kv, q_chain, _path(parents))
    return (q, np.asarray(o)), (q_chain, np.asarray(o_chain)), x_NKH


def _path(parents: tuple[int, ...]) -> np.ndarray:
    """int32[2, J]: of both rows, from 0 to the last node."""
    J = 1 + len(parents)
    return np.array([[*(0, *draft_tree.paths(parents)[-1]), *range(9)][:J]] * 2, np.int32)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("name", ["ref", "xla"])
@pytest.mark.parametrize("parents", SHAPES[3:5], ids=str)
def test_a_node_sees_the_context_and_its_ancestors(
    parents: tuple[int, ...], name: str, window: int
) -> None:
    (q, o), _, x_NKH = attended(name, parents, window)
    J = 1 + len(parents)
    depth, path = draft_tree.depths(parents), draft_tree.paths(parents)
    for r, start, count in ((0, 13, J), (1, 6, J - 1)):
        for j in range(count):
            at = [*range(start), *(start + x for x in (0, *path[j]))]
            pos = [*range(start), *(start + depth[x] for x in (0, *path[j]))]
            seen = [
                a
                for a, p in zip(at, pos, strict=True)
                if not window or p > start + depth[j] - window
            ]
            k, v = x_NKH[0, r, seen], x_NKH[1, r, seen]
            for n in range(K * G):
                score = k[:, n // G] @ q[r * J + j, n] * 0.3
                p = np.exp(score - score.max())
                want = (p / p.sum()) @ v[:, n // G]
                np.testing.assert_allclose(o[r * J + j, n], want, atol=2e-6)


def test_rows_attend_by_the_trees_of_their_slots() -> None:
    """Rows of falling and rising lengths, each with the tree that its slot holds: positions follow its
    depths, and both backends see the same."""
    J, starts, slots = 7, (13, 30, 6, 21), (2, 0, 3, 1)
    bucket, parent_CJ = Bucket(D=4, P=0, F=0, J=J, tree=Grown(6, 4, 2)), random_parents(4, 6)
    rows = [
        Row(list(range(1 + 5 * r, 6 + 5 * r)), start, [4] * J, slot=slot)
        for r, (start, slot) in enumerate(zip(starts, slots, strict=True))
    ]
    held = replace(empty(4, DIMS.V, 6, grown=True), parent_CJ=jnp.asarray(parent_CJ))
    rng, found = np.random.default_rng(5), []
    k, v = rng.standard_normal((2, 21, DIMS.Z, K, H)).astype(np.float32)
    q = rng.standard_normal((4 * J, K * G, H)).astype(np.float32)
    for name in ("ref", "xla"):
        attn = backend(name)
        fields = layout(bucket, DIMS, attn.plan_shapes(bucket, DIMS))
        view = unpack(jnp.asarray(pack(bucket, DIMS, attn, rows, [])), fields, bucket, DIMS, held)
        kv = tuple(jnp.asarray(x if name == "ref" else x.swapaxes(1, 2)) for x in (k, v))
        found.append(
            np.asarray(attn.attend(AttendArgs(q_TNH=jnp.asarray(q), window=0, scale=0.3), kv, view))
        )
        for r, (start, slot) in enumerate(zip(starts, slots, strict=True)):
            depth = np.array(draft_tree.depths(tuple(parent_CJ[slot].tolist())))
            np.testing.assert_array_equal(view.pos_T[r * J : (r + 1) * J], start + depth)
    np.testing.assert_allclose(*found, atol=2e-6)


@pytest.mark.parametrize("name", ["ref", "xla"])
def test_the_path_that_stands_lies_as_a_chain(name: str) -> None:
    parents = SHAPES[4]
    _, (q, got), x_NKH = attended(name, parents, 0)
    path, J = _path(parents), 1 + len(parents)
    n = 1 + len(draft_tree.paths(parents)[-1])
    for r, start in ((0, 13), (1, 6)):
        for j in range(n - (r == 1)):  # the second row lacks the last node
            at = [*range(start), *(start + int(x) for x in path[r, : j + 1])]
            k, v = x_NKH[0, r, at], x_NKH[1, r, at]
            score = np.einsum("skh,kgh->kgs", k, q[r * J + j].reshape(K, G, H)) * 0.3
            p = np.asarray(jax.nn.softmax(score, axis=-1))
            want = np.einsum("kgs,skh->kgh", p, v).reshape(K * G, H)
            np.testing.assert_allclose(got[r * J + j], want, atol=2e-6)
