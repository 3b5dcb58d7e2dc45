"""The simulator chooses replicas as a live front does: the same trace through both, compared request by request."""

from __future__ import annotations

import pytest

from jserve.config import EngineConfig
from jserve.sim import traffic
from jserve.sim.costs import Device
from jserve.sim.simulate import Setup
from tests.fleet.virtual import live_choices, simulated_choices

TRACES = {
    "prefixes": "prefixes=24,prefix=400,zipf=0,prompt=60,prompt_sigma=0.2,output=40,context=1000,rate=12",
    "sessions": "rate=3,prompt=100,output=60,turns=3,think=1,context=1500",
    "popular": "prefixes=40,prefix=600,zipf=1,prompt=60,output=80,context=1500,rate=10",
    "overload": "prefixes=12,prefix=200,zipf=1,prompt=60,output=60,context=1000,rate=60",
}


class Costs:
    """A device whose steps grow with all that is in them."""

    def seconds(self, n_decode: int, n_prefill: int, n_context: int) -> float:
        return 0.008 + 1e-4 * n_decode + 1e-4 * n_prefill + 2e-8 * n_decode * n_context


def setup(router: str = "seconds") -> Setup:
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "page_size": 16}
    calm = {"max_queue_s": 0, "max_waiting": 10_000}
    device = Device(name="x", costs=Costs(), n_pages=600, max_model_len=4096, host_s=0.0005)
    config = EngineConfig.of(**options, **calm)
    return Setup(config=config, device=device, replicas=4, router=router)


def share_of_same(name: str, n: int, router: str = "seconds") -> float:
    trace = traffic.generate(traffic.parse(f"{TRACES[name]},n={n}"), 1)
    made = setup(router)
    simulated, live = simulated_choices(trace, made), live_choices(trace, made)
    assert set(live) == set(simulated) == {item.id for item in trace}
    assert len(set(live.values())) == made.replicas
    return sum(live[id] == simulated[id] for id in live) / len(live)


def test_the_simulator_chooses_as_a_live_front():
    assert share_of_same("prefixes", 100) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("router", ["seconds", "lmetric", "round_robin"])
@pytest.mark.parametrize("name", TRACES)
def test_it_does_so_with_any_traffic(name: str, router: str):
    share = share_of_same(name, 150 if name == "sessions" else 400, router)
    print(f"{name}, {router}: {100 * share:.1f} % of choices are the same")
    assert share >= 0.95
