"""Reinforcement learning (GRPO) in one process: the engine samples, the trainer learns, the weights go back.

Sixteen sums of two digits, eight samples of each. An answer earns 1 if it is exactly right; the advantage of a sample
is its reward less the mean of its group, over its deviation. ``jserve.functional`` scores the same tokens with a
gradient, and its log-probabilities agree with those that the engine sampled by. optax is the only package beside
jserve.

python examples/grpo.py [MODEL] [UPDATES]
"""

import random
import re
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jserve import LLM, SamplingParams, functional

SHIPPED = Path(__file__).parent.parent / "checkpoints" / "jserve-mini"
PROMPT = "{a} + {b} = "
GROUPS, SAMPLES, MAX_TOKENS, PASSES, RATE, CLIP = 16, 8, 3, 2, 3e-4, 0.2
LONGEST = 16
"""Tokens of a prompt and an answer, at most."""
OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 256,
    "max_model_len": 128,
    "structured_outputs": False,
    "prompt_logprobs": False,
}


def main(model_dir: str = str(SHIPPED), updates: str = "20") -> None:
    model = functional.model(model_dir)
    params = functional.load_params(model, model_dir)
    optimizer = optax.adam(RATE)
    state = optimizer.init(params)
    train = jax.jit(partial(step, model, optimizer), donate_argnums=(0, 1))
    with LLM(model_dir, params=params, **OPTIONS) as llm:
        for i in range(int(updates)):
            reward, batch = rollout(llm, seed=i)
            drift = 0.0
            for _ in range(PASSES):
                params, state, off = train(params, state, batch)
                drift = drift or float(off)  # of the first pass, before anything moved
            llm.update_weights(params, version=str(i + 1))
            print(f"update {i + 1}: reward {reward:.3f}, log-probabilities differ by {drift:.1e}")
        reward, _ = rollout(llm, seed=int(updates))
        print(f"at the end: reward {reward:.3f}")


def rollout(llm: LLM, seed: int) -> tuple[float, dict[str, jax.Array]]:
    """(mean reward, a batch of samples laid one behind the other)."""
    digits = random.Random(0)
    sums = [(digits.randrange(1, 10), digits.randrange(1, 10)) for _ in range(GROUPS)]
    params = SamplingParams(
        temperature=1.0, max_tokens=MAX_TOKENS, n=SAMPLES, seed=seed, logprobs=0
    )
    prompts = [PROMPT.format(a=a, b=b) for a, b in sums]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    rewards = np.array(
        [
            [earned(c.text, a + b) for c in out.outputs]
            for out, (a, b) in zip(outputs, sums, strict=True)
        ]
    )
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    advantages /= rewards.std(axis=1, keepdims=True) + 1e-4
    return float(rewards.mean()), batch_of(outputs, advantages)


def earned(text: str, total: int) -> float:
    return float(re.match(rf"\s*{total}(?!\d)", text) is not None)


def batch_of(outputs: list, advantages: np.ndarray) -> dict[str, jax.Array]:
    """Arrays [T] over all tokens of all samples, padded to one length for one program."""
    T = GROUPS * SAMPLES * LONGEST
    batch = {
        "tokens": np.zeros(T, np.int32),
        "segments": np.full(T, -1, np.int32),
        "drawn": np.zeros(T, np.float32),
        "sampled": np.zeros(T, np.float32),
        "advantage": np.zeros(T, np.float32),
    }
    at = number = 0
    for out, group in zip(outputs, advantages, strict=True):
        for choice, advantage in zip(out.outputs, group, strict=True):
            ids = [*out.prompt_token_ids, *choice.token_ids]
            end, answer = at + len(ids), slice(at + len(out.prompt_token_ids), at + len(ids))
            batch["tokens"][at:end], batch["segments"][at:end] = ids, number
            batch["drawn"][answer], batch["advantage"][answer] = 1.0, advantage
            batch["sampled"][answer] = [
                entry[token].logprob
                for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)
            ]
            at, number = end, number + 1
    return {name: jnp.asarray(x) for name, x in batch.items()}


def step(model, optimizer, params, state, batch):
    """(parameters, optimizer state, largest difference of sampled and recomputed log-probabilities)."""
    drawn = batch["drawn"]

    def loss(params):
        new = functional.logprobs(
            model, params, batch["tokens"], batch["segments"], longest=LONGEST
        )
        ratio = jnp.exp((new - batch["sampled"]) * drawn)
        gain = batch["advantage"] * ratio
        clipped = batch["advantage"] * jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        drift = jnp.max(jnp.abs(new - batch["sampled"]) * drawn)
        return -(jnp.minimum(gain, clipped) * drawn).sum() / drawn.sum(), drift

    grads, drift = jax.grad(loss, has_aux=True)(params)
    changes, state = optimizer.update(grads, state)
    return optax.apply_updates(params, changes), state, drift


if __name__ == "__main__":
    main(*sys.argv[1:])
