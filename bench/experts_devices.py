"""A layer of experts over four CPU devices: whole experts on each against a part of each, by how evenly tokens choose.

    python -m bench.experts_devices [--tokens 1,16,64,256] [--turns 15] [--json FILE]

The devices are XLA's forced ones, which share the cores of this machine: a step takes as long as the work of all of
them, not as that of the fullest. So each line has the fullest device's load over the mean beside the time: about what
a step of real devices would take at best. Ways take turns; weights and tokens are random, in bfloat16, and experts are
drawn evenly or by Zipf's law. ``eplb`` has an eighth of spare slots, placed for loads of other draws.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from bench import report
from bench.experts import compiled, drawn, seconds
from bench.probe import record
from jserve.model import native
from jserve.model.arch import Moe
from jserve.model.collectives import reduce
from jserve.model.mesh import make_mesh
from jserve.model.moe import routed
from jserve.model.moe_places import Placement, slots_of
from jserve.model.shard import Axes, ShardRules
from jserve.runner import eplb

N = 4
"""Forced devices."""
D, MOE = 1024, Moe(E=64, X=4, F=256)
SPARE = MOE.E // 8
LAWS = {"even": 0.0, "zipf": 1.0}
"""How experts are drawn -> the exponent of their chances."""
HEAD = "law      T      tp ms      ep ms    eplb ms     ep/tp    eplb/tp    load ep   load eplb"
SHOWN = (
    "{law:5} {tokens:4d} {tp_ms:10.2f} {ep_ms:10.2f} {eplb_ms:10.2f} {ep_of_tp:9.2f} {eplb_of_tp:10.2f}"
    " {load_ep:10.2f} {load_eplb:11.2f}"
)


def chances(law: str) -> np.ndarray:
    """Of each expert; busy ones are anywhere."""
    p = 1.0 / np.arange(1, MOE.E + 1) ** LAWS[law]
    return np.random.default_rng(1).permutation(p / p.sum())


def choices(law: str, T: int, seed: int) -> np.ndarray:
    """int32[T, X]: different experts of each token."""
    rng, p = np.random.default_rng(seed), chances(law)
    scores = np.log(p) + rng.gumbel(size=(T, MOE.E))
    return np.argsort(-scores, axis=1)[:, : MOE.X].astype(np.int32)


def loads(law: str) -> np.ndarray:
    """Tokens of each expert, of draws that no timing uses."""
    return np.bincount(choices(law, 4096, 999).ravel(), minlength=MOE.E)


class Way:
    """The layer on a mesh.

    Args:
        n: devices.
        ep: those with different experts.
        slot_S: the expert of each slot; None: a slot for each expert.
    """

    def __init__(self, n: int, ep: int, slot_S: np.ndarray | None = None) -> None:
        self.n, mesh = n, make_mesh(n // ep, ep=ep)
        rules = ShardRules.of_mesh(mesh.shape, 0 if slot_S is None else SPARE)
        self.axes = Axes.of(rules, mesh.shape)
        self.slot_S = order = np.arange(MOE.E) if slot_S is None else slot_S
        specs = {
            "expert_gate_up": rules.partition(("experts", "ffn_expert", "embed")),
            "expert_down": rules.partition(("experts", "embed", "ffn_expert")),
        }
        w = np.asarray(drawn((2 * MOE.E, MOE.F, D), 2, None)).reshape(MOE.E, 2, MOE.F, D)[order]
        self.params = jax.device_put(
            {
                "expert_gate_up": w.reshape(-1, MOE.F, D),
                "expert_down": np.asarray(drawn((MOE.E, D, MOE.F), 3, None))[order],
            },
            {name: jax.sharding.NamedSharding(mesh, spec) for name, spec in specs.items()},
        )
        table = [jnp.asarray(x) for x in eplb.slots_by_expert(order, MOE.E, 1 + SPARE)]
        self.places = None if slot_S is None else Placement(slot_ER=table[0], n_E=table[1])
        whole = PartitionSpec()
        self.function = jax.shard_map(
            partial(_layer, self.axes),
            mesh=mesh,
            in_specs=(specs, whole, whole, whole, whole),
            out_specs=whole,
            check_vma=False,
        )

    def args(self, law: str, T: int, seed: int) -> tuple[Any, ...]:
        rng = np.random.default_rng(seed)
        x_TD = rng.standard_normal((T, D)).astype(np.float32)
        pos_T = rng.integers(0, 4096, T).astype(np.int32)
        return self.params, self.places, x_TD, choices(law, T, seed), pos_T


def _layer(axes: Axes, p: Any, places: Any, x_TD: Any, expert_TX: Any, pos_T: Any) -> jax.Array:
    slots = p["expert_down"].shape[0]
    slot_TX = slots_of(expert_TX, pos_T, MOE.E, slots, axes.experts, places)
    held = Moe(E=slots, X=MOE.X, F=MOE.F)
    weight_TX = jnp.full(expert_TX.shape, 1.0 / MOE.X, jnp.float32)
    return reduce(routed(held, p, x_TD, slot_TX, weight_TX), axes.routed)


def ways_of(law: str, n: int) -> dict[str, Way]:
    placed = eplb.place(loads(law), n, MOE.E + SPARE, np.arange(MOE.E + SPARE) % MOE.E)
    return {"tp": Way(n, 1), "ep": Way(n, n), "eplb": Way(n, n, placed)}


def measure(law: str, ways: dict[str, Way], T: int, turns: int, level: str) -> dict[str, Any]:
    """A line of the record."""
    programs = {
        name: compiled(way.function, level, *way.args(law, T, 0)) for name, way in ways.items()
    }
    outputs = [np.asarray(programs[name](*ways[name].args(law, T, 0))) for name in ways]
    for other in outputs[1:]:
        np.testing.assert_allclose(other, outputs[0], atol=0.05 * np.ptp(outputs[0]))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            times[name].append(seconds(programs[name], *way.args(law, T, turn)))
    ms = {name: statistics.median(t[1:]) * 1e3 for name, t in times.items()}
    counts = [np.bincount(choices(law, T, turn).ravel(), minlength=MOE.E) for turn in range(turns)]
    spread = {
        name: statistics.mean(
            eplb.imbalance(count, ways[name].slot_S, ways[name].n) for count in counts
        )
        for name in ("ep", "eplb")
    }
    return {
        "law": law,
        "tokens": T,
        **{f"{name}_ms": round(value, 3) for name, value in ms.items()},
        "ep_of_tp": round(ms["ep"] / ms["tp"], 3),
        "eplb_of_tp": round(ms["eplb"] / ms["tp"], 3),
        "load_ep": round(spread["ep"], 3),
        "load_eplb": round(spread["eplb"], 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.experts_devices", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", default="1,16,64,256", help="numbers of tokens")
    parser.add_argument("--turns", type=int, default=15, help="calls of each way (15)")
    parser.add_argument("--json", type=Path, default=None, help="result file to write")
    args = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", N)
    level, _ = native.available("cpu", jnp.bfloat16)
    print(HEAD, flush=True)
    lines = []
    for law in LAWS:
        ways = ways_of(law, N)
        for T in map(int, args.tokens.split(",")):
            lines.append(measure(law, ways, T, args.turns, level))
            print(SHOWN.format(**lines[-1]), flush=True)
    shape = {"width": D, "experts": MOE.E, "of_a_token": MOE.X, "expert_width": MOE.F}
    if args.json is not None:
        how = {"level": level, "turns": args.turns, "devices": N, "spare": SPARE, **shape}
        report.write(record("experts-devices", how, lines), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
