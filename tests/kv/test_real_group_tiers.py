"""Pages of groups of layers in host memory and on disk, on the real runner in float32: after they were evicted and
after a restart it draws what it draws without tiers, and with pages of all layers."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from jserve.engine.engine import Engine
from jserve.runner.moves import identity
from jserve.runner.runner import ModelRunner
from tests.kv.test_group_tiers import (
    a_name_without_the_group,
    a_windows_page_comes_back_one_position_off,
)
from tests.kv.test_real_groups import KINDS, SHORT, W, engine_of, runner, scored
from tests.kv.test_real_reuse import BUCKETS, Z, text, tokens_of
from tests.kv.test_real_window import all_of
from tests.runner.harness import make_runner

LONG = [text(97, seed=5), text(70, seed=6)]
OTHERS = [text(90, seed=7), text(33, seed=8)]
N_HOST = 200
ALL = [pytest.param(k, marks=() if k == "gemma3" else pytest.mark.slow) for k in KINDS]


def with_tiers(kind: str, folder=None, **options) -> ModelRunner:
    disk = {"disk_dir": str(folder), "disk_gb": 0.05} if folder else {}
    gib = (N_HOST + 0.5) * runner(kind).memory.page_bytes / 2**30
    given = {"arch": KINDS[kind], "kv_groups": "on", "host_memory_gb": gib}
    return make_runner(BUCKETS, strict=True, **given | SHORT | disk | options)


@lru_cache(maxsize=2)
def with_host(kind: str) -> ModelRunner:
    return with_tiers(kind)


@lru_cache(maxsize=4)
def cold(kind: str) -> list[list[int]]:
    """With pages of all layers and no tier."""
    engine = engine_of(runner(kind, "off"))
    return [tokens_of(engine, p, f"c{i}", skip_prefix_cache=True)[0] for i, p in enumerate(LONG)]


def n_of_a_hit(kind: str, n_tokens: int) -> int:
    """Pages of the first full pages of ``n_tokens``, of which the next token reads the last ones of a window."""
    n_full = (n_tokens - 1) // Z
    groups = runner(kind).model.dims.groups
    lowest = [int(r.span.lowest(np.int64(n_full * Z))) for r in groups.reaches]
    return sum(
        r.n_groups * (n_full - low // Z) for r, low in zip(groups.reaches, lowest, strict=True)
    )


def evict(engine: Engine, n: int) -> None:
    """Up to ``n`` pages leave the device; a short request's plan carries them to the host."""
    engine.scheduler.resources.cache.evict(n)
    tokens_of(engine, [1, 2, 3], f"carries{engine.scheduler.n_steps}", n=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_what_was_evicted_comes_back_from_the_host_as_it_went(kind):
    device = with_host(kind)
    assert device.limits.n_host_pages == N_HOST
    engine = engine_of(device)
    for i, prompt in enumerate(LONG):
        assert tokens_of(engine, prompt, f"first{i}") == (cold(kind)[i], len(prompt))
    before = engine.scheduler.counters()["host_pages_loaded_total"]
    for turn in range(3):
        evict(engine, 10_000)
        for i, prompt in enumerate(LONG):
            n = 1 + (len(prompt) - 1) % Z
            assert tokens_of(engine, prompt, f"r{turn}{i}") == (cold(kind)[i], n)
    loaded = engine.scheduler.counters()["host_pages_loaded_total"] - before
    assert loaded == 3 * sum(n_of_a_hit(kind, len(p)) for p in LONG)
    assert device.programs.late_compiles == 0
    engine.scheduler.resources.check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_pages_taken_one_by_one_change_no_token(kind):
    """A part of a prefix is on the device, the rest of it in host memory, in every proportion."""
    engine = engine_of(with_host(kind))
    for i, prompt in enumerate(LONG):
        tokens_of(engine, prompt, f"first{i}")
    for n in (1, 2, 3, 5, 7, 11, 13, 17):
        evict(engine, n)
        drawn, n_computed = tokens_of(engine, LONG[0], f"r{n}")
        assert (drawn, n_computed) == (cold(kind)[0], 1 + (97 - 1) % Z), n
    engine.scheduler.resources.check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_a_restart_finds_them_on_disk(kind, tmp_path):
    device = with_tiers(kind, tmp_path)
    engine = engine_of(device)
    for i, prompt in enumerate(LONG):
        assert tokens_of(engine, prompt, f"first{i}")[0] == cold(kind)[i]
    engine.close()
    n_files = len(list(tmp_path.rglob("*.kv")))

    device = with_tiers(kind, tmp_path)
    assert len(device.stored() or ()) == n_files
    engine = engine_of(device)
    for i, prompt in enumerate(LONG):
        n = 1 + (len(prompt) - 1) % Z
        assert tokens_of(engine, prompt, f"again{i}") == (cold(kind)[i], n)
    wanted = sum(n_of_a_hit(kind, len(p)) for p in LONG)
    assert engine.scheduler.counters()["disk_pages_read_total"] == wanted
    assert device.counters()["disk_pages_broken_total"] == 0
    engine.close()
    assert identity(device.model, device.params) != identity(
        runner(kind, "off").model, runner(kind, "off").params
    ), "pages of all layers are others"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ALL)
def test_who_was_swapped_draws_what_he_draws_alone(kind):
    engine = engine_of(with_host(kind), preemption="swap", prefix_caching=False)
    prompts = [*OTHERS, LONG[1]]
    alone = all_of(engine_of(runner(kind, "off")), prompts, 20)
    resources, n_steps, step = engine.scheduler.resources, 0, engine.step

    def preempting():
        nonlocal n_steps
        n_steps += 1
        if n_steps in (9, 14, 21):  # as if pages had run out
            resources.preempt(resources.running.snapshot()[0])
        return step()

    engine.step = preempting
    assert all_of(engine, prompts, 20) == alone
    assert resources.swap_policy.n_back >= 1
    resources.check()


def life(kind: str) -> list[tuple[int, float]]:
    """A prompt, its pages evicted, and the prompt again."""
    engine: Engine = engine_of(with_host(kind), overlap=0)
    scored(engine, LONG[:1], 2)
    evict(engine, 10_000)
    return scored(engine, LONG[:1], 8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "bug",
    [a_windows_page_comes_back_one_position_off, a_name_without_the_group],
    ids=lambda bug: bug.__name__,
)
def test_a_planted_bug_changes_what_is_drawn(bug, monkeypatch):
    without = life("gemma3")
    assert without == life("gemma3")
    bug(monkeypatch)
    assert without != life("gemma3")


def test_a_window_holds_less_than_the_prompts_of_these_tests():
    assert min(map(len, LONG)) > 2 * W
