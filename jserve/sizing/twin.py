"""Measures the time of a step's collectives that nothing else hides: a step's less that of its twin without them.

The twin is the traced step in which each collective is replaced by work of one device with a result of the same shape::

    all-reduce      the device's own part           reduce-scatter  the first of its rows
    all-gather      its own part, repeated          all-to-all      its own parts, in the other order

Its results mean nothing, so it runs on a state that nobody reads afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jserve.model.step import make_step
from jserve.model.view import Bucket
from jserve.runner.runner import ModelRunner
from jserve.sizing.explain import PRIMITIVES, of_program, traced

WARM = 3
"""Steps of each program that are not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Of a program on the devices here; medians."""

    decode_rows: int
    prefill_tokens: int
    collectives: int
    collective_mib: float
    """Of their results on a device. Those of branches that few steps take are left out."""
    step_ms: float
    exposed_ms: float | None
    """Of ``step_ms``, what the twin does not take; 0 where noise is more. None: mode auto, whose steps have no twin."""


def step_cost(runner: ModelRunner, bucket: Bucket, repeats: int) -> StepCost:
    """Times a step of made-up greedy rows that fill ``bucket``, and its twin, compiled alike, in turns. What slots and
    pages hold is lost; nothing is in flight. The collectives of mode auto are in no trace, but in the program's text.
    """
    args, programs = runner.made_up(bucket), [runner.programs.step(bucket)]
    if runner.model.rules.auto:
        found = of_program(runner.programs.hlo(bucket))
    else:
        closed, twin = _twin(runner, bucket, args)
        found = traced(closed.jaxpr)
        programs.append(twin)
    params, state, buf = args
    seconds: list[list[float]] = [[] for _ in programs]
    for turn in range(WARM + repeats):
        for program, taken in zip(programs, seconds, strict=True):
            began = time.perf_counter()
            state, out = program(params, state, buf)
            jax.block_until_ready((state, out))
            if turn >= WARM:
                taken.append(time.perf_counter() - began)
    runner.state = state
    usual = [c for c in found if not c.rare]
    whole, *alone = map(median, seconds)
    return StepCost(
        decode_rows=bucket.D,
        prefill_tokens=bucket.P,
        collectives=sum(c.count for c in usual),
        collective_mib=sum(c.n_bytes for c in usual) / 2**20,
        step_ms=whole * 1e3,
        exposed_ms=max(0.0, whole - alone[0]) * 1e3 if alone else None,
    )


def _twin(runner: ModelRunner, bucket: Bucket, args: Any) -> tuple[core.ClosedJaxpr, Any]:
    """(the step as traced, its twin as compiled)."""
    step = make_step(runner.model, bucket)
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
    tree = jax.tree.structure(shapes)

    def twin(*args: Any) -> Any:
        flat = core.jaxpr_as_fun(without_collectives(closed))(*jax.tree.leaves(args))
        return jax.tree.unflatten(tree, flat)

    lowered, options = jax.jit(twin, donate_argnums=(1,)).lower(*args), runner.programs.options
    return closed, lowered.compile(dict(options or {}))


def without_collectives(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same, inner functions too, with local work in place of each collective."""
    return core.ClosedJaxpr(_local(closed.jaxpr), closed.consts)


def _local(jaxpr: core.Jaxpr) -> core.Jaxpr:
    return jaxpr.replace(eqns=[made for eqn in jaxpr.eqns for made in _equations(eqn)])


def _equations(eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    if eqn.primitive.name not in PRIMITIVES:
        yield eqn.replace(params={name: _inner(value) for name, value in eqn.params.items()})
        return
    for given, out in zip(eqn.invars, eqn.outvars, strict=True):
        yield from _in_place_of(eqn, given, out)


def _inner(value: Any) -> Any:
    """A parameter of an equation, with the functions in it."""
    if isinstance(value, core.ClosedJaxpr):
        return without_collectives(value)
    if isinstance(value, core.Jaxpr):
        return _local(value)
    if isinstance(value, tuple) and any(isinstance(x, core.ClosedJaxpr) for x in value):
        return tuple(map(_inner, value))
    return value


def _in_place_of(eqn: core.JaxprEqn, given: Any, out: Any) -> Iterator[core.JaxprEqn]:
    """Equations that give ``out`` by work on ``given`` alone."""
    shape = jax.ShapeDtypeStruct(given.aval.shape, given.aval.dtype)
    local = jax.make_jaxpr(_stand_in(eqn, out.aval.shape))(shape).jaxpr
    [result] = local.outvars
    assert result.aval.shape == out.aval.shape, f"no stand-in for {eqn.primitive.name}"
    places: dict[Any, Any] = {local.invars[0]: given, result: out}

    def placed(x: Any) -> Any:
        return places.get(x, x) if isinstance(x, core.Var) else x

    for each in local.eqns:
        yield each.replace(
            invars=[placed(x) for x in each.invars], outvars=[placed(x) for x in each.outvars]
        )


def _stand_in(eqn: core.JaxprEqn, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    """Another function from the collective's operand to ``shape``."""

    def repeated(x: jax.Array) -> jax.Array:
        axis = eqn.params["all_gather_dimension"]
        if eqn.params["tiled"]:
            return jnp.concatenate([x] * (shape[axis] // x.shape[axis]), axis)
        return jnp.stack([x] * shape[axis], axis)

    def first(x: jax.Array) -> jax.Array:
        axis = eqn.params["scatter_dimension"]
        return jax.lax.slice_in_dim(x, 0, shape[axis], axis=axis)

    def turned(x: jax.Array) -> jax.Array:
        return x.reshape(shape) * jnp.ones((), x.dtype)

    by_name = {"all_gather": repeated, "reduce_scatter": first, "all_to_all": turned}
    return by_name.get(eqn.primitive.name, lambda x: jax.lax.optimization_barrier(x))
