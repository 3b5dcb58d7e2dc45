"""What a page cache tells of its pages is what can be found in it, under the names that routers use."""

from __future__ import annotations

import random

import pytest

from jserve.fleet.page_log import PageLog
from jserve.fleet.pages import PageIndex, digests_of
from jserve.kv.radix import Node
from jserve.kv.tiers import digest_of
from jserve.sched.cache.retention import root_of
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
            assert index.known(names, 1) == [known]
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
    assert log.n_taken == 2
