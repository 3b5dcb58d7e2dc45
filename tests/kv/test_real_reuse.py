"""Reuse on the real runner in float32: cached equals cold at every border, also through host memory."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np
import pytest

from jserve.config import EngineConfig
from jserve.engine.engine import Engine
from jserve.errors import ConfigError
from jserve.kv_layout import KV_FORMS, stored_width
from jserve.model.arch import resized, with_kv_forms
from jserve.model.view import Bucket
from jserve.runner.moves import identity
from jserve.runner.runner import ModelRunner
from jserve.sampling import SamplingParams
from jserve.sched.record.journal import JournalFile
from jserve.sched.scheduler import Scheduler
from jserve.sim.costs import Device
from jserve.sim.recorded import verify
from jserve.sim.simulate import Setup
from jserve.types import Output, Request
from tests.runner.harness import ARCH, OPTIONS, make_runner
from tests.runner.test_layouts import runner as laid_out

Z = 8
PAGE_BYTES = 2 * ARCH.L * ARCH.K * Z * ARCH.H * 4
BUCKETS = (Bucket(D=6, P=48, F=6),)
N_HOST = 24


@lru_cache(maxsize=2)
def runner(tp: int = 1) -> ModelRunner:
    gib = (N_HOST + 0.5) * PAGE_BYTES / 2**30
    return make_runner(BUCKETS, tp=tp, strict=True, host_memory_gb=gib)


@lru_cache(maxsize=1)
def of_8_bits() -> ModelRunner:
    gib = (N_HOST + 0.5) * PAGE_BYTES / 4 / 2**30
    return make_runner(BUCKETS, strict=True, host_memory_gb=gib, kv_cache_dtype="fp8_e4m3")


def engine_of(
    device: ModelRunner, *, n_pages: int = 97, host: int = 0, overlap: int = 1, **options
) -> Engine:
    """A fresh scheduler over the runner; fewer pages are only smaller numbers told to it."""
    limits = dataclasses.replace(device.limits, n_pages=n_pages, n_host_pages=host)
    config = EngineConfig.of(**OPTIONS | options)
    return Engine(Scheduler(limits, config), device, overlap=overlap)


def tokens_of(engine: Engine, prompt, id: str, n: int = 6, **fields) -> tuple[list[int], int]:
    """(what was drawn, prompt tokens computed for it)."""
    before = engine.scheduler.n_prefilled
    params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
    engine.submit(Request(id=id, prompt_ids=tuple(prompt), params=params, **fields))
    outputs: list[Output] = engine.drain()
    assert outputs[-1].error is None, outputs[-1].error
    drawn = [t for out in outputs for t in out.token_ids]
    return drawn, engine.scheduler.n_prefilled - before


def text(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, ARCH.V, n).tolist()


def test_the_host_pool_has_the_pages_that_were_asked_for():
    assert runner().limits.n_host_pages == N_HOST


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n_prompt", [7, 8, 9, 16, 17, 25, 40])
def test_cached_equals_cold_at_every_hit_length_around_page_borders(n_prompt):
    check_hit_lengths(runner(), n_prompt)


def check_hit_lengths(device, n_prompt):
    whole = text(n_prompt + 9, seed=n_prompt)
    for shared in [n for n in (1, 7, 8, 9, 15, 16, 17, 23, 24, 25, 39, 40, 41) if n < len(whole)]:
        engine = engine_of(device)
        cold, n_cold = tokens_of(engine, whole, "cold", skip_prefix_cache=True)
        assert n_cold == len(whole)
        tokens_of(engine, [*whole[:shared], (whole[shared] + 1) % ARCH.V], "first", n=1)
        warm, n_warm = tokens_of(engine, whole, "warm")
        assert warm == cold, f"{shared} tokens shared"
        assert n_warm == len(whole) - shared // Z * Z
        again, n_again = tokens_of(engine, whole, "again")
        assert again == cold
        assert n_again == len(whole) - (len(whole) - 1) // Z * Z


def test_generated_tokens_are_reused_by_the_next_turn():
    engine = engine_of(runner())
    first = text(13)
    said, _ = tokens_of(engine, first, "t1", n=12, session="talk")
    turn = [*first, *said, *text(5, seed=2)]
    warm, n_warm = tokens_of(engine, turn, "t2", session="talk")
    cold, _ = tokens_of(engine, turn, "cold", skip_prefix_cache=True)
    assert warm == cold
    assert n_warm == len(turn) - 24


def test_two_at_once_compute_a_prefix_once_and_draw_what_each_draws_alone():
    head, device = text(41), runner()
    tails = [text(3, seed=s) for s in (1, 2, 3)]
    engine = engine_of(device)
    alone = [
        tokens_of(engine, [*head, *tail], f"alone-{i}", skip_prefix_cache=True)[0]
        for i, tail in enumerate(tails)
    ]
    before = engine.scheduler.n_prefilled
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for i, tail in enumerate(tails):
        engine.submit(Request(id=f"r{i}", prompt_ids=(*head, *tail), params=params))
    found: dict[str, list[int]] = {}
    for out in engine.drain():
        found.setdefault(out.request_id, []).extend(out.token_ids)
    assert [found[f"r{i}"] for i in range(3)] == alone
    assert engine.scheduler.n_prefilled - before == 44 + 2 * (44 - 40)


def test_a_tenant_computes_what_another_one_has_cached():
    engine = engine_of(runner())
    prompt = text(41)
    counts = [
        tokens_of(engine, prompt, f"{tenant}{i}", tenant=tenant)[1]
        for i in range(2)
        for tenant in ("a", "b")
    ]
    assert counts == [41, 41, 1, 1]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_pages_come_back_from_the_host_as_they_went(tp, overlap):
    check_the_way_through_host_memory(runner(tp), overlap)


def check_the_way_through_host_memory(device, overlap):
    device.programs.seal()  # the other runner of these tests was perhaps compiled since
    engine = engine_of(device, n_pages=18, host=N_HOST, overlap=overlap)
    prompts = [text(41, seed=s) for s in range(3)]
    cold = [tokens_of(engine, p, f"c{i}", skip_prefix_cache=True)[0] for i, p in enumerate(prompts)]
    for turn in range(4):
        for i, prompt in enumerate(prompts):
            drawn, n = tokens_of(engine, prompt, f"r{turn}-{i}", n=6)
            assert drawn == cold[i], (turn, i)
            assert n == (41 if turn == 0 else 1)
        tokens_of(engine, text(100, seed=50 + turn), f"big{turn}", n=2, skip_prefix_cache=True)
    counters = engine.scheduler.counters()
    assert counters["host_pages_saved_total"] >= 10
    assert counters["host_pages_loaded_total"] >= 30
    assert device.programs.late_compiles == 0
    engine.scheduler.resources.check()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_who_was_swapped_draws_what_he_draws_alone(tp, overlap, prefix_caching):
    check_swaps(runner(tp), overlap, prefix_caching)


def check_swaps(device, overlap, prefix_caching):
    device.programs.seal()
    options = {"preemption": "swap", "prefix_caching": prefix_caching}
    engine = engine_of(device, host=N_HOST, overlap=overlap, **options)
    params = SamplingParams(temperature=0.8, repetition_penalty=1.2, max_tokens=40, ignore_eos=True)
    requests = [
        Request(
            id=str(i), prompt_ids=tuple(text(n, seed=n)), params=dataclasses.replace(params, seed=i)
        )
        for i, n in enumerate((5, 33, 20, 41))
    ]
    alone = []
    for request in requests:
        engine.submit(request)
        alone.append([t for out in engine.drain() for t in out.token_ids])
    for request in requests:
        engine.submit(request)
    together: list[list[int]] = [[] for _ in requests]
    resources, n_steps = engine.scheduler.resources, 0
    while engine.busy:
        for out in engine.step():
            together[int(out.request_id)] += out.token_ids
        n_steps += 1
        if n_steps in (6, 13, 22, 30):  # as if pages had run out
            resources.preempt(resources.running.snapshot()[n_steps % 2])
    assert together == alone
    assert resources.swap_policy.n_out >= (0 if prefix_caching else 4)
    if overlap and not prefix_caching:
        assert resources.swap_policy.n_back >= 1
    assert device.limits.page_move_s > 0
    assert device.programs.late_compiles == 0
    resources.check()


def with_disk(folder, *, seed: int = 0, **options) -> tuple[ModelRunner, Engine]:
    gib = (N_HOST + 0.5) * PAGE_BYTES / 2**30
    device = make_runner(
        BUCKETS, seed=seed, host_memory_gb=gib, disk_dir=str(folder), disk_gb=0.01, **options
    )
    return device, engine_of(device, n_pages=18, host=N_HOST)


def test_a_restart_reuses_the_disk_and_other_weights_do_not(tmp_path):
    prompts = [text(41, seed=s) for s in range(3)]
    _, engine = with_disk(tmp_path)
    cold = [tokens_of(engine, p, f"c{i}")[0] for i, p in enumerate(prompts)]
    engine.close()
    files = sorted(tmp_path.rglob("*.kv"))
    assert len(files) >= 15

    device, engine = with_disk(tmp_path)
    assert len(device.stored() or ()) == len(files)
    warm = [tokens_of(engine, p, f"w{i}") for i, p in enumerate(prompts)]
    assert warm == [(drawn, 1) for drawn in cold]
    assert engine.scheduler.counters()["disk_pages_read_total"] == 15
    engine.close()

    files[0].write_bytes(files[0].read_bytes()[:-1])
    broken = bytearray(files[1].read_bytes())
    broken[100] ^= 1
    files[1].write_bytes(broken)
    device, engine = with_disk(tmp_path)
    again = [tokens_of(engine, p, f"w{i}") for i, p in enumerate(prompts)]
    assert [drawn for drawn, _ in again] == cold, "a broken file is a miss, never an answer"
    assert sum(n for _, n in again) > 3
    assert device.counters()["disk_pages_broken_total"] >= 1
    engine.close()

    device, engine = with_disk(tmp_path, seed=1)
    assert device.stored() == []
    assert tokens_of(engine, prompts[0], "x")[1] == 41
    engine.close()


LAYOUTS = {
    "tp 2": {"mesh": {"tp": 2}},
    "auto": {"mesh": {"x": 2}, "mode": "auto", "rules": {"kv_heads": "x", "ffn": "x"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shares_of_devices_come_back_from_the_disk_as_they_went(layout, tmp_path):
    """With the same layout; another one finds none of them."""

    def started(spec) -> tuple[ModelRunner, Engine]:
        gib = (N_HOST + 0.5) * PAGE_BYTES / 2**30
        disk = {"disk_dir": str(tmp_path), "disk_gb": 0.01, "host_memory_gb": gib}
        device = laid_out(spec, BUCKETS, **disk)
        return device, engine_of(device, n_pages=18, host=N_HOST)

    prompts = [text(41, seed=s) for s in range(3)]
    want = [tokens_of(engine_of(runner()), p, f"c{i}")[0] for i, p in enumerate(prompts)]
    for n_computed in (41, 1):
        device, engine = started(LAYOUTS[layout])
        assert bool(device.stored()) == (n_computed == 1)
        for i, prompt in enumerate(prompts):
            assert tokens_of(engine, prompt, f"r{i}") == (want[i], n_computed)
        engine.close()
    assert engine.scheduler.counters()["disk_pages_read_total"] == 15
    device, engine = started({"mesh": {"tp": 1}})
    assert device.stored() == []
    engine.close()


class _Price:
    """Never asked: a replay takes its times from the journal."""

    def seconds(self, n_decode, n_prefill, n_context):
        return 1.0


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_simulator_decides_as_the_real_engine_did(tmp_path, overlap):
    """Random arrivals, hits and preemptions on the runner, replayed from the journal alone."""
    path, config = tmp_path / "journal", EngineConfig.of(**OPTIONS | {"overlap": overlap})
    device = runner()
    device.programs.seal()
    limits = dataclasses.replace(device.limits, n_pages=22, n_host_pages=0)
    rng = np.random.default_rng(overlap)
    with path.open("wb") as file:
        scheduler = Scheduler(limits, config, journal=JournalFile(file))
        engine = Engine(scheduler, device, overlap=overlap)
        for i in range(12):
            prompt = (*text(24, seed=i % 3), *text(int(rng.integers(1, 30)), seed=i))
            params = SamplingParams(max_tokens=30, seed=i, ignore_eos=True)
            engine.submit(Request(id=f"r{i}", prompt_ids=prompt, params=params))
            for _ in range(int(rng.integers(9))):
                engine.step()
        engine.drain()
    assert scheduler.resources.n_preemptions > 0
    assert scheduler.resources.n_hit > 0
    setup = Setup(
        config=config, device=Device(name="real", costs=_Price(), n_pages=22, max_model_len=128)
    )
    done = verify(path, setup, dataclasses.replace(limits, vocab_size=1 << 17))
    assert (done.n_requests, done.n_steps) == (12, scheduler.n_steps)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("n_prompt", [9, 40])
def test_cached_equals_cold_in_8_bits(n_prompt):
    """Also through host memory, which holds four times the pages of float32."""
    device = of_8_bits()
    assert device.limits.n_host_pages == N_HOST
    check_hit_lengths(device, n_prompt)
    check_the_way_through_host_memory(device, overlap=1)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_who_was_swapped_in_8_bits_draws_what_he_draws_alone(prefix_caching):
    check_swaps(of_8_bits(), 1, prefix_caching)


@pytest.mark.slow
def test_pages_of_8_bits_come_back_from_the_disk_as_they_went(tmp_path):
    """A quarter of the bytes of float32, under an identity of their own."""
    prompts, eight = [text(41, seed=s) for s in range(3)], {"kv_cache_dtype": "fp8_e4m3"}
    device, engine = with_disk(tmp_path, **eight)
    assert device.memory.page_bytes == PAGE_BYTES // 4
    cold = [tokens_of(engine, p, f"c{i}")[0] for i, p in enumerate(prompts)]
    engine.close()
    n_files = len(list(tmp_path.rglob("*.kv")))

    device, engine = with_disk(tmp_path, **eight)
    assert len(device.stored() or ()) == n_files >= 15
    warm = [tokens_of(engine, p, f"w{i}") for i, p in enumerate(prompts)]
    assert warm == [(drawn, 1) for drawn in cold]
    engine.close()

    other = dataclasses.replace(device.model, kv_dtype=np.dtype("float16"))
    assert identity(other, device.params) != identity(device.model, device.params)


@pytest.mark.slow
@pytest.mark.parametrize("form", KV_FORMS)
def test_scales_go_where_their_numbers_go(tmp_path, form):
    """Through the prefix cache, host memory, swaps and the disk."""
    arch, wide = resized(ARCH, H=16), {"kv_cache_dtype": form}
    page = 2 * ARCH.L * ARCH.K * Z * stored_width(form, 16)
    gib = (N_HOST + 0.5) * page / 2**30
    device = make_runner(BUCKETS, strict=True, arch=arch, host_memory_gb=gib, **wide)
    assert (device.memory.page_bytes, device.limits.n_host_pages) == (page, N_HOST)
    check_hit_lengths(device, 40)
    check_the_way_through_host_memory(device, overlap=1)
    for prefix_caching in (True, False):
        check_swaps(device, 1, prefix_caching)

    prompts = [text(41, seed=s) for s in range(3)]
    _, engine = with_disk(tmp_path, arch=arch, **wide)
    cold = [tokens_of(engine, p, f"c{i}")[0] for i, p in enumerate(prompts)]
    engine.close()
    device, engine = with_disk(tmp_path, arch=arch, **wide)
    warm = [tokens_of(engine, p, f"w{i}") for i, p in enumerate(prompts)]
    assert warm == [(drawn, 1) for drawn in cold]
    engine.close()
    other = dataclasses.replace(device.model, arch=with_kv_forms(arch, form, ("0",), "float32"))
    assert identity(other, device.params) != identity(device.model, device.params)


def test_a_disk_needs_host_memory(tmp_path):
    with pytest.raises(ConfigError) as e:
        make_runner(BUCKETS, disk_dir=str(tmp_path))
    assert e.value.field == "disk_dir"
