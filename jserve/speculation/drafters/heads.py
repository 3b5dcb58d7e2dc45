"""Loads speculative heads from a directory: the drafter and its weights.

It owns the table of methods, and that a tensor which a format does not have is an error: it would change what the
head computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jserve.errors import ConfigError
from jserve.model.arch import Arch
from jserve.speculation.drafters.drafter import Drafter
from jserve.speculation.drafters.eagle3_files import read_eagle3
from jserve.speculation.drafters.head_files import Head, HeadFiles
from jserve.speculation.drafters.medusa_files import read_medusa
from jserve.weights.loader import load_tree
from jserve.weights.source import Source

READERS: Mapping[str, Callable[[HeadFiles, Arch], Head]] = {
    "eagle3": read_eagle3,
    "medusa": read_medusa,
}


def read_head(method: str, source: Source, target: Arch) -> tuple[Drafter, Callable[..., Any]]:
    """(the drafter of ``target`` in ``source``, (mesh, rules, dtype, options of ``loader.load``) -> the
    tree of its ``specs``, which raises WeightsError for a file that is broken, lacks a tensor or has one
    that the format does not).

    Args:
        method: eagle3 or medusa.

    Raises:
        ConfigError: config.json asks for what cannot be honoured, or does not fit the target.
    """
    if source.format == "orbax":
        raise ConfigError(
            f"{source.directory}: heads are read from safetensors only", field="speculative.model"
        )
    if source.config.get("quantization_config"):
        raise ConfigError(
            f"{source.directory.name}: quantization_config of a head is not supported",
            field="quantization_config",
        )
    head = READERS[method](HeadFiles(source), target)
    specs, unread = head.drafter.specs, head.unread
    finish = partial(_refuse_unused, unread)
    return head.drafter, partial(load_tree, specs, source, finish=finish)


def _refuse_unused(unread: tuple[str, ...], tensors: Any) -> None:
    tensors.refuse_unused(ignore=unread)
