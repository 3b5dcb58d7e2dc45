"""Speculative heads out of a directory: the drafter, and its weights on the mesh.

Owns the table of methods, and that a tensor which a format does not have is an error: it would
change what the head computes. Must not know plans, nor how drafts are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from jserve.errors import ConfigError
from jserve.model.drafter import REPLICATED, Drafter
from jserve.model.family import Arch
from jserve.model.shard import ShardRules
from jserve.weights.eagle3 import read_eagle3
from jserve.weights.head_files import Head, HeadFiles
from jserve.weights.loader import load_tree
from jserve.weights.medusa import read_medusa
from jserve.weights.place import tp_size
from jserve.weights.source import Source

READERS: Mapping[str, Callable[[HeadFiles, Arch, int], Head]] = {
    "eagle3": read_eagle3,
    "medusa": read_medusa,
}


def load_head(
    method: str,
    source: Source,
    target: Arch,
    mesh: Mesh,
    rules: ShardRules,
    dtype: Any,
    **how: Any,
) -> tuple[Drafter, Any]:
    """(the drafter of ``target`` in ``source``, the tree of its ``specs`` placed on ``mesh``).

    Args:
        method: eagle3 or medusa.
        how: options of ``loader.load``.

    Raises:
        ConfigError: config.json asks for what cannot be honoured, or does not fit the target.
        WeightsError: a file is broken, lacks a tensor or has one that the format does not.
    """
    if source.format == "orbax":
        raise ConfigError(
            f"{source.directory}: heads are read from safetensors only", field="speculative.model"
        )
    head = READERS[method](HeadFiles(source), target, tp_size(mesh, rules))
    laid = REPLICATED if head.drafter.replicated else rules
    params = load_tree(
        head.drafter.specs,
        source,
        mesh,
        laid,
        dtype,
        finish=lambda tensors: tensors.refuse_unused(ignore=head.unread),
        **how,
    )
    return head.drafter, params
