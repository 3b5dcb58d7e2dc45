"""Allocates the device state that persists across steps.

It owns the creation of ``DeviceState``: the KV of each layer and the slot rows, zeroed in place on their shards.

One layer's keys and values are two arrays of the backend's shape, split over the kv heads::

    kv[l] = (keys, values)   e.g. [pages, K, Z, H], page 0 scratch; along K: | device 0 | device 1 |
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jserve.model.step import DeviceState, StepModel
from jserve.runner.compiler import Compiler


def state_maker(model: StepModel, compiler: Compiler | None = None) -> Callable[[], DeviceState]:
    """Makes a zeroed state laid out on the model's mesh; no call compiles."""
    abstract = model.abstract_state()

    def zeros() -> DeviceState:
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract)

    jitted = jax.jit(zeros, out_shardings=model.state_shardings())
    return (compiler or Compiler())("new_state", jitted)


def new_state(model: StepModel) -> DeviceState:
    """A zeroed state, for those who need one only."""
    return state_maker(model)()
