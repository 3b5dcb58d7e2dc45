"""The simulator chooses replicas as a live front does: the same trace through both, compared request by request."""

from __future__ import annotations

from typing import Any

import pytest

from jserve.config import EngineConfig
from jserve.fleet.candidates import PREFILL
from jserve.fleet.roles import DECODE
from jserve.sim import traffic
from jserve.sim.costs import Device
from jserve.sim.faults import DEATH, HANG, ReplicaFault
from jserve.sim.simulate import Setup
from tests.fleet.virtual import Choices, RecordedSimulation, live_choices, simulated_choices

TRACES = {
    "prefixes": "prefixes=24,prefix=400,zipf=0,prompt=60,prompt_sigma=0.2,output=40,context=1000,rate=12",
    "sessions": "rate=3,prompt=100,output=60,turns=3,think=1,context=1500",
    "popular": "prefixes=40,prefix=600,zipf=1,prompt=60,output=80,context=1500,rate=10",
    "overload": "prefixes=12,prefix=200,zipf=1,prompt=60,output=60,context=1000,rate=60",
}
LONG = "prefixes=8,prefix=300,zipf=0,prompt=700,prompt_sigma=0.5,output=80,context=2000,rate=4"


class Costs:
    """A device whose steps grow with all that is in them."""

    def seconds(self, n_decode: int, n_prefill: int, n_context: int) -> float:
        return 0.008 + 1e-4 * n_decode + 1e-4 * n_prefill + 2e-8 * n_decode * n_context


def setup(**changes: Any) -> Setup:
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "page_size": 16}
    calm = {"max_queue_s": 0, "max_waiting": 10_000}
    pages = {"n_pages": 600, "page_bytes": 1 << 20, "move_s": 4e-5}
    device = Device(name="x", costs=Costs(), max_model_len=4096, host_s=0.0005, **pages)
    config = EngineConfig.of(**options, **calm)
    return Setup(**{"config": config, "device": device, "replicas": 4} | changes)


def both(text: str, made: Setup, seed: int = 1) -> tuple[Choices, Choices]:
    """(the simulator's choices, a live front's)."""
    trace = traffic.generate(traffic.parse(text), seed)
    simulated, live = simulated_choices(trace, made), live_choices(trace, made)
    assert set(live) == set(simulated) == {item.id for item in trace}
    return simulated, live


def share_of_same(name: str, n: int, router: str = "seconds") -> float:
    simulated, live = both(f"{TRACES[name]},n={n}", setup(router=router))
    assert {answers for _, answers in live.values()} == {*range(4)}
    return sum(live[id] == simulated[id] for id in live) / len(live)


def test_the_simulator_chooses_as_a_live_front():
    assert share_of_same("prefixes", 100) >= 0.95


@pytest.mark.parametrize("kind", [DEATH, pytest.param(HANG, marks=pytest.mark.slow)])
def test_requests_of_a_lost_replica_go_on_where_a_live_front_has_them_go_on(kind: str):
    """Those of three replicas, one by one, with traffic beside; the next one is ready 2 s later."""
    n_same = n_resumed = 0
    for seed in range(1, 4):
        text = "prefixes=24,prefix=400,zipf=0,prompt=60,prompt_sigma=0.2,output=120,context=1000,rate=20,n=120"
        trace = traffic.generate(traffic.parse(text), seed)
        made = RecordedSimulation(trace, setup(faults=(ReplicaFault(kind, 2.03),), start_s=2.0))
        run = made.run()
        simulated, live = made.choices, live_choices(trace, made.setup, run.outages)
        resumed = [d.id for d in run.records.done if d.n_resumed]
        n_resumed += len(resumed)
        n_same += sum(live[id] == simulated[id] for id in resumed)
        assert sum(live[id] == simulated[id] for id in live) >= 0.95 * len(live)
    print(f"{kind}: {n_same} of {n_resumed} requests went on at the same replica")
    assert n_resumed >= 15
    assert n_same >= 0.95 * n_resumed


@pytest.mark.slow
def test_with_roles_it_has_prompts_computed_where_a_live_front_has():
    made = setup(roles={PREFILL: 1, DECODE: 3}, transfer_gb_s=2.0)
    simulated, live = both(f"{LONG},n=120", made, seed=5)
    apart = [prompts for prompts, _ in live.values() if prompts is not None]
    assert 10 <= len(apart) < len(live), "some are computed apart and some are not"
    assert (set(apart), {answers for _, answers in live.values()}) == ({3}, {0, 1, 2})
    assert sum(live[id] == simulated[id] for id in live) >= 0.95 * len(live)


@pytest.mark.slow
@pytest.mark.parametrize("router", ["seconds", "lmetric", "round_robin"])
@pytest.mark.parametrize("name", TRACES)
def test_it_does_so_with_any_traffic(name: str, router: str):
    share = share_of_same(name, 150 if name == "sessions" else 400, router)
    print(f"{name}, {router}: {100 * share:.1f} % of choices are the same")
    assert share >= 0.95
