"""Saves and restores Orbax checkpoints of jserve's parameters on any mesh.

It owns the directory layout below and the contact with orbax-checkpoint. What is stored is the tree of
``family.specs(arch, 1)``, so a checkpoint fits every number of devices; kv heads are repeated after the restore,
and the vocabulary is padded by it.

    DST/params/            the Orbax checkpoint, in chunks: a shard reads only its part
    DST/*.json, ...        tokenizer and generation_config.json, copied
    DST/config.json        copied last: a directory without it was not finished
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from jserve.errors import ConfigError, WeightsError
from jserve.gguf.config import config_of
from jserve.gguf.header import is_gguf, read
from jserve.gguf.tokenizer import files as gguf_files
from jserve.model.param_spec import ParamSpec, is_spec
from jserve.model.shard import ShardRules
from jserve.weights.adopt import is_exact, place
from jserve.weights.place import (
    Progress,
    Then,
    bad_values,
    bad_values_on_device,
    named,
    sharding_of,
)
from jserve.weights.source import ORBAX_DIR

CHUNK_BYTES = 16 << 20
BESIDE = ("*.json", "*.jinja", "*.txt", "*.model")


def save(directory: Path, params: Any, beside: Path) -> None:
    """Write ``params`` (the tree of ``specs(arch, 1)``) and the text files of ``beside`` to
    ``directory``.

    Raises:
        ConfigError: the directory exists and is not empty, or cannot be written.
    """
    check_target(directory)
    try:
        chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), params)
        with _checkpointer() as checkpointer:
            args = ocp.args.PyTreeSave(params, save_args=chunks)
            checkpointer.save((directory / ORBAX_DIR).absolute(), args=args)
        copy_beside(beside, directory)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written: {error.strerror or error}", field=str(directory)
        ) from None


def check_target(directory: Path) -> None:
    """Make ``directory``; ConfigError if it is not empty or cannot be made."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        full = any(directory.iterdir())
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}", field=str(directory)) from None
    if full:
        raise ConfigError(f"{directory} is not empty", field=str(directory))


def restore(
    root: Path,
    canonical: Any,
    specs: Any,
    mesh: Mesh,
    rules: ShardRules,
    dtype: Any,
    *,
    progress: Progress | None = None,
    scan_nan: str = "sample",
    then: Then = lambda _, array: array,
) -> Any:
    """The parameters stored in ``root`` as a tree like ``specs``, each read straight into its
    shards, or what ``then`` makes of them.

    ``canonical`` is the tree that was stored. Parameters are restored in groups of at most the
    largest one.

    Raises:
        WeightsError: the checkpoint is broken or holds another tree; ``field`` is
        directory:parameter.
    """
    tree = _stored_tree(root)
    bases = [spec for _, spec in named(canonical)]
    wanted = named(specs)
    _check_stored(root, tree, named(canonical))
    shardings = [sharding_of(spec, name, mesh, rules) for name, spec in wanted]
    abstract = [
        _abstract(base, name, spec, mesh, rules, dtype)
        for (name, spec), base in zip(wanted, bases, strict=True)
    ]
    total, done, leaves = sum(_n_bytes(a) for a in abstract), 0, []
    names = [name for name, _ in wanted]
    for group in _groups([_n_bytes(a) for a in abstract]):
        arrays = _restored_or_blame(root, canonical, abstract, group, names)
        for i, array in zip(group, arrays, strict=True):
            if why := bad_values_on_device(array, scan_nan):
                raise _broken(root, names[i], why)
            spec = wanted[i][1]
            array = _with_copies(array, spec)
            leaves.append(then(names[i], place(array, bases[i], spec, shardings[i], array.dtype)))
            done += _n_bytes(abstract[i])
            if progress is not None:
                progress(names[i], done, total)
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), leaves)


def in_host_memory(root: Path, canonical: Any) -> Any:
    """The parameters stored in ``root`` as a tree like ``canonical``, of numpy arrays in the dtypes that are stored.
    Unlike ``restore`` it compiles nothing.

    Raises:
        WeightsError: as ``restore``.
    """
    _check_stored(root, _stored_tree(root), named(canonical))
    how = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), canonical, is_leaf=is_spec
    )
    item = jax.tree.map(lambda _: 0, canonical, is_leaf=is_spec)
    try:
        with _checkpointer() as checkpointer:
            args = ocp.args.PyTreeRestore(item, restore_args=how)
            tree = checkpointer.restore(root.absolute(), args=args)
    except Exception as error:
        raise _broken(root, None, f"cannot be restored: {_line(error)}") from None
    for (name, _), array in zip(named(canonical), jax.tree.leaves(tree), strict=True):
        if why := bad_values(array, "sample"):
            raise _broken(root, name, why)
    return tree


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True))


def _stored_tree(root: Path) -> dict[str, Any]:
    """Dotted name -> metadata (shape, dtype) of every stored array."""
    try:
        with _checkpointer() as checkpointer:
            tree = checkpointer.metadata(root.absolute()).item_metadata.tree
    except Exception as error:
        # Orbax raises whatever its storage or its JSON reader meets; the operator gets one line.
        raise _broken(root, None, f"no readable Orbax checkpoint: {_line(error)}") from None
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="."): leaf for p, leaf in found}


def _check_stored(root: Path, stored: dict[str, Any], wanted: list[tuple[str, ParamSpec]]) -> None:
    for name, spec in wanted:
        if name not in stored:
            raise _broken(root, name, f"missing (the checkpoint has {len(stored)} parameters)")
        shape, dtype = tuple(stored[name].shape), np.dtype(stored[name].dtype)
        if shape != spec.shape:
            raise _broken(root, name, f"shape {shape}, the config asks for {spec.shape}")
        if is_exact(spec.dtype):
            if dtype != np.dtype(spec.dtype):
                raise _broken(root, name, f"dtype {dtype}, must be {np.dtype(spec.dtype)}")
            continue
        if dtype.name not in ("bfloat16", "float16", "float32"):
            raise _broken(root, name, f"dtype {dtype}, must be bf16, f16 or f32")
    extra = sorted(set(stored) - {name for name, _ in wanted})
    if extra:
        # One array more means another layout; reading the rest would serve a wrong model.
        raise _broken(root, extra[0], "not a parameter of this model")


def _abstract(
    base: ParamSpec, name: str, spec: ParamSpec, mesh: Mesh, rules: ShardRules, dtype: Any
) -> jax.ShapeDtypeStruct:
    """The arrays to restore: the final shards, or replicas where kv heads are repeated afterwards."""
    if base.shape == spec.shape or spec.pad or spec.copies:
        shape, sharding = spec.shape, sharding_of(spec, name, mesh, rules)
    else:
        shape, sharding = base.shape, rules.sharding(mesh, (None,) * len(base.shape))
    return jax.ShapeDtypeStruct(shape, spec.dtype or dtype, sharding=sharding)


def _with_copies(array: jax.Array, spec: ParamSpec) -> jax.Array:
    """``array`` with its first entries once more at its end, where Orbax put zeros."""
    if not spec.copies:
        return array
    n = spec.copies

    def copied(x: jax.Array) -> jax.Array:
        return x.at[-n:].set(x[:n])

    return jax.jit(copied, donate_argnums=0, out_shardings=array.sharding)(array)


def _groups(sizes: list[int]) -> Iterator[list[int]]:
    """Runs of indices that together weigh no more than the heaviest one."""
    group: list[int] = []
    for i, size in enumerate(sizes):
        if group and sum(sizes[j] for j in group) + size > max(sizes):
            yield group
            group = []
        group.append(i)
    yield group


def _restored_or_blame(
    root: Path, canonical: Any, abstract: list[Any], group: list[int], names: list[str]
) -> list[jax.Array]:
    try:
        return _restored(root, canonical, abstract, group)
    except Exception as error:
        # Storage errors name chunks, not parameters: the first of the group that fails alone is
        # the one.
        for i in group:
            try:
                _restored(root, canonical, abstract, [i])
            except Exception as alone:
                raise _broken(root, names[i], f"cannot be restored: {_line(alone)}") from None
        raise _broken(root, names[group[0]], f"cannot be restored: {_line(error)}") from None


def _restored(root: Path, canonical: Any, abstract: list[Any], group: list[int]) -> list[jax.Array]:
    chosen = set(group)
    leaves = [a if i in chosen else ocp.PLACEHOLDER for i, a in enumerate(abstract)]
    item = jax.tree.unflatten(jax.tree.structure(canonical, is_leaf=is_spec), leaves)
    args = ocp.args.PyTreeRestore(item, restore_args=jax.tree.map(_how, item, is_leaf=_is_left_out))
    with _checkpointer() as checkpointer:
        tree = checkpointer.restore(root.absolute(), args=args)
    restored = jax.tree.leaves(tree, is_leaf=_is_left_out)
    return jax.block_until_ready([restored[i] for i in group])


def _is_left_out(leaf: Any) -> bool:
    return leaf is ocp.PLACEHOLDER


def _how(leaf: Any) -> ocp.RestoreArgs:
    """Shapes were compared before: one that is larger than the stored one is a padded vocabulary, or has spare slots
    of experts; Orbax fills it with zeros."""
    if _is_left_out(leaf):
        return ocp.RestoreArgs()
    return ocp.ArrayRestoreArgs(
        sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=False
    )


def copy_beside(source: Path, directory: Path) -> None:
    """Copy tokenizer, template and configuration files; config.json last."""
    if is_gguf(source):
        _write_beside(source, directory)
        return
    for pattern in BESIDE:
        for path in sorted(source.glob(pattern)):
            if path.name != "config.json" and not path.name.endswith(".index.json"):
                shutil.copyfile(path, directory / path.name)
    shutil.copyfile(source / "config.json", directory / "config.json")


def _write_beside(source: Path, directory: Path) -> None:
    """The files that a GGUF file's header stands for, config.json last."""
    for name, value in (*gguf_files(source).items(), ("config.json", config_of(read(source)))):
        (directory / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _n_bytes(a: jax.ShapeDtypeStruct) -> int:
    return math.prod(a.shape) * a.dtype.itemsize


def _line(error: BaseException) -> str:
    """The first line of the innermost cause: the outer ones print whole storage specifications."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def _broken(root: Path, name: str | None, why: str) -> WeightsError:
    if name is None:
        return WeightsError(f"{root}: {why}", field=str(root))
    return WeightsError(f"{root}: parameter {name}: {why}", field=f"{root}:{name}")
