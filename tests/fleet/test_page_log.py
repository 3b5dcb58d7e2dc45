"""What a page cache tells of its pages is what can be found in it, under the names that routers use."""

from __future__ import annotations

import dataclasses
import random

import pytest

from jserve.config import EngineConfig
from jserve.engine.view import PageEvent
from jserve.fleet.describe import view_of
from jserve.fleet.page_log import PageLog
from jserve.fleet.pages import PageIndex, digests_of
from jserve.fleet.router import ReplicaRouter
from jserve.kv.radix import Node
from jserve.kv.tiers import digest_of
from jserve.sched.cache.retention import root_of
from jserve.sched.scheduler import Scheduler
from jserve.sim.costs import Device
from jserve.sim.simulate import Setup, limits_of
from tests.fleet.test_same_choice import Costs
from tests.sched.sched_drive import Drive, limits, request


@pytest.mark.parametrize("seed", range(6))
def test_the_events_say_what_can_be_found(seed):
    rng = random.Random(seed)
    drive = Drive(limits(n_pages=20))
    cache, log, index = drive.scheduler.resources.cache, PageLog(), PageIndex()
    cache.listener = log
    asked = []
    for i in range(30):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
        asked.append(request(f"r{i}", prompt, salt=rng.choice(["", "s"]), max_tokens=6))
        drive.add(asked[-1])
        for _ in range(rng.randrange(12)):
            drive.step()
        if rng.random() < 0.1:
            drive.run()
            cache.clear()
        index.update(0, log.take())
        for req in asked:
            known = cache.n_known(root_of(req), req.prompt_ids)
            names = digests_of(root_of(req), req.prompt_ids, cache.page_size)
            assert index.known(names, 1).tolist() == [known]
    assert cache.tree.n_evicted > 0
    assert len(index) == cache.tree.n_nodes
    drive.run()


def test_events_are_given_once():
    log, root = PageLog(), Node(None, ("", "", None), 0)
    node = Node(root, (1, 2, 3, 4), 7)
    log.added(node)
    log.removed(node)
    name = digest_of(node)[:8]
    assert [(e.added, e.digest) for e in log.take()] == [(True, name), (False, name)]
    assert log.take() == []


@pytest.mark.parametrize("window", [0, 64])
def test_with_a_window_pages_in_the_middle_may_be_gone(window):
    """The view says so, and then the router looks up every page."""
    device = Device(name="x", costs=Costs(), n_pages=40, max_model_len=256, host_s=0.0)
    setup = Setup(
        config=EngineConfig.of(page_size=16, max_num_seqs=4),
        device=dataclasses.replace(device, window=window),
    )
    view = view_of(Scheduler(limits_of(setup), setup.config), 0)
    assert view.slides == (window > 0)
    router, names = ReplicaRouter(1), (b"1", b"2", b"3")
    router.update(0, view, [PageEvent(True, name) for name in names])
    assert router.pages.known(names, 1).tolist() == [3]
    if window:
        router.update(0, view, [PageEvent(False, b"2")])
        assert router.pages.known(names, 1).tolist() == [1]
