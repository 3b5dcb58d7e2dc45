"""A second stage: training that starts from exported weights.

Owns what a run takes over from an exported folder: its weights, the tokenizer byte for byte, and
the training figures on its card. The optimiser starts fresh.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from checkpoints.recipe.eagle import EagleConfig
from checkpoints.recipe.export import import_params, read_config
from checkpoints.recipe.head_export import import_head
from checkpoints.recipe.medusa import MedusaConfig
from checkpoints.recipe.train import Task

_ROW = "| training"


def task_from(folder: Path, task: Task, config: Any) -> Task:
    """`task` with the weights in `folder` as its first parameters.

    Raises:
        SystemExit: the folder holds a model of another shape, or heads of another vocabulary.
    """
    if isinstance(config, EagleConfig | MedusaConfig):
        return _heads_from(folder, task, config)
    stored = read_config(folder)
    if dataclasses.replace(config, fast_matmul=False) != stored:
        raise SystemExit(f"--from {folder}: this is a model of another shape than --size")
    return dataclasses.replace(task, init=lambda seed: import_params(folder, stored))


def _heads_from(folder: Path, task: Task, config: EagleConfig | MedusaConfig) -> Task:
    params, draft_ids = import_head(folder, config)
    if draft_ids.tolist() != task.frozen["draft_ids"].tolist():
        raise SystemExit(f"--from {folder}: these heads draft other tokens than the recipe's")
    return dataclasses.replace(task, init=lambda seed: params)


def keep_tokenizer(folder: Path, target: Path, path: Path) -> None:
    """Copy the folder's tokenizer, or for heads the target's, to `path` byte for byte.

    Raises:
        SystemExit: `path` already holds another tokenizer.
    """
    own = folder / "tokenizer.json"
    source = own if own.exists() else target / "tokenizer.json"
    if path.exists() and path.read_bytes() != source.read_bytes():
        raise SystemExit(f"{path} is not the tokenizer of {source.parent}; choose another --work")
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, path)


def stages(folder: Path) -> tuple[str, ...]:
    """The training figures of each stage so far, as the folder's card states them."""
    card = folder / "README.md"
    lines = card.read_text(encoding="utf-8").splitlines() if card.exists() else []
    return tuple(line.split("|")[2].strip() for line in lines if line.startswith(_ROW))
