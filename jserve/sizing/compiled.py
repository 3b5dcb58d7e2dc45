"""Compiles the steps of a plan, or of a sharding, for an absent device and reports bytes, flops, scratch and launches.

It owns the call of the deviceless compiler (``pallas_kernels.aot``, which needs the CUDA plugin's wheels and no
GPU). The programs are the engine's: same model, pool, buckets and options.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.model.attention import backend
from jserve.model.mesh import make_mesh, mesh_of
from jserve.model.shard import ShardRules
from jserve.model.step import StepModel, make_step
from jserve.model.view import Bucket, StepDims, buffer_size
from jserve.runner.layout import partitionable
from jserve.runner.programs import compile_options
from jserve.runner.sizes import chosen_attention, step_model
from jserve.sharding import Sharding
from jserve.sim.roofline import CHIPS
from jserve.sizing.compare import link_s
from jserve.sizing.explain import BUCKETS, of_program
from jserve.sizing.layout import Layout
from jserve.sizing.models import find
from jserve.sizing.plan import Plan
from pallas_kernels import aot

DESCRIBED = ("h200",)
"""Devices that the compiler has a description of."""
CAPABILITY = "9.0"
SLOTS, ROW_TOKENS = 64, 8192
"""Of the engine whose steps ``compiled_steps`` compiles; its scratch depends on them, its collectives do not."""


def with_compiled(
    found: Plan, laid: Layout, device: str, progress: Callable[[str, int, int], None]
) -> Plan:
    """``found`` with ``compiled`` figures beside every program but those that differ from
    another by a mask or by scores only.

    Raises:
        ConfigError: no description of that device, or no compiler for it here.
    """
    check(device)
    options, programs = laid.config.device, list(found.programs)
    mesh = make_mesh(options.tensor_parallel_size, aot.h200(laid.tp), options.expert_parallel_size)
    rules = ShardRules.of_mesh(mesh.shape, options.num_redundant_experts)
    model = step_model(laid.sizes, laid.model.family, mesh, rules, laid.speculation)
    plain = [i for i, b in enumerate(laid.buckets) if not b.features]
    for done, i in enumerate(plain):
        progress("compile", done, len(plain))
        step = compile_step(model, laid.buckets[i], options.cuda_graphs)
        figures = _figures(step, programs[i].weight_bytes)
        programs[i] = dataclasses.replace(programs[i], compiled=figures)
    progress("compile", len(plain), len(plain))
    return dataclasses.replace(found, programs=tuple(programs))


def check(device: str) -> None:
    """Raises ConfigError where there is no description of ``device``, or no compiler for it here."""
    if device not in DESCRIBED:
        raise ConfigError(f"compile needs --device {' or '.join(DESCRIBED)}", field="compile")
    reason = aot.available()
    if reason is not None:
        raise ConfigError(f"compile: {reason} (docs/kernels.md lists the wheels)", field="compile")


def compiled_steps(
    model: str, sharding: Sharding, weight_bytes: int, config: EngineConfig
) -> tuple[dict[str, Any], ...]:
    """The figures of the steps that ``explain_sharding`` looks at, compiled for the H200s of one group of
    ``sharding``, with the attention that an engine would have there.

    Args:
        weight_bytes: on a device.

    Raises:
        ConfigError: the sharding or an option cannot be honoured for this model.
    """
    found = find(model, dtype=config.model.dtype)
    mesh = mesh_of(sharding, aot.h200(sharding.group_size))
    rules = ShardRules.of_sharding(sharding, mesh.shape)
    config = partitionable(config, rules, "cuda")
    name, _ = chosen_attention(found.arch, config, found.dtype, "cuda", CAPABILITY)
    attention, page_size = backend(name, "cuda"), config.cache.on("cuda").page_size
    n_row_pages = ROW_TOKENS // page_size
    made = StepModel(
        family=found.family,
        arch=found.arch,
        backend=attention,
        dims=StepDims(C=SLOTS, M=n_row_pages, Z=page_size, V=found.arch.V),
        mesh=mesh,
        rules=rules,
        n_pages=1 + SLOTS * n_row_pages,
        kv_dtype=attention.kv_dtype(found.dtype),
        dtype=found.dtype,
    )
    graphs = config.device.cuda_graphs
    reports = [compile_step(made, bucket, graphs) for bucket in BUCKETS]
    return tuple(_figures(r, weight_bytes) | exchanged(r.hlo, mesh.shape) for r in reports)


def exchanged(hlo: str, sizes: Mapping[str, int]) -> dict[str, float]:
    """Bytes of the results of a program's collectives on a device, those of branches that few steps take left out, and
    the time that H200s are expected to take for them, each over all devices."""
    usual = [each for each in of_program(hlo) if not each.rare]
    return {
        "collective_mib": sum(each.n_bytes for each in usual) / 2**20,
        "collective_ms": sum(link_s(each, sizes, CHIPS[DESCRIBED[0]]) for each in usual) * 1e3,
    }


def compile_step(model: StepModel, bucket: Bucket, cuda_graphs: str = "step") -> aot.Report:
    """The step of one bucket, compiled as ``Programs`` would with option ``cuda_graphs``, for the described devices of
    ``model.mesh``."""
    whole = NamedSharding(model.mesh, PartitionSpec())
    size = buffer_size(model.fields(bucket))
    buf: Any = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=whole)
    args = (model.abstract_params(), model.abstract_state(), buf)
    options = compile_options("cuda", cuda_graphs)
    return aot.compile_for(make_step(model, bucket), *args, donate=(1,), options=options)


def _figures(report: aot.Report, weight_bytes: int) -> dict[str, Any]:
    moved = report.module.moved("state.kv")
    return {
        "bytes_without_kv": moved,
        "bytes_over_weights": round(moved / weight_bytes, 4),
        "flops": report.flops,
        "temp_bytes": report.temp_bytes,
        "launches": len(report.launches()),
        "nodes": report.nodes(),
        "spilled_bytes": report.spills,
        "collectives": dict(Counter(report.collectives())),
    }
