"""Moves experts between devices while requests run, and tells which of them have how much to do.

It owns the table of slots of every layer, the programs that copy experts from slot to slot, and when loads are read.
Copies go into the device's queue between two steps, and each of them changes weights and table in one program, so a
step always sees a pair that belongs together::

    launch k       loads -> copy to host begins            every LOAD_STEPS steps
    launch k+1     window of loads += copy                 every eplb_step_interval steps: plans, a layer before a step
    launch k+2...  move, move -> new weights and table     MOVES of them before each step, until all are done
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jserve.config import DeviceOptions
from jserve.errors import ConfigError
from jserve.model.arch import Arch, Moe
from jserve.model.family import Family
from jserve.model.moe_places import ExpertState, Placement, copied, n_routed
from jserve.model.param_spec import is_spec
from jserve.model.shard import ShardRules, abstract
from jserve.model.step import StepModel
from jserve.runner import eplb
from jserve.runner.compiler import Compiler

LOAD_STEPS = 64
"""Steps between two readings of the loads, or ``eplb_step_interval`` where that is less."""
MOVES = 2
"""Moves before one step."""
EVEN = 1.05
"""Load of a layer's fullest device over the mean, up to which its experts stay."""
WIDTH = 2
"""Slots that one move writes at most."""


def check_experts(options: DeviceOptions, family: Family, arch: Arch, rules: ShardRules) -> None:
    """Refuse options of experts that a model cannot honour.

    Raises:
        ConfigError: ``field`` is the option.
    """
    has_experts = any(isinstance(layer.ffn, Moe) for layer in arch.layers)
    asked = ("enable_eplb", "expert_load_metrics", "num_redundant_experts")
    for name in (name for name in asked if getattr(options, name)):
        if not has_experts or family.counted is None:
            raise ConfigError(f"{name}: the model has no experts that can be counted", field=name)
    if options.enable_eplb and rules.axis("experts") is None:
        why = "enable_eplb needs an expert_parallel_size above 1"
        raise ConfigError(why, field="enable_eplb")


class ExpertBalancer:
    """The experts of one engine.

    Args:
        model: with ``experts``.
        options: ``enable_eplb`` and ``eplb_step_interval`` are read.
        compiler: what makes the programs.
    """

    def __init__(self, model: StepModel, options: DeviceOptions, compiler: Compiler) -> None:
        self._model, self._interval = model, options.eplb_step_interval
        self.move_experts = options.enable_eplb
        """True if experts of this engine can move."""
        self.n_layers, self.n_experts = n_routed(model.arch)
        self.n_slots = self.n_experts + model.rules.redundant_experts
        self._layers = [i for i, x in enumerate(model.arch.layers) if isinstance(x.ffn, Moe)]
        self._whole = NamedSharding(model.mesh, PartitionSpec())
        self._at = _expert_leaves(model.specs()["layers"][self._layers[0]])
        self._take = _take_program(model, compiler)
        self._move = self._move_program(compiler) if self.move_experts else None
        self.slot_LS = self._initial()
        """The expert of each slot, as the device has it once all that was launched has run."""
        self._steps = self._n_moves = self._n_plans = 0
        self._arriving: jax.Array | None = None
        self._window_LE = np.zeros((self.n_layers, self.n_experts), np.int64)
        self._total_D, self._spread = np.zeros(model.ep), _spread(1.0, 1.0, 0.0)
        self._to_plan: deque[tuple[int, np.ndarray]] = deque()
        self._to_move: deque[tuple[int, eplb.Move]] = deque()

    def initial(self) -> ExpertState:
        """The state of weights as they were loaded; to be used with these."""
        self.slot_LS = self._initial()
        self._to_plan.clear()
        self._to_move.clear()
        return self.state()

    def state(self) -> ExpertState:
        """A state with the present places, and no loads."""
        self._arriving = None
        tables = [self._table(layer) for layer in range(self.n_layers)]
        slot_LER, n_LE = (np.stack(x) for x in zip(*tables, strict=True))
        load_LE = np.zeros((self.n_layers, self.n_experts), np.int32)
        slot_ER, n_E, load = jax.device_put((slot_LER, n_LE, load_LE), self._whole)
        return ExpertState(places=Placement(slot_ER=slot_ER, n_E=n_E), load_LE=load)

    def before_step(self, params: Any, state: ExpertState) -> tuple[Any, ExpertState]:
        """(parameters, state) for the next step: loads are read when that is due, and some experts move."""
        self._steps += 1
        if self._arriving is not None:
            self._count(np.asarray(self._arriving))
            self._arriving = None
        if self._steps % min(LOAD_STEPS, self._interval) == 0:
            load_LE, empty_LE = self._take(state.load_LE)
            load_LE.copy_to_host_async()
            self._arriving = load_LE
            state = replace(state, load_LE=empty_LE)
        # A step after the loads of an interval began to come.
        if self.move_experts and self._steps > 1 and (self._steps - 1) % self._interval == 0:
            self.rebalance()
        return self._some_moves(params, state)

    def rebalance(self, load_LE: np.ndarray | None = None) -> None:
        """Begin to move experts to where these loads are even, by default those since the last time."""
        load_LE = self._window_LE.copy() if load_LE is None else load_LE
        self._window_LE[...] = 0
        self._n_plans += 1
        busy = [i for i in range(self.n_layers) if load_LE[i].any()]
        self._to_plan = deque((i, load_LE[i]) for i in busy)

    def rehearse(self, params: Any, state: ExpertState) -> Any:
        """``params`` after both programs ran: a slot got the expert that it has."""
        self._take(state.load_LE)
        if self._move is not None:
            params, state = self.move(params, state, 0, ((0, 0),))
            jax.block_until_ready(state.places)
        self._n_moves = 0
        return params

    def counters(self) -> dict[str, float]:
        """Loads for /metrics: of the steps between the last two readings, and in all."""
        by_device = {f"expert_load_total{{device={d}}}": n for d, n in enumerate(self._total_D)}
        return {
            **self._spread,
            "expert_moves_total": float(self._n_moves),
            "expert_rebalances_total": float(self._n_plans),
            **by_device,
        }

    def _initial(self) -> np.ndarray:
        slots = np.arange(self.n_slots) % self.n_experts
        return np.tile(slots, (self.n_layers, 1))

    def _count(self, load_LE: np.ndarray) -> None:
        """Take over the loads since the last reading."""
        self._window_LE += load_LE
        pairs = list(zip(load_LE, self.slot_LS, strict=True))
        self._total_D += np.sum(
            [eplb.device_loads(*pair, self._model.ep) for pair in pairs], axis=0
        )
        ratios = [eplb.imbalance(*pair, self._model.ep) for pair in pairs]
        hottest = load_LE.max(axis=1) / np.maximum(load_LE.sum(axis=1), 1)
        self._spread = _spread(np.mean(ratios), np.max(ratios), hottest.max())

    def _some_moves(self, params: Any, state: ExpertState) -> tuple[Any, ExpertState]:
        if not self._to_move and self._to_plan:
            self._plan(*self._to_plan.popleft())
        for _ in range(min(MOVES, len(self._to_move))):
            params, state = self.move(params, state, *self._to_move.popleft())
        return params, state

    def _plan(self, layer: int, load_E: np.ndarray) -> None:
        """The moves of a layer, unless its loads are even enough."""
        now_S, ep = self.slot_LS[layer], self._model.ep
        if eplb.imbalance(load_E, now_S, ep) > EVEN:
            wanted_S = eplb.place(load_E, ep, self.n_slots, now_S)
            self._to_move.extend((layer, move) for move in eplb.moves(now_S, wanted_S))

    def move(
        self, params: Any, state: ExpertState, layer: int, move: eplb.Move
    ) -> tuple[Any, ExpertState]:
        """(parameters, state) after a move in the ``layer``-th layer that has experts; both are donated."""
        assert self._move is not None, "an engine whose experts move"
        before = self.slot_LS[layer].copy()
        from_M, to_M = np.zeros(WIDTH, np.int32), np.full(WIDTH, self.n_slots, np.int32)
        for i, (source, to) in enumerate(move):
            from_M[i], to_M[i] = source, to
            self.slot_LS[layer, to] = before[source]
        at = self._layers[layer]
        flat, structure = jax.tree.flatten(params["layers"][at])
        leaves = [flat[i] for i in self._at]
        leaves, places = self._move(
            leaves, state.places, np.asarray(layer, np.int32), from_M, to_M, self._table(layer)
        )
        for i, leaf in zip(self._at, leaves, strict=True):
            flat[i] = leaf
        layers = list(params["layers"])
        layers[at] = jax.tree.unflatten(structure, flat)
        self._n_moves += 1
        return params | {"layers": layers}, replace(state, places=places)

    def _of(self, layer: Any) -> list[Any]:
        """The leaves of a layer's parameters that lie with their expert."""
        flat = jax.tree.leaves(layer)
        return [flat[i] for i in self._at]

    def _table(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        R = 1 + self._model.rules.redundant_experts
        return eplb.slots_by_expert(self.slot_LS[layer], self.n_experts, R)

    def _move_program(self, compiler: Compiler) -> Any:
        model, layer = self._model, self._layers[0]
        places = model.abstract_state().experts.places
        target = abstract(model.specs(), model.mesh, model.rules, model.dtype)
        leaves = self._of(target["layers"][layer])
        for i in self._layers:
            same = [(x.shape, x.dtype) for x in self._of(target["layers"][i])]
            if same != [(x.shape, x.dtype) for x in leaves]:
                why = "layers of experts differ in how they are quantised"
                raise ConfigError(f"enable_eplb: {why}", field="enable_eplb")

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._whole)

        table = (ints(*places.slot_ER.shape[1:]), ints(self.n_experts))
        args = (leaves, places, ints(), ints(WIDTH), ints(WIDTH), table)
        return compiler("move_experts", _jitted_move(model, leaves), *args)


def _spread(mean: Any, worst: Any, hottest: Any) -> dict[str, float]:
    """The evenness of experts' loads, by name of the metric."""
    return {
        "expert_load_max_over_mean": float(mean),
        "expert_load_max_over_mean_worst": float(worst),
        "expert_load_hottest_share": float(hottest),
    }


def _expert_leaves(layer: Any) -> list[int]:
    """Places of the parameters that lie with their expert among the leaves of a layer's specs; of a quantised one all
    parts but those that its tensors share."""
    flat = jax.tree.leaves(layer, is_leaf=is_spec)
    return [i for i, spec in enumerate(flat) if spec.experts is not None]


def _take_program(model: StepModel, compiler: Compiler) -> Any:
    """load_LE -> (a copy, zeros in its place)."""

    def take_loads(load_LE: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.copy(load_LE), jnp.zeros_like(load_LE)

    load_LE = model.abstract_state().experts.load_LE
    jitted = jax.jit(take_loads, donate_argnums=0, out_shardings=load_LE.sharding)
    return compiler("take_loads", jitted, load_LE)


def _jitted_move(model: StepModel, leaves: list[Any]) -> Any:
    """(leaves, places, layer, from_M, to_M, its table) -> (leaves, places)."""
    slots = (n_routed(model.arch)[1] + model.rules.redundant_experts) // model.ep
    cut = [leaf.sharding.spec for leaf in leaves]
    whole = PartitionSpec()
    device = jax.shard_map(
        partial(copied, slots=slots, axis=model.axes.experts),
        mesh=model.mesh,
        in_specs=(cut, whole, whole),
        out_specs=cut,
        check_vma=False,
    )

    def move_experts(
        leaves: list[jax.Array],
        places: Placement,
        layer: jax.Array,
        from_M: jax.Array,
        to_M: jax.Array,
        table: tuple[jax.Array, jax.Array],
    ) -> tuple[list[jax.Array], Placement]:
        slot_ER = places.slot_ER.at[layer].set(table[0])
        n_E = places.n_E.at[layer].set(table[1])
        return device(leaves, from_M, to_M), Placement(slot_ER=slot_ER, n_E=n_E)

    out = ([leaf.sharding for leaf in leaves], NamedSharding(model.mesh, whole))
    return jax.jit(move_experts, donate_argnums=(0, 1), out_shardings=out)
