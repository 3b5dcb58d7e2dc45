"""What drafters should draft, computed from the whole text anew, without pages, slots or buckets.

A guess function takes (tokens known, drafts so far along the path) and gives the logits of the next
draft; ``expected`` fills a tree from it as the device does for a greedy row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model import draft_tree as tree
from jserve.model.attention import backend
from jserve.model.ctx import Ctx
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.norms import rms_norm
from jserve.model.points import entering
from jserve.model.rope import rope_tables, rotate
from jserve.model.shard import Axes
from jserve.model.slots import empty
from jserve.model.view import buffer_size, layout, numpy_views, unpack
from tests.runner import whole
from tests.runner.harness import ARCH
from tests.runner.whole import BUCKET, DIMS
from tests.speculation.device.drafters import HEAD, TAPS

Guess = Callable[[Seq[int], Seq[int]], np.ndarray]


def expected(guess: Guess, tokens: Seq[int], parents: tuple[int, ...]) -> list[int]:
    """The drafts of a greedy row after ``tokens``, in the order of the tree's nodes."""
    found = [0] * (1 + len(parents))
    for node in range(len(found)):
        children = tree.children(parents, node)
        if children:
            drafts = [found[n] for n in tree.paths(parents)[node]]
            best = np.argsort(-guess(tokens, drafts), kind="stable")
            for child, token in zip(children, best, strict=False):
                found[child] = int(token)
    return found[1:]


def of_model(params: Any) -> Guess:
    """The tiny llama with these weights as a draft model."""
    return lambda tokens, drafts: whole.next_logits(params, [*tokens, *drafts])


def of_medusa(target: Any, params: Any) -> Guess:
    def guess(tokens: Seq[int], drafts: Seq[int]) -> np.ndarray:
        x_D = hidden(target, tokens[:-1])[0][-1]
        head = params["heads"][len(drafts)]
        for block in head["blocks"]:
            y_D = block["linear"] @ x_D + block["bias"]
            x_D = x_D + y_D * jax.nn.sigmoid(y_D)
        return np.asarray(head["unembed"] @ x_D)

    return guess


def of_eagle(target: Any, params: Any) -> Guess:
    """Entries one after the other, each attending to all before it."""

    def guess(tokens: Seq[int], drafts: Seq[int]) -> np.ndarray:
        taps = hidden(target, tokens[:-1])[1]
        f_SD = np.concatenate(taps, axis=1) @ np.asarray(params["fc"]).T
        nexts = [*tokens[1:], *drafts]
        keys, values = [], []
        h_D = f_SD[-1]
        for p, token in enumerate(nexts):
            f_D = f_SD[p] if p < len(f_SD) else h_D
            h_D = _entry(params, np.asarray(target["embed"])[token], f_D, p, keys, values)
        y_D = np.asarray(rms_norm(jnp.asarray(h_D), params["norm"], HEAD.norm.eps))
        logits_V = np.full(ARCH.V, -np.inf)
        at_V = np.arange(HEAD.V) + np.asarray(params["d2t"])
        logits_V[at_V] = np.asarray(params["unembed"]) @ y_D
        return logits_V

    return guess


def _entry(
    params: Any, e_D: np.ndarray, f_D: np.ndarray, p: int, keys: list, values: list
) -> np.ndarray:
    layer = jax.tree.map(np.asarray, params["layer"])
    eps, (K, G, H) = HEAD.norm.eps, (HEAD.K, HEAD.N // HEAD.K, HEAD.H)
    x = np.concatenate(
        [_norm(e_D, layer["embed_norm"], eps), _norm(f_D, layer["hidden_norm"], eps)]
    )
    y_KGH = np.einsum("kghx,x->kgh", layer["qkv"], x)
    tables = rope_tables(HEAD.ropes[0], H, jnp.array([p]))
    q = np.asarray(rotate(jnp.asarray(y_KGH[:, :G].reshape(1, K * G, H)), *tables))
    keys.append(np.asarray(rotate(jnp.asarray(y_KGH[:, G][None]), *tables))[0])
    values.append(y_KGH[:, G + 1])
    score = np.einsum("kgh,skh->kgs", q.reshape(K, G, H), np.stack(keys)) * H**-0.5
    weight = np.exp(score - score.max(-1, keepdims=True))
    o = np.einsum("kgs,skh->kgh", weight / weight.sum(-1, keepdims=True), np.stack(values))
    h_D = f_D + layer["o"] @ o.reshape(-1)
    gate, up = layer["gate_up"] @ _norm(h_D, layer["mlp_norm"], eps)
    return h_D + layer["down"] @ (gate / (1 + np.exp(-gate)) * up)


def _norm(x_D: np.ndarray, weight_D: np.ndarray, eps: float) -> np.ndarray:
    return x_D / np.sqrt(np.mean(x_D * x_D) + eps) * weight_D


@lru_cache(maxsize=1)
def _tapped() -> Any:
    attn = backend("ref")
    fields = layout(BUCKET, DIMS, attn.plan_shapes(BUCKET, DIMS))

    def run(params: Any, buf: jax.Array) -> Any:
        view = unpack(buf, fields, BUCKET, DIMS, empty(1, ARCH.V))
        shape = attn.kv_shape(ARCH.K, ARCH.H, 17, DIMS.Z)
        kv = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(ARCH.L)]
        assert LLAMA.tapped is not None
        points = [entering(i, ARCH.L) for i in TAPS]
        x_TD, _, taps = LLAMA.tapped(Ctx.of(ARCH, view, attn, Axes()), params, kv, points)
        return x_TD, taps

    return jax.jit(run), fields


def hidden(params: Any, tokens: Seq[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The target's last hidden states and its taps, float32[len(tokens), D] each."""
    run, fields = _tapped()
    buf, n = np.zeros(buffer_size(fields), np.int32), len(tokens)
    v = numpy_views(buf, fields)
    v["row_T"][:] = BUCKET.R
    v["row_T"][:n], v["tok_T"][:n] = 0, tokens
    v["count_R"][0], v["emit_R"][0], v["n_prefill"][...] = n, 1, 1
    v["page_table_RM"][0] = 1 + np.arange(DIMS.M)
    x_TD, taps = run(params, buf)
    return np.asarray(x_TD)[:n], [np.asarray(x)[:n] for x in taps]
