"""Judging a model on held-out text: exact answers per skill, and bits per byte.

Owns the scores of the model card. A closed answer counts only if every character is right; text
between think tags is not compared, the answer after it is.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer

from checkpoints.recipe import skills
from checkpoints.recipe.chat import Chat, prompt_and_answer, segments
from checkpoints.recipe.decode import complete
from checkpoints.recipe.model import ModelConfig, packed_logits
from checkpoints.recipe.packing import encode
from checkpoints.recipe.skills import passage

_ROWS = 50


@dataclass(frozen=True)
class Miss:
    prompt: str
    expected: str
    said: str


def after_thinking(text: str) -> str:
    return text.rpartition("</think>")[2].strip()


def held_out(skill: str, count: int) -> list[Chat]:
    rng = np.random.default_rng([99, sum(map(ord, skill))])
    if skill == "passage_long":
        return [passage.generate_long(rng, "test", 100) for _ in range(count)]
    return [skills.SKILLS[skill](rng, "test") for _ in range(count)]


def judge(config: ModelConfig, params, tokenizer: Tokenizer, chats: list[Chat]):
    """The share of right answers, and the wrong ones."""
    config = dataclasses.replace(config, fast_matmul=False)
    pairs = [prompt_and_answer(chat) for chat in chats]
    said: list[str] = []
    for at in range(0, len(pairs), _ROWS):
        prompts = [prompt for prompt, _ in pairs[at : at + _ROWS]]
        said += complete(config, params, tokenizer, prompts)
    misses = [
        Miss(prompt, answer, got)
        for (prompt, answer), got in zip(pairs, said, strict=True)
        if after_thinking(answer) != after_thinking(got)
    ]
    return 1 - len(misses) / len(chats), misses


@partial(jax.jit, static_argnums=0)
def _token_losses(config: ModelConfig, params, tokens_BT, documents_BT):
    logits_BTV = packed_logits(config, params, tokens_BT, documents_BT)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BT[:, 1:])


def bits_per_byte(config: ModelConfig, params, tokenizer: Tokenizer, chats: list[Chat]) -> dict:
    """Bits per byte of everything, and of what the assistant says alone."""
    config = dataclasses.replace(config, fast_matmul=False)
    encoded, width = encode(tokenizer, chats), 512
    bits, said_bits = 0.0, 0.0
    for ids, weights in encoded:
        tokens_BT = np.zeros((1, width), np.int32)
        tokens_BT[0, : len(ids)] = ids[:width]
        documents_BT = (np.arange(width) < len(ids)).astype(np.int32)[None]
        losses = np.asarray(_token_losses(config, params, jnp.asarray(tokens_BT), documents_BT))[0]
        losses = losses[: len(ids) - 1] / np.log(2)
        bits += losses.sum()
        said_bits += losses[weights[1:] == 1.0].sum()
    size = sum(len(text.encode()) for chat in chats for text, _ in segments(chat))
    said = sum(len(text.encode()) for c in chats for text, weight in segments(c) if weight == 1.0)
    return {"all": bits / size, "assistant": said_bits / said}


def score(config: ModelConfig, params, tokenizer: Tokenizer, count: int, report=print) -> dict:
    """Everything the model card shows."""
    accuracy, examples = {}, {}
    for skill in (*skills.CLOSED, "passage_long"):
        chats = held_out(skill, count if skill != "passage_long" else max(1, count // 5))
        accuracy[skill], misses = judge(config, params, tokenizer, chats)
        report(f"{skill:20} {accuracy[skill]:6.1%}")
        examples[skill] = [dataclasses.asdict(miss) for miss in misses[:5]]
    rng = np.random.default_rng(98)
    mixed = [skills.draw(rng, "test") for _ in range(count)]
    bits = bits_per_byte(config, params, tokenizer, mixed)
    bits["story"] = bits_per_byte(config, params, tokenizer, held_out("story", count))["assistant"]
    report("bits per byte: " + ", ".join(f"{name} {value:.3f}" for name, value in bits.items()))
    return {"accuracy": accuracy, "bits_per_byte": bits, "misses": examples, "count": count}
