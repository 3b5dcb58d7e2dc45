"""The training loop: seeded, resumable, bounded by wall-clock minutes or by steps, progress shown.

Owns the plan of steps (which row shape at which step) and the jitted update. What is trained is a
`Task`; it knows of language models only. Everything a step sees is a function of (seed, step) and
the stored state, so stopping and resuming changes nothing.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from checkpoints.recipe import packing, storage
from checkpoints.recipe.model import ModelConfig, init_params, packed_logits
from checkpoints.recipe.optimizer import make_optimizer, rate_at
from checkpoints.recipe.packing import Batch


@dataclass(frozen=True)
class Plan:
    """`tokens` per step are cut into rows of 256, sometimes of 1024 or 2048, as `shape` says."""

    model: Any  # the configuration of what is trained, kept beside the state
    minutes: float
    steps: int | None = None
    seed: int = 1
    decay: float = 0.5  # the last share of the budget, over which the rate falls to nothing
    tokens: int = 2048
    length: int = 256
    curriculum_steps: int = 500
    long_every: int = 10
    long_from: int = 1200
    save_every: int = 50
    mixture: str = "first"  # of the skills
    rate: float = 1.0  # the peak, as a share of the full rate
    before: tuple[str, ...] = ()  # the training figures of the stages this run goes on from

    def shape(self, step: int) -> tuple[int, int]:
        length = self.length
        late = self.long_every and step >= self.long_from
        if late and step % self.long_every == self.long_every - 1:
            length *= 8 if step // self.long_every % 4 == 3 else 4
        return self.tokens // length, length


def batch_at(plan: Plan, tokenizer: Tokenizer, step: int) -> Batch:
    rows, length = plan.shape(step)
    if length > plan.length:
        return packing.long_batch(tokenizer, plan.seed, step, rows, length, plan.mixture)
    curriculum = step < plan.curriculum_steps
    return packing.short_batch(tokenizer, plan.seed, step, rows, length, curriculum, plan.mixture)


@dataclass(frozen=True)
class Task:
    """What is trained. `frozen` arrays are an argument of the loss that takes no gradient."""

    init: Callable[[int], Any]  # seed -> params
    loss: Callable[[Any, Any, tuple], jax.Array]  # (frozen, params, batch)
    frozen: Any = ()


def language_model(config: ModelConfig) -> Task:
    return Task(partial(init_params, config), partial(_weighted_loss, config))


def _weighted_loss(config: ModelConfig, frozen, params, batch: tuple) -> jax.Array:
    tokens_BT, documents_BT, weights_BT = batch
    logits_BTV = packed_logits(config, params, tokens_BT, documents_BT)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BT[:, 1:])
    weights = weights_BT[:, :-1]
    return (losses * weights).sum() / weights.sum()


def make_update(task: Task, optimizer: optax.GradientTransformation):
    def update(state, frozen, batch, rate):
        params, moments = state
        loss, gradients = jax.value_and_grad(task.loss, argnums=1)(frozen, params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        updates = jax.tree.map(lambda u: u * rate, updates)
        return (optax.apply_updates(params, updates), moments), loss

    compiled = jax.jit(update, donate_argnums=0)
    return lambda state, batch, rate: compiled(state, task.frozen, batch, rate)


def fresh_state(task: Task, seed: int):
    params = task.init(seed)
    optimizer = make_optimizer(params)
    return (params, optimizer.init(params)), optimizer


@dataclass
class Clock:
    """Where the run stands; minutes are counted over all resumed parts."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def _finished(plan: Plan, clock: Clock) -> bool:
    if plan.steps is not None:
        return clock.step >= plan.steps
    return clock.seconds >= plan.minutes * 60


def _spent(plan: Plan, clock: Clock) -> float:
    return clock.step / plan.steps if plan.steps else clock.seconds / (plan.minutes * 60)


def run(
    plan: Plan, task: Task, tokenizer: Tokenizer, out: Path, report=lambda clock, loss: None
) -> dict:
    """Train from the checkpoint in `out`, or from scratch, to the end of the plan."""
    state, optimizer = fresh_state(task, plan.seed)
    path, clock = out / "state.safetensors", Clock()
    if path.exists():
        state, about = storage.load_state(path, state)
        clock = Clock(**about["clock"])
    update = make_update(task, optimizer)
    for now, loss in _steps(plan, tokenizer, clock, state, update):
        report(clock, loss)
        if clock.step % plan.save_every == 0 or _finished(plan, clock):
            storage.save_state(path, now, _about(plan, clock))
    return _about(plan, clock)


def _about(plan: Plan, clock: Clock) -> dict:
    return {"clock": dataclasses.asdict(clock), "plan": dataclasses.asdict(plan)}


def _steps(plan: Plan, tokenizer: Tokenizer, clock: Clock, state, update) -> Iterator[tuple]:
    while not _finished(plan, clock):
        began = time.monotonic()
        batch = batch_at(plan, tokenizer, clock.step)
        arrays = tuple(map(jnp.asarray, dataclasses.astuple(batch)))
        rate = np.float32(plan.rate * rate_at(clock.step, _spent(plan, clock), plan.decay))
        state, loss = update(state, arrays, rate)
        loss = float(loss)
        clock.step += 1
        clock.tokens += batch.tokens_BT.size
        clock.seconds += time.monotonic() - began
        yield state, loss


class Show:
    """Progress on the terminal, and one JSON line every `every` steps in `log.jsonl`."""

    def __init__(self, plan: Plan, out: Path, every: int = 20):
        out.mkdir(parents=True, exist_ok=True)
        self.plan, self.every, self.log = plan, every, out / "log.jsonl"
        self.losses: list[float] = []
        self.console = Console()
        columns = (
            *Progress.get_default_columns(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self.bar = Progress(*columns, console=self.console)
        self.task = self.bar.add_task("training", total=1.0, note="")

    def __call__(self, clock: Clock, loss: float) -> None:
        if clock.step % self.plan.long_every:
            self.losses.append(loss)
        if clock.step % self.every:
            return
        mean = float(np.mean(self.losses))
        self.losses.clear()
        note = f"step {clock.step}  loss {mean:.3f}  {clock.tokens / clock.seconds:.0f} tokens/s"
        self.bar.update(self.task, completed=_spent(self.plan, clock), note=note)
        if not self.console.is_terminal:
            self.console.print(f"{clock.seconds / 60:.1f} min  {note}")
        with self.log.open("a") as log:
            log.write(json.dumps({**dataclasses.asdict(clock), "loss": round(mean, 4)}) + "\n")


def train(plan: Plan, task: Task, tokenizer: Tokenizer, out: Path) -> dict:
    show = Show(plan, out)
    with show.bar:
        return run(plan, task, tokenizer, out, show)
