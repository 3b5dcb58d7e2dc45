"""How often the first draft of a step is accepted, exactly, under ways to couple drafter and target.

No draws and no engine: the distributions of target and drafter for each token of held-out answers, and of these the
chance that both choose the same token (means over tokens). The first draft of a draft model is the token that the
target draws next, that of a head the one after:

* ``gumbel``: both add the same noise to their logits and take the largest, as jserve does;
* ``inverse``: both invert their cumulative distribution at the same two uniform numbers, one for a block of ids,
  one within it, as jserve did before;
* ``rejection``: 1 - TV, TV being the total variation distance: what rejection sampling accepts, and the most that
  any coupling can.

    python -m bench.coupling [--methods draft,eagle3,medusa] [--temperatures 0.7,1] [--requests 6] [--json F]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import probe
from bench.speculation import HEADS
from checkpoints.recipe.chat import prompt_and_answer
from checkpoints.recipe.skills import dialogue, extract, story, tools
from jserve import build, functional
from jserve.config import EngineConfig
from jserve.functional import FunctionalModel
from jserve.model.attn_train import train
from jserve.model.mesh import make_mesh
from jserve.model.points import entering
from jserve.model.shard import Axes, ShardRules
from jserve.speculation.drafters.drafter import Seen, Target
from jserve.speculation.drafters.load import find_drafter
from jserve.weights.source import resolve

SKILLS = {"dialogue": dialogue, "json": extract, "tools": tools, "free": story}
METHODS = ("draft", "eagle3", "medusa")
Drafts = Callable[[jax.Array], jax.Array]
"""int32[T] tokens -> float32[T, V]: the logits that the drafter draws the token by that the target draws after t."""
BLOCK = 64
"""Ids of a block of ``inverse``."""


def gumbel(p_V: np.ndarray, q_V: np.ndarray) -> float:
    """The sum over i of 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    kept = (p_V > 0) & (q_V > 0)
    p_I, q_I = p_V[kept, None], q_V[kept, None]
    return float((1 / np.maximum(p_V / p_I, q_V / q_I).sum(1)).sum())


def one_number(p_N: np.ndarray, q_N: np.ndarray) -> np.ndarray:
    """float[N]: for each, the share of [0, 1) in which both cumulative distributions give it."""
    p_end_N, q_end_N = np.cumsum(p_N), np.cumsum(q_N)
    begin_N = np.maximum(p_end_N - p_N, q_end_N - q_N)
    return np.maximum(0.0, np.minimum(p_end_N, q_end_N) - begin_N)


def inverse(p_V: np.ndarray, q_V: np.ndarray) -> float:
    """Two stages: the same block, then the same id of it."""
    p_NB, q_NB = (np.pad(x_V, (0, -len(x_V) % BLOCK)).reshape(-1, BLOCK) for x_V in (p_V, q_V))
    p_N, q_N = p_NB.sum(1), q_NB.sum(1)
    same_N = one_number(p_N, q_N)
    within = [
        one_number(p_NB[n] / p_N[n], q_NB[n] / q_N[n]).sum() if same_N[n] else 0.0
        for n in range(len(same_N))
    ]
    return float(same_N @ np.array(within))


def rejection(p_V: np.ndarray, q_V: np.ndarray) -> float:
    return float(np.minimum(p_V, q_V).sum())


COUPLINGS = {"gumbel": gumbel, "inverse": inverse, "rejection": rejection}


def answers(n: int) -> Iterator[tuple[list[int], int]]:
    """Held-out chats as ids, and how many of them are the prompt."""
    tokenizer = build.text_side(EngineConfig()).tokenizer
    for skill in SKILLS.values():
        rng = np.random.default_rng(0)
        for _ in range(n):
            prompt, answer = map(tokenizer.encode, prompt_and_answer(skill.generate(rng, "test")))
            yield [*prompt, *answer], len(prompt)


def draft_model() -> Drafts:
    """Of the shipped draft model."""
    path = HEADS / "jserve-mini-draft"
    model = functional.model(path)
    params = functional.load_params(model, path)
    return lambda tokens_T: functional.logits(model, params, tokens_T, jnp.zeros_like(tokens_T))


def head(method: str, model: FunctionalModel, params: Any) -> Drafts:
    """Of the shipped head of ``method``, as the engine computes it: entry t has seen the target's hidden states up to
    t - 1, and token t. Entry 0 means nothing."""
    found = find_drafter(method, resolve(str(HEADS / f"jserve-mini-{method}")), model.arch)
    drafter, arch, axes = found.drafter, model.arch, Axes()
    own = found.loaded(make_mesh(1), ShardRules(), jnp.float32)
    assert drafter.observe is not None, "it has weights"
    assert drafter.logits is not None
    observe, logits_of = drafter.observe, drafter.logits
    taps = [entering(layer, arch.L) for layer in drafter.taps]

    def logits(tokens_T: jax.Array) -> jax.Array:
        T, segments_T = len(tokens_T), jnp.zeros_like(tokens_T)
        if taps:
            x_TD, read = functional.forward(model, params, tokens_T, segments_T, taps=taps)
        else:
            x_TD, read = functional.forward(model, params, tokens_T, segments_T), {}
        view = functional.flat_view(tokens_T, segments_T)
        pad = len(view.tok_T) - T
        wide = lambda y_TD: jnp.pad(y_TD, ((0, pad), (0, 0)))  # noqa: E731
        seen = Seen(
            view=view,
            next_T=jnp.pad(tokens_T[1:], (0, pad + 1)),
            x_TD=wide(x_TD),
            taps=[wide(read[tap]) for tap in taps],
            last_R=jnp.arange(T),
        )
        family = model.family
        of = Target(
            arch=arch,
            params=params,
            embedding=family.embed,
            unembedding=family.logits,
            attn=train(T),
            axes=axes,
        )
        kv = functional.unkept(drafter.kv_layers, len(view.tok_T), model.dtype)
        carry_TX, _ = observe(of, own, seen, kv, axes)
        return jnp.roll(logits_of(of, own, carry_TX, 0, axes), 1, axis=0)

    return logits


def drafts_of(method: str, model: FunctionalModel, params: Any) -> Drafts:
    return draft_model() if method == "draft" else head(method, model, params)


def measure(
    methods: tuple[str, ...], temperatures: tuple[float, ...], n: int
) -> list[dict[str, Any]]:
    """A line for each method and temperature."""
    model = functional.model(build.shipped())
    params = functional.load_params(model, build.shipped())
    texts = [*answers(n)]
    longest = max(len(ids) for ids, _ in texts)
    logits_of = jax.jit(lambda tokens_T: functional.logits(model, params, tokens_T, 0 * tokens_T))
    lines = []
    for method in methods:
        drafts, rows = jax.jit(drafts_of(method, model, params)), []
        for ids, n_prompt in texts:
            tokens_T = jnp.array(ids + [0] * (longest - len(ids)))  # nothing sees what follows it
            of_target, of_draft = (
                np.asarray(of(tokens_T), np.float64)[n_prompt - 1 : len(ids) - 1]
                for of in (logits_of, drafts)
            )
            rows += zip(of_target, of_draft, strict=True)
        lines += [{"method": method} | _line(rows, temperature) for temperature in temperatures]
    return lines


def _line(rows: list[tuple[np.ndarray, np.ndarray]], temperature: float) -> dict[str, Any]:
    pairs = [(_softmax(x_V / temperature), _softmax(y_V / temperature)) for x_V, y_V in rows]
    means = {name: np.mean([of(*pair) for pair in pairs]) for name, of in COUPLINGS.items()}
    about = {"temperature": temperature, "tokens": len(rows)}
    return about | {name: round(float(mean), 4) for name, mean in means.items()}


def _softmax(x_V: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.softmax(jnp.asarray(x_V, jnp.float32)), np.float64)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.coupling", description=(__doc__ or "").split("\n")[0]
    )
    many = lambda text: tuple(map(float, text.split(",")))  # noqa: E731
    words = lambda text: tuple(text.split(","))  # noqa: E731
    parser.add_argument("--methods", type=words, default=METHODS)
    parser.add_argument("--temperatures", type=many, default=(0.7, 1.0))
    parser.add_argument("--requests", type=int, default=6, help="chats of each skill")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    lines = measure(args.methods, args.temperatures, args.requests)
    for line in lines:
        print(line)
    if args.json is not None:
        found = probe.record("coupling", {"requests": args.requests}, lines)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
