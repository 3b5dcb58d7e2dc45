"""Writes weights that a program has in memory to a directory, from which replicas in other processes read them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import jax

from jserve.errors import WeightsError
from jserve.model.families import family_for
from jserve.model.param_spec import is_spec
from jserve.weights import orbax
from jserve.weights.adapters import AdapterDelta
from jserve.weights.adopt import has_quantised, leaves_of, matched
from jserve.weights.handed import from_names, named_arrays
from jserve.weights.source import Source


def write_for_replicas(source: Any, model: Source) -> str:
    """The new directory of an Orbax checkpoint of ``source``, below that for temporary files (``TMPDIR``).

    Args:
        source: a tree of parameters of numpy or jax arrays, or (checkpoint name, array) pairs, as ``update_weights``
            takes them.
        model: that the replicas started with.

    Raises:
        WeightsError: a leaf is missing, unknown, deleted or of another shape or kind; ``field`` is ``params.<path>``.
            Or what cannot be written as a checkpoint: an adapter, quantised matrices.
        ConfigError: the directory cannot be written.
    """
    if model.config.get("quantization_config"):
        why = "the checkpoint of the replicas is quantised, and only it can be loaded"
        raise WeightsError(f"params: {why}", field="params")
    family = family_for(model.config)
    arch = family.arch(model.config)
    specs = family.specs(arch, 1)
    tied = ("lm_head.weight",) if arch.tied else ()
    matches = matched(_as_tree(source, specs, tied), specs)
    tree = jax.tree.unflatten(
        jax.tree.structure(specs, is_leaf=is_spec), [match.array for match in matches]
    )
    directory = mkdtemp(prefix="jserve-weights-")
    try:
        orbax.save(Path(directory), tree, model.directory)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return directory


def _as_tree(source: Any, specs: Any, tied: tuple[str, ...]) -> Mapping[str, Any]:
    """``source`` by path in ``specs``."""
    if isinstance(source, AdapterDelta):
        why = "an AdapterDelta is added to the weights of one engine; replicas take whole weights"
        raise WeightsError(f"params: {why}", field="params")
    pairs = named_arrays(source)
    if pairs is not None:
        return from_names(pairs, specs, ignore=tied)
    if has_quantised(source):
        why = "replicas take matrices in a floating dtype, and quantise them as their own"
        raise WeightsError(f"params: {why}", field="params")
    return dict(leaves_of(source))
