"""How many drafts of a head the target would keep, measured offline on held-out prompts.

Owns the measure. The target answers each prompt by itself, greedily or by sampling. Then every token
of the answer is drafted for, given the tokens before it, and speculative decoding is replayed: a step
keeps the drafts that are what the target said, up to the first that is not, and one token more. So
the mean is exact for a greedy drafter and a verifier that keeps a draft if it equals the target's
draw, as jserve's does.

    answer    a   b   c   d   e   f   g         first token: from the prompt
    drafts        b   c   x                     step 1 keeps b, c and draws d
                              e   f   g         step 2 keeps all
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from checkpoints.recipe import skills
from checkpoints.recipe.chat import prompt_and_answer
from checkpoints.recipe.decode import continue_ids
from checkpoints.recipe.evaluate import held_out
from checkpoints.recipe.heads import HeadConfig, draft_logits, target_features
from checkpoints.recipe.model import ModelConfig, packed_logits

Drafter = Callable[[jax.Array, jax.Array], jax.Array]
"""(tokens_BT, documents_BT) -> int32[B, T, I]: the tokens that row t drafts for t + 2, t + 3, ..."""

_NEW = 160
_WIDTH = 128
_ROWS = 16


@dataclass(frozen=True)
class Answer:
    tokens: np.ndarray  # prompt and answer
    prompt: int  # tokens of the prompt


def head_drafter(config: HeadConfig, frozen: dict, params) -> Drafter:
    """The heads' most likely tokens. A chain is fed the text, which its right drafts equal."""
    config = replace(config, fast_matmul=False, target=replace(config.target, fast_matmul=False))

    @jax.jit
    def drafts(frozen, params, tokens_BT, documents_BT):
        features = target_features(config.target, frozen["target"], tokens_BT, documents_BT)
        rows_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        logits = draft_logits(config, frozen, params, features, tokens_BT, documents_BT, rows_BT)
        return jnp.stack([frozen["draft_ids"][x_BTV.argmax(-1)] for x_BTV in logits], -1)

    return partial(drafts, frozen, params)


def model_drafter(config: ModelConfig, params, steps: int) -> Drafter:
    """A draft model, for comparison: a chain of its most likely tokens."""

    @jax.jit
    def drafts(params, tokens_BT, documents_BT):
        best_BT = packed_logits(config, params, tokens_BT, documents_BT).argmax(-1)
        return jnp.stack([jnp.roll(best_BT, -1 - i, axis=1) for i in range(steps)], -1)

    return partial(drafts, params)


def answers(
    config: ModelConfig, params, tokenizer: Tokenizer, skill: str, count: int, temperature: float
) -> list[Answer]:
    """What the target says after `count` held-out prompts of a skill."""
    prompts = [prompt_and_answer(chat)[0] for chat in held_out(skill, count)]
    ids = [encoding.ids for encoding in tokenizer.encode_batch(prompts)]
    said = []
    for at in range(0, count, _ROWS):
        rows = ids[at : at + _ROWS]
        said += continue_ids(config, params, rows, _NEW, temperature, seed=at)
    return [
        Answer(np.concatenate([np.array(prompt, np.int32), tokens]), len(prompt))
        for prompt, tokens in zip(ids, said, strict=True)
    ]


def tokens_per_step(drafter: Drafter, said: list[Answer]) -> float:
    """Mean tokens that one verify step yields over all answers; 1 means no draft was right."""
    steps = tokens = 0
    for at in range(0, len(said), _ROWS):
        rows = said[at : at + _ROWS]
        for answer, drafts_TI in zip(rows, _drafts(drafter, rows), strict=True):
            taken = _replay(answer, drafts_TI)
            steps, tokens = steps + len(taken), tokens + sum(taken)
    return tokens / max(steps, 1)


def _drafts(drafter: Drafter, rows: list[Answer]) -> np.ndarray:
    width = -(-max(len(answer.tokens) for answer in rows) // _WIDTH) * _WIDTH
    tokens_BT = np.zeros((len(rows), width), np.int32)
    documents_BT = np.zeros((len(rows), width), np.int32)
    for b, answer in enumerate(rows):
        tokens_BT[b, : len(answer.tokens)] = answer.tokens
        documents_BT[b, : len(answer.tokens)] = 1
    return np.asarray(drafter(jnp.asarray(tokens_BT), jnp.asarray(documents_BT)))


def _replay(answer: Answer, drafts_TI: np.ndarray) -> list[int]:
    """Tokens taken by each step after the prompt's own."""
    row, last, taken = answer.prompt - 1, len(answer.tokens) - 1, []
    while row + 1 < last:
        goal = answer.tokens[row + 2 :][: drafts_TI.shape[1]]
        wrong = np.flatnonzero(drafts_TI[row, : len(goal)] != goal)
        right = int(wrong[0]) if len(wrong) else len(goal)
        taken.append(min(right + 1, last - row - 1))
        row += taken[-1]
    return taken


def measure(
    config: ModelConfig,
    params,
    tokenizer: Tokenizer,
    drafters: dict[str, Drafter],
    count: int,
    temperature: float,
    report=print,
) -> dict[str, dict[str, float]]:
    """{skill: {drafter: tokens per verify step}} over `count` held-out prompts of each skill."""
    table: dict[str, dict[str, float]] = {}
    config = replace(config, fast_matmul=False)
    for skill in skills.SKILLS:
        said = answers(config, params, tokenizer, skill, count, temperature)
        table[skill] = {name: tokens_per_step(d, said) for name, d in drafters.items()}
        shown = "  ".join(f"{name} {value:.2f}" for name, value in table[skill].items())
        report(f"temperature {temperature}  {skill:20} {shown}")
    return table
