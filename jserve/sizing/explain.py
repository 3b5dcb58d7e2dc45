"""Explains a sharding: where each weight of a model lies, and which collectives its steps have.

It owns ``explain_sharding``. Nothing is loaded, and mode manual needs no devices: its steps are traced on an abstract
mesh. The collectives of mode auto are XLA's, so they are known only once it has compiled a step for as many devices.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, Mesh

from jserve.model.hand import step_model_of
from jserve.model.mesh import MeshAxis, abstract_mesh, mesh_of, n_parts
from jserve.model.moe_specs import check_has_experts
from jserve.model.param_spec import ParamSpec, is_spec
from jserve.model.shard import ShardRules
from jserve.model.step import StepModel, make_step
from jserve.model.view import Bucket, buffer_size
from jserve.sharding import Sharding
from jserve.sizing.models import find
from jserve.weights.place import placed

BUCKETS = (Bucket(D=8, P=0, F=0), Bucket(D=2, P=256, F=1))
"""A step of eight sequences, and one of 256 prompt tokens."""
PRIMITIVES = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "reduce_scatter": "reduce-scatter",
}
"""The primitives of ``model.collectives`` -> what XLA calls them."""
_KINDS = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "pred": "bool"}
_HLO = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_ARRAY = re.compile(r"(f|bf|s|u|pred)(\d*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:to_apply|calls|body|condition|\w+_computations?)=(?:\{([^}]*)\}|(%[\w.-]+))"
)
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%[\w.-]+))")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlace:
    """One parameter on the mesh."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    partition: tuple[MeshAxis, ...]
    """Mesh axes of each dimension."""
    device_bytes: int
    """On each device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Collectives of one step that are alike."""

    op: str
    """As XLA calls it: all-reduce, all-gather ..."""
    axes: tuple[str, ...]
    """Mesh axes; () where XLA chose the devices."""
    dtype: str
    shape: tuple[int, ...]
    """Of the result on a device."""
    count: int
    rare: bool = False
    """Of branches that a step takes only where a request asks for it."""

    @property
    def n_bytes(self) -> int:
        """Of all their results on a device."""
        return self.count * math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCollectives:
    """The collectives of one program."""

    decode_rows: int
    prefill_tokens: int
    collectives: tuple[Collective, ...] | None
    """None: mode auto, and this process has not as many devices."""

    @property
    def usual(self) -> tuple[Collective, ...]:
        """Those of every step."""
        return tuple(c for c in self.collectives or () if not c.rare)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """The weights of a model on a mesh, and the collectives of its steps."""

    model: str
    sharding: Sharding
    weights: tuple[WeightPlace, ...]
    programs: tuple[StepCollectives, ...]

    @property
    def device_bytes(self) -> int:
        """Of all weights, on each device."""
        return sum(weight.device_bytes for weight in self.weights)


def explain_sharding(
    model: str, sharding: Sharding | Mapping[str, Any] | str | Path, *, dtype: str = "auto"
) -> Explained:
    """Finds the places of the weights of ``model`` under ``sharding``, and the collectives of two of its steps.

    Args:
        model: a directory, config.json, hub name or known shape.
        sharding: as ``Sharding.of`` takes it; it states a mesh.
        dtype: of weights; ``auto`` is the model's.

    Raises:
        ConfigError: the sharding cannot be honoured for this model; ``field`` is its key.
    """
    asked, found = Sharding.of(sharding), find(model, dtype=dtype)
    mesh: Any = _mesh(asked)
    rules = ShardRules.of_sharding(asked, mesh.shape)
    check_has_experts(found.arch, rules, mesh.shape)
    placed(partial(found.family.specs, found.arch), mesh, rules)
    made = step_model_of(found.family, found.arch, mesh=mesh, rules=rules, dtype=found.dtype)
    return Explained(
        model=found.name,
        sharding=asked,
        weights=tuple(_places(made)),
        programs=tuple(_program(made, bucket) for bucket in BUCKETS),
    )


def _mesh(sharding: Sharding) -> Mesh | AbstractMesh:
    """Real devices only for XLA's partitioner, and only where there are enough of them."""
    sizes = sharding.sizes
    if sharding.mode == "auto" and sharding.n_devices <= len(jax.devices()):
        return mesh_of(sharding)
    return abstract_mesh(sizes)


def _places(model: StepModel) -> Iterator[WeightPlace]:
    found = jax.tree_util.tree_leaves_with_path(model.specs(), is_leaf=is_spec)
    for path, spec in found:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axes = tuple(model.rules.partition(spec.axes))
        dtype = jnp.dtype(spec.dtype or model.dtype)
        yield WeightPlace(
            path=name,
            shape=spec.shape,
            dtype=dtype.name,
            partition=axes,
            device_bytes=_numbers(spec, axes, model.mesh.shape) * dtype.itemsize,
        )


def _numbers(spec: ParamSpec, axes: tuple[MeshAxis, ...], sizes: Mapping[str, int]) -> int:
    """Of a parameter, on one device."""
    pairs = zip(spec.shape, axes, strict=True)
    return math.prod(-(-n // n_parts(axis, sizes)) for n, axis in pairs)


def _program(model: StepModel, bucket: Bucket) -> StepCollectives:
    buf = jax.ShapeDtypeStruct((buffer_size(model.fields(bucket)),), jnp.int32)
    step = make_step(model, bucket)
    args = (model.abstract_params(), model.abstract_state(), buf)
    found: list[Collective] | None = None
    if not model.rules.auto:
        found = list(traced(jax.make_jaxpr(step)(*args).jaxpr))
    elif isinstance(model.mesh, Mesh):
        program = jax.jit(step, donate_argnums=1).lower(*args).compile()
        found = list(of_program(program.as_text() or ""))
    return StepCollectives(
        decode_rows=bucket.D if not bucket.F else 0,
        prefill_tokens=bucket.P,
        collectives=None if found is None else tuple(found),
    )


def traced(jaxpr: Any) -> Iterator[Collective]:
    """The collectives that our code asks for, those that are alike together."""
    counts = Counter(_equations(jaxpr))
    for (op, axes, dtype, shape, rare), count in counts.items():
        yield Collective(op=op, axes=axes, dtype=dtype, shape=shape, count=count, rare=rare)


def traced_collectives(jaxpr: Any) -> Iterator[str]:
    """``op dtype[shape] over axes`` of every collective that our code asks for."""
    for op, axes, dtype, shape, _ in _equations(jaxpr):
        yield f"{op} {dtype}[{','.join(map(str, shape))}] over {','.join(axes)}"


def _equations(jaxpr: Any, *, rare: bool = False) -> Iterator[tuple[Any, ...]]:
    """(op, axes, dtype, shape, rare) of every collective, those of inner functions each time that they are called. Of
    the branches of a conditional all but the one with the fewest are ``rare``."""
    for eqn in jaxpr.eqns:
        if op := PRIMITIVES.get(eqn.primitive.name):
            axes = eqn.params.get("axes") or eqn.params["axis_name"]
            names = (axes,) if isinstance(axes, str) else tuple(axes)
            for out in eqn.outvars:
                yield op, names, out.aval.dtype.name, tuple(out.aval.shape), rare
        inner = [list(_equations(each, rare=rare)) for each in jaxprs_in_params(eqn.params)]
        fewest = min(inner, key=len, default=[])
        for found in inner:
            unusual = eqn.primitive.name == "cond" and found is not fewest
            yield from ((*one[:-1], True) for one in found) if unusual else found


def of_program(text: str) -> Iterator[Collective]:
    """Of a program's text as XLA made it, those that are alike together. Of the branches of a conditional all but the
    one with the fewest are ``rare``, and so is what these alone call."""
    blocks = re.split(r"\n(?=(?:ENTRY )?%\S+ \()", text)
    bodies = {block.removeprefix("ENTRY ").split(" ", 1)[0]: block for block in blocks}
    found = {name: list(map(_result, _HLO.findall(body))) for name, body in bodies.items()}
    called = {
        name: {each for pair in _CALLED.findall(body) for each in _names(pair)} & bodies.keys()
        for name, body in bodies.items()
    }

    @cache
    def number(name: str) -> int:
        return len(found.get(name, ())) + sum(map(number, called.get(name, ())))

    def taken(name: str) -> set[str]:
        rare = set[str]()
        for line in bodies[name].splitlines():
            names = [each for pair in _BRANCHES.findall(line) for each in _names(pair)]
            rare |= {*sorted(names, key=number)[1:]}
        return called[name] - rare

    usual = {name for name, body in bodies.items() if body.startswith("ENTRY ")}
    while more := {each for name in usual for each in taken(name)} - usual:
        usual |= more
    counts = Counter((*one, name not in usual) for name, each in found.items() for one in each)
    for (op, dtype, shape, unusual), count in counts.items():
        yield Collective(op=op, axes=(), dtype=dtype, shape=shape, count=count, rare=unusual)


def _names(pair: tuple[str, str]) -> list[str]:
    return [name.strip() for name in ",".join(pair).split(",") if name.strip()]


def _result(match: tuple[str, str, str]) -> tuple[str, str, tuple[int, ...]]:
    """(op, dtype, shape) of the result; several arrays in one collective count as one of so many numbers. What begins
    an asynchronous one has its operands first, but for an all-reduce."""
    arrays, op, is_start = _ARRAY.findall(match[0]), match[1], bool(match[2])
    if is_start and op == "collective-permute":
        arrays = arrays[1:2]
    elif is_start and op != "all-reduce":
        arrays = arrays[len(arrays) // 2 :]
    typed = [(f"{_KINDS[kind]}{bits}", dims) for kind, bits, dims in arrays]
    shapes = [tuple(int(n) for n in dims.split(",") if n) for _, dims in typed]
    dtype = typed[0][0]
    if len(shapes) == 1:
        return op, dtype, shapes[0]
    pairs = zip(typed, shapes, strict=True)
    n_bytes = sum(math.prod(shape) * jnp.dtype(name).itemsize for (name, _), shape in pairs)
    return op, dtype, (n_bytes // jnp.dtype(dtype).itemsize,)
