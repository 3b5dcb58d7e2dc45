"""Loads parameters into their shards, from safetensors, Orbax or the dummy generator.

It owns the choice of the source and the way of a file's bytes to a device: one shard of one parameter at a time is
put together in host memory, cast, scanned and sent off, so the peak above the parameters themselves is one shard.

    spec tree --pieces--> views of mapped tensors --copy, cast--> host block --device_put--> device
                                                                  one shard, freed before the next
On a CPU device the block itself becomes the shard (see ``place.ALIGN``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jserve.errors import ConfigError
from jserve.model.arch import Arch
from jserve.model.family import Family
from jserve.model.hf_text import sees_images
from jserve.model.mesh import make_mesh
from jserve.model.param_spec import ParamSpec, Part, spelled
from jserve.model.quant import QTensor, quantised_leaves
from jserve.model.shard import ShardRules, padded
from jserve.weights.adopt import adopt, has_quantised
from jserve.weights.dummy import draw
from jserve.weights.gguf import GgufFile
from jserve.weights.hf import BYTES, FLOATS, INTEGERS, Kinds, Tensors
from jserve.weights.layout import Index, pieces, shard_shape
from jserve.weights.mxfp4 import Mxfp4
from jserve.weights.place import (
    SCANS,
    Make,
    Progress,
    Then,
    aligned,
    bad_values,
    build,
    from_shards,
    matrices,
    named,
    placed,
    tp_size,
)
from jserve.weights.quant.rounding import quantised, quantised_tree
from jserve.weights.quant.scheme import Scheme
from jserve.weights.quant.tensors import QuantisedTensors
from jserve.weights.safetensors import broken
from jserve.weights.source import Source

log = logging.getLogger(__name__)

Readable = Tensors | QuantisedTensors


def load(
    family: Family,
    arch: Arch,
    source: Source,
    mesh: Mesh,
    rules: ShardRules,
    dtype: Any,
    *,
    progress: Progress | None = None,
    seed: int = 0,
    scan_nan: str = "sample",
    scheme: Scheme | None = None,
) -> Any:
    """The parameters of ``family.specs(arch, tp)``, the vocabulary ``padded`` to equal shards, each
    with the sharding ``rules`` give it on ``mesh``.

    Args:
        source: where they come from, see ``jserve.weights.source.resolve``.
        dtype: of all parameters whose spec names none.
        progress: called after each parameter.
        seed: of dummy weights.
        scan_nan: "off", "sample" (some elements of each tensor) or "full".
        scheme: by which ``family`` is quantised.

    Raises:
        WeightsError: a file is broken, or does not match the specs; ``field`` is the file and
        tensor.
        ConfigError: the mesh does not fit the rules.
    """
    specs = _placed_specs(family, arch, mesh, rules)
    tied = ("lm_head.weight",) if arch.tied else ()
    if source.format == "orbax" and scheme is not None and not scheme.on_load:
        _check_forms(family.specs(arch, 1), specs)
    how = {
        "progress": progress,
        "seed": seed,
        "scan_nan": scan_nan,
        "finish": lambda tensors: _finish(tensors, tied),
    }
    return _load(family, arch, lambda whole: whole, source, mesh, rules, dtype, scheme, **how)


def load_part(
    family: Family,
    arch: Arch,
    of: Callable[[Any], Any],
    source: Source,
    dtype: Any,
    *,
    scheme: Scheme | None = None,
    scan_nan: str = "sample",
) -> Any:
    """The parameters that ``of`` takes out of the tree that ``load`` gives, whole on one device. Tensors of others are
    not looked at.

    Raises:
        WeightsError: as ``load``.
    """
    mesh, rules = make_mesh(1), ShardRules()
    how = {"scan_nan": scan_nan, "finish": lambda _: None}
    return _load(family, arch, of, source, mesh, rules, dtype, scheme, **how)


def _load(
    family: Family,
    arch: Arch,
    of: Callable[[Any], Any],
    source: Source,
    mesh: Mesh,
    rules: ShardRules,
    dtype: Any,
    scheme: Scheme | None,
    **how: Any,
) -> Any:
    """Parameters as ``family`` has them, quantised one after the other where the checkpoint's are not."""

    def specs_at(tp: int) -> Any:
        return of(family.specs(arch, tp))

    if scheme is None or not scheme.on_load or source.format == "dummy":
        return load_tree(specs_at, source, mesh, rules, dtype, scheme=scheme, **how)
    wide = family.wide
    assert wide is not None, "a quantised family"
    wanted = matrices(padded(specs_at(tp_size(mesh, rules)), rules, mesh.shape))
    # Rounding hides what is not finite, so that a sample would not do.
    how |= {
        "scan_nan": "full",
        "then": lambda name, array: quantised(array, wanted[name], mesh, rules),
    }
    return load_tree(lambda tp: of(wide.specs(arch, tp)), source, mesh, rules, dtype, **how)


def _check_forms(stored: Any, specs: Any) -> None:
    """Refuse devices that would cut the groups of a stored tree, which holds the forms of one device, or share inputs
    that are in an order."""
    for a, b in zip(quantised_leaves(stored), quantised_leaves(specs), strict=True):
        if not isinstance(a, QTensor):
            continue
        why = ""
        if not isinstance(b, QTensor):
            why = "shares inputs that are in an order"
        elif (a.form.kind, a.form.group) != (b.form.kind, b.form.group):
            why = f"cuts groups of {a.form.group} inputs"
        if why:
            raise ConfigError(
                f"tensor_parallel_size {why}, which an Orbax checkpoint keeps whole; serve the checkpoint that it was"
                " converted from",
                field="tensor_parallel_size",
            )


def _finish(tensors: Tensors, tied: tuple[str, ...]) -> None:
    """Refuse experts that the model has not, beside those that it has: config.json is of another model. Of other
    tensors that nothing asked for the log says so."""
    kept = {name[: name.index(EXPERTS)] for name in tensors.used() if EXPERTS in name}
    for name in tensors.unused(ignore=tied):
        if EXPERTS in name and name[: name.index(EXPERTS)] in kept:
            why = "config.json has no such expert"
            raise broken(tensors.path(name), why, name)
    images = [name for name in tensors.unused() if sees_images(name)]
    if images:
        log.info("%s: %d tensors of images are not loaded", tensors.directory, len(images))
    tensors.warn_unused(ignore=(*tied, *images))


EXPERTS = ".experts."
"""In the names of expert tensors, after that of the layer."""


def adopted(
    family: Family, arch: Arch, params: Any, mesh: Mesh, rules: ShardRules, dtype: Any
) -> Any:
    """``load`` of parameters that a user passes in: a copy, laid out and quantised as ``family`` wants them. Matrices
    that are quantised in that form are taken as they are.

    Raises:
        WeightsError, ConfigError: as ``adopt.adopt``.
        ConfigError: the checkpoint is quantised and these are not; ``field`` is ``quantization``.
    """
    specs = _placed_specs(family, arch, mesh, rules)
    if family.wide is None or has_quantised(params):
        return adopt(params, specs, mesh, rules, dtype, canonical=family.specs(arch, 1))
    if any(isinstance(x, QTensor) and not x.form.method for x in quantised_leaves(specs)):
        why = "the checkpoint is quantised, params are not; quantization 'none' takes them"
        raise ConfigError(f"params: {why}", field="quantization")
    wide = (family.wide, arch, params, mesh, rules, dtype)
    return quantised_tree(adopted(*wide), specs, mesh, rules)


def _placed_specs(family: Family, arch: Arch, mesh: Mesh, rules: ShardRules) -> Any:
    return placed(partial(family.specs, arch), mesh, rules)


def load_tree(
    specs_at: Callable[[int], Any],
    source: Source,
    mesh: Mesh,
    rules: ShardRules,
    dtype: Any,
    *,
    progress: Progress | None = None,
    seed: int = 0,
    scan_nan: str = "sample",
    finish: Callable[[Tensors], Any] = Tensors.warn_unused,
    scheme: Scheme | None = None,
    then: Then = lambda _, array: array,
) -> Any:
    """``load`` for any tree of specs: ``specs_at`` gives it for a number of shards.

    ``finish`` is called with the tensors of the safetensors files when all have been read, ``then`` with each
    parameter, for what the tree has in its place.
    """
    if scan_nan not in SCANS:
        raise ConfigError(
            f"scan_nan must be off, sample or full, not {scan_nan!r}", field="scan_nan"
        )
    specs = padded(specs_at(tp_size(mesh, rules)), rules, mesh.shape)
    if source.format == "orbax":
        from jserve.weights import orbax  # half a second that few starts need

        return orbax.restore(
            source.weights,
            specs_at(1),
            specs,
            mesh,
            rules,
            dtype,
            progress=progress,
            scan_nan=scan_nan,
            then=then,
        )
    if source.format == "dummy":
        return build(specs, mesh, rules, dtype, _from_dummy(dtype, seed), progress)
    tensors = tensors_of(source)
    read = tensors if scheme is None else QuantisedTensors(tensors, scheme)
    specs = spelled(specs, read.has)
    _check_present(specs, read)
    params = build(specs, mesh, rules, dtype, _from_files(read, dtype, scan_nan), progress, then)
    if isinstance(read, QuantisedTensors) and read.widened:
        first = min(read.widened)
        n, kind = len(read.widened), np.dtype(dtype)
        log.warning("%d quantised matrices are served in %s, %s among them", n, kind, first)
    _check_orders(params)
    finish(tensors)
    return params


def tensors_of(source: Source) -> Tensors:
    """The tensors of a source that has files of them.

    Raises:
        WeightsError: a file is missing or broken.
    """
    if source.format == "gguf":
        return Tensors(source.weights.parent, GgufFile(source.weights))
    return Tensors(source.weights)


def _check_orders(params: Any) -> None:
    """Refuse a matrix of several tensors whose inputs are in different orders; one order serves it."""
    for leaf in quantised_leaves(params):
        order = leaf.order if isinstance(leaf, QTensor) else None
        if order is not None and len(order) > 1 and not bool((order == order[:1]).all()):
            why = "tensors that make one matrix (q, k and v, or gate and up) have inputs in different orders"
            raise ConfigError(f"{why}; quantization 'none' serves them", field="quantization")


def _from_dummy(dtype: Any, seed: int) -> Make:
    return lambda spec, sharding: draw(spec, sharding, spec.dtype or dtype, seed)


def _from_files(tensors: Readable, dtype: Any, scan_nan: str) -> Make:
    def shard(spec: ParamSpec, index: Index, devices: list[Any]) -> list[jax.Array]:
        block = aligned(shard_shape(spec, index), spec.dtype or dtype)
        if spec.pad:
            block[...] = 0
        for piece in pieces(spec, index):
            target = block[piece.out]
            piece.copy(_tensor(tensors, piece.part, spec), target)
            why = bad_values(target, scan_nan)
            if why is None and spec.positive and not (target > 0).all():
                why = "must be positive"
            if why:
                raise broken(tensors.path(piece.part.name), why, piece.part.name)
        tensors.drop_pages()
        # Waiting keeps one block alive at a time; queued transfers would hold many.
        return jax.block_until_ready([jax.device_put(block, device) for device in devices])

    return lambda spec, sharding: from_shards(spec, sharding, shard)


def _check_present(specs: Any, tensors: Readable) -> None:
    """Every tensor there with the right shape, before the first byte is loaded."""
    for _, spec in named(specs):
        for part in spec.parts:
            tensors.check(part.name, part.shape, BYTES if part.scales else _kinds(spec))
            if part.scales:
                tensors.check(part.scales, part.shape[:-1], BYTES)


def _tensor(tensors: Readable, part: Part, spec: ParamSpec) -> Any:
    """The tensor of ``part`` as a view of its file, or what decodes it."""
    if not part.scales:
        return tensors.get(part.name, part.shape, _kinds(spec))
    blocks = tensors.get(part.name, part.shape, BYTES)
    return Mxfp4(blocks, tensors.get(part.scales, part.shape[:-1], BYTES))


def _kinds(spec: ParamSpec) -> Kinds:
    whole = spec.dtype is not None and np.issubdtype(np.dtype(spec.dtype), np.integer)
    return INTEGERS if whole else FLOATS
