"""Looks into a model: what each layer would say next (the logit lens), and a steering vector from two sets of prompts.

The vector is the difference of the mean residual streams at the last token of both sets, in the middle of the model;
added to the stream of another prompt, it moves that prompt's next token.

python examples/probe.py [MODEL]
"""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from jserve import functional
from jserve.text.tokenizer import load_tokenizer

SHIPPED = Path(__file__).parent.parent / "checkpoints" / "jserve-mini"
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SUMS = [f"What is {a} + {b}?" for a, b in ((3, 4), (12, 5), (7, 9), (20, 6))]
FACTS = [
    "What colour is grass?",
    "What colour is snow?",
    "Who are you?",
    "How many days are in a week?",
]
PROMPT = "What is 8 + 5?"
SCALES = (0.0, 2.0, 4.0)


def main(model_dir: str = str(SHIPPED)) -> None:
    model = functional.model(model_dir)
    params = functional.load_params(model, model_dir)
    tokenizer = load_tokenizer(Path(model_dir))
    forward = jax.jit(partial(functional.forward, model), static_argnames="taps")
    lens = jax.jit(partial(functional.lens, model))
    middle = f"blocks.{model.arch.L // 2}.hook_resid_pre"

    def last(prompt: str, *taps: str, **more) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The last token's final hidden state, and its streams at ``taps``."""
        ids = tokenizer.encode(CHAT.format(prompt), add_special_tokens=False)
        tokens = jnp.array(ids + [0] * (64 - len(ids)))
        segments = jnp.where(jnp.arange(64) < len(ids), 0, -1)
        x_TD, found = forward(params, tokens, segments, taps=taps, **more)
        return x_TD[len(ids) - 1], {name: y_TD[len(ids) - 1] for name, y_TD in found.items()}

    posts = tuple(f"blocks.{i}.hook_resid_post" for i in range(model.arch.L))
    _, streams = last(PROMPT, *posts)
    for name in posts:
        scores = jax.nn.softmax(lens(params, streams[name][None])[0])
        best = jnp.argsort(-scores)[:3]
        words = ", ".join(f"{tokenizer.decode([int(i)])!r} {float(scores[i]):.2f}" for i in best)
        print(f"{name}: {words}")

    means = [
        sum(last(p, middle)[1][middle] for p in prompts) / len(prompts) for prompts in (FACTS, SUMS)
    ]
    vector = means[0] - means[1]
    for scale in SCALES:
        x_D, _ = last(PROMPT, middle, add={middle: scale * vector})
        scores = jax.nn.softmax(functional.unembed(model, params, x_D[None])[0])
        best = int(jnp.argmax(scores))
        print(f"steered by {scale:g}: {tokenizer.decode([best])!r} {float(scores[best]):.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
