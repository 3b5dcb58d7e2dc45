"""Whole steps with the native kernels: which products they take, that results depend on little else, nothing is
copied, and no thread waits for ever."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.config import EngineConfig
from jserve.model import native
from jserve.model.dot import dot, gate_up
from jserve.model.mesh import AXIS, make_mesh
from jserve.model.noise import gumbel
from jserve.native.library import Library
from jserve.runner import programs
from jserve.sampling import SamplingParams
from jserve.sched.policy import seed_of
from jserve.sched.resources import Resources
from jserve.sizing import plan as sizing
from jserve.types import Output, Request
from tests.native import rig
from tests.whole import equal
from tests.whole.test_planted_bugs import BUGS, Erring

TOLERANCE = 0.02
"""Of log-probabilities in bfloat16, between steps of other widths; docs/performance.md states it."""
DRAFTS = ("n_drafted", "n_accepted")


def arrays(T: int, N: int, D: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(T)
    w = jnp.asarray(rng.standard_normal((N, D)), jnp.bfloat16)
    return jnp.asarray(rng.standard_normal((T, D)), jnp.float32), w


def calls(function, *args, name: str = "") -> int:
    """Calls of native kernels in the program of ``function``, of one or of any."""
    return jax.jit(function).lower(*args).as_text().count(f"jserve.{name}")


def test_products_are_chosen_by_rows_type_and_level(level):
    x, w = arrays(4, 64, 32)
    most = native.MOST_ROWS[level]
    assert calls(dot, x, w) == 0, "nothing is chosen unless a step asks for it"
    with native.kernels(level):
        assert calls(dot, x, w) == 1
        assert calls(dot, x, w.astype(jnp.float32)) == 0
        assert calls(dot, *arrays(most, 64, 32)) == 1
        assert calls(dot, *arrays(most + 1, 64, 32)) == 0
        w_2FD, bias_2F = w.reshape(2, 32, 32), jnp.zeros((2, 32))
        assert calls(gate_up, x, w_2FD, name="gate_up") == 1
        assert calls(gate_up, x, w_2FD, bias_2F, name="product") == 1, "a bias comes between"
        gelu = partial(gate_up, activation="gelu_tanh")
        assert calls(gelu, x, w_2FD, name="product") == 1, "silu alone is in the kernel"


def test_results_are_those_of_xla(level):
    for T in (1, 2, 7, 16, 40):
        x, w = arrays(T, 96, 64)
        with native.kernels(level):
            y, h = jax.jit(dot)(x, w), jax.jit(gate_up)(x, w.reshape(2, 48, 64))
        np.testing.assert_allclose(y, dot(x, w), atol=1e-4)
        np.testing.assert_allclose(h, gate_up(x, w.reshape(2, 48, 64)), atol=1e-3)


def test_one_function_traced_at_two_levels_is_two_programs(level):
    x, w = arrays(4, 64, 32)
    function = jax.jit(lambda x, w: dot(x, w))
    texts = []
    for asked in ("", level, ""):
        with native.kernels(asked):
            texts.append(function.lower(x, w).as_text())
    assert "jserve.product" in texts[1]
    assert "jserve.product" not in texts[0] + texts[2]


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_products_on_several_devices_at_once(level, n):
    """Each device runs its handlers on the one pool, with a collective between them."""
    spec = jax.sharding.PartitionSpec
    x, w = arrays(9, 512, 512)

    def local(x, w):
        with native.kernels(level):
            for _ in range(20):
                y = jax.lax.psum(dot(x, w), AXIS)
                x = y[:, : x.shape[1]] / 100
            return y

    shards = jax.shard_map(
        local,
        mesh=make_mesh(n),
        in_specs=(spec(None, AXIS), spec(None, AXIS)),
        out_specs=spec(),
        check_vma=False,
    )
    step = jax.jit(shards)
    first = np.asarray(step(x, w))
    assert np.isfinite(first).all()
    for _ in range(20):
        assert np.array_equal(step(x, w), first)


ONE_CORE = """
import ctypes, os, sys
from concurrent.futures import ThreadPoolExecutor
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jserve.model import native
from jserve.model.dot import dot
from jserve.model.mesh import AXIS, make_mesh
from jserve.native.library import Library
from tests.native import test_native_attention as attention

path, level = sys.argv[1:]
native.installed = lambda: Library(ctypes.CDLL(path), level)
assert native.available("cpu", "bfloat16") == (level, "")
x, w = jnp.ones((5, 1024)), jnp.ones((2048, 1024), jnp.bfloat16)
spec = jax.sharding.PartitionSpec


def local(x, w):
    with native.kernels(level):
        for _ in range(10):
            x = jnp.tanh(jax.lax.psum(dot(x, w), AXIS))[:, : x.shape[1]]
        return jax.lax.psum(dot(x, w), AXIS)


mesh, shards = make_mesh(len(jax.devices())), (spec(None, AXIS), spec(None, AXIS))
step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=shards, out_specs=spec(), check_vma=False))
for _ in range(20):
    assert (np.asarray(step(x, w)) == 1024).all()


@jax.jit
def spread(x, w):
    # They do not wait for one another, so that XLA has them on all threads of its pool.
    with native.kernels(level):
        return sum(dot(x * 2.0**i, w) for i in range(12))


with ThreadPoolExecutor(4) as callers:
    for y in callers.map(lambda _: spread(x, w), range(100)):
        assert (np.asarray(y) == 1024 * 4095).all()
rows = attention.rows_view([(560, 40), (600, 1), (0, 33)], pages=40)
setting = attention.drawn(16, 64, 2, 0, 0, rows)
for _ in range(5):
    found = attention.got(setting, level)
    np.testing.assert_allclose(found, attention.wanted(setting), atol=attention.APART_TILES)
names = [Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task")]
print(sum("XLAEigen" in name for name in names))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no process is bound to a core")
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_pool_of_as_many_threads_as_devices(kernels, level, n):
    """On one core: of one device the only thread has no help, of two all of them may be callers at once."""
    command = [sys.executable, "-c", ONE_CORE, kernels.handle._name, level]
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={n}"}
    done = subprocess.run(
        command,
        timeout=60,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | flags,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == n, "threads of XLA's pool"


# --- steps of a model


@pytest.fixture(scope="module")
def steps(level):
    return rig.runner("native")


@pytest.mark.parametrize("bucket", rig.BUCKETS)
def test_the_steps_of_a_bfloat16_model_call_them_and_copy_no_kv(steps, level, bucket):
    assert steps.report()["kernels"] == level
    text = steps.programs.hlo(bucket)
    n_decode = bucket.D * bucket.J
    for name in ("product", "gate_up"):
        # The head multiplies those rows alone that draw.
        few = native.takes_rows(level, n_decode + (bucket.F if name == "product" else bucket.P))
        assert (f"jserve.{name}.v1" in text) == few
    for name in ("attention.v2", "write_kv.v1"):
        assert (f"jserve.{name}" in text) == native.has_attention(level)
    shape = ",".join(map(str, steps.state.kv[0][0].shape))
    assert not re.findall(rf"= \w+\[{shape}\]\S* (?:copy|copy-start|convert|transpose)\(", text)
    assert "input_output_alias" in text
    state = sum(x.nbytes for x in jax.tree.leaves(steps.state))
    assert steps.programs.memory(bucket).alias_size_in_bytes == state, "all of it is donated"


N_PAGES = 14
"""Of 16 tokens: for two of the largest requests."""


def requests(seed: int) -> list[Request]:
    """Half of them over a shared stem; greedy and drawn, of one choice and of two."""
    rng = random.Random(seed)
    stem = [rng.randrange(equal.V) for _ in range(33)]
    found = []
    for i in range(8):
        tail = [rng.randrange(equal.V) for _ in range(rng.choice((1, 7, 16, 17, 40)))]
        params = SamplingParams(
            n=2 if i % 4 == 3 else 1,
            temperature=(0.0, 0.0, 0.7, 1.2)[(i + seed) % 4],
            seed=100 * seed + 10 * i,
            max_tokens=12,
            logprobs=0,
        )
        prompt = stem + tail if i % 2 else tail
        found.append(Request(id=f"{seed}-{i}", prompt_ids=tuple(prompt), params=params))
    return found


def noise(request: Request, index: int, i: int) -> np.ndarray:
    """float32[V]: what a draw of output token ``i`` adds to the log-probabilities over the temperature."""
    seed = np.array([seed_of(request.id, 0, request.params.seed, index)], np.int64)
    pos = jnp.asarray([len(request.prompt_ids) + i], jnp.int32)
    return np.asarray(gumbel(jnp.asarray(seed.view(np.uint32)[None]), pos, equal.V))[0]


def compare(got, want, asked: list[Request]) -> int:
    """Equal tokens with equal log-probabilities, up to a first other token that was as likely: where it was drawn, with
    the noise of the draw. Returns how many answers have none."""
    assert got.keys() == want.keys()
    by_id, n_whole = {r.id: r for r in asked}, 0
    for (name, index), (tokens, end, logprobs, _) in want.items():
        others, other_end, other_logprobs, _ = got[name, index]
        assert other_end == end
        request = by_id[name]
        n_whole += others == tokens
        for i, (a, b) in enumerate(zip(other_logprobs, logprobs, strict=True)):
            apart = a - b
            if others[i] != tokens[i] and request.params.temperature:
                drawn = noise(request, index, i)
                apart += request.params.temperature * (drawn[others[i]] - drawn[tokens[i]])
            assert abs(apart) < TOLERANCE, f"{name}: token {i} of choice {index}"
            if others[i] != tokens[i]:
                break
    return n_whole


@pytest.fixture
def preempted(monkeypatch) -> list[str]:
    """The requests whose pages were taken, each as often as that was."""
    found, preempt = [], Resources.preempt

    def counted(resources, seq) -> None:
        found.append(seq.request.id)
        preempt(resources, seq)

    monkeypatch.setattr(Resources, "preempt", counted)
    return found


def any_way(runner: Any, seed: int, wanted: dict) -> list[Output]:
    """What the engine says where pages are shared, requests are preempted and drafts are verified; drafts are what
    ``wanted`` has, with errors."""
    rng = random.Random(seed)
    way = dataclasses.replace(
        equal.Way.draw(rng),
        random_buckets=False,
        drafts=True,
        prefix_caching=True,
        n_pages=N_PAGES,
    )
    truth = {key: answer[0] for key, answer in wanted.items()}
    return equal.outputs_of(runner, requests(seed), way, rng, truth, preempts=True)


@pytest.mark.parametrize("seed", range(4))
def test_any_way_of_running_is_close_to_alone(steps, seed, preempted):
    asked = requests(seed)
    wanted = equal.alone(steps, asked)
    assert not preempted
    outputs = any_way(steps, seed, wanted)
    n_whole = compare(equal.gathered(outputs), wanted, asked)
    assert n_whole > len(wanted) / 2, "most have the very tokens"
    assert len(preempted) >= len(asked)
    assert max(out.n_cached for out in outputs) >= 32, "the whole pages of the stem"
    tried, accepted = (sum(getattr(out, name) for out in outputs) for name in DRAFTS)
    assert 0 < accepted < tried


# Unloaded slots show in penalties and biases alone, which these requests have none of.
@pytest.mark.parametrize("bug", sorted(BUGS.keys() - {"slots are not loaded"}))
def test_a_device_that_errs_is_not_close(steps, bug):
    found = []
    for seed in range(4):
        wanted = equal.alone(steps, requests(seed))
        outputs = any_way(Erring(steps, **BUGS[bug]), seed, wanted)
        try:
            compare(equal.gathered(outputs), wanted, requests(seed))
        except AssertionError as e:
            found.append(e)
    assert found


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sharded_is_close_to_one_device(steps, tp):
    rng = random.Random(0)
    other = rig.runner("native", tp)
    assert other.report()["kernels"] != "xla"
    for seed in (10, 11):
        wanted = equal.alone(steps, requests(seed))
        compare(equal.run(other, requests(seed), equal.PLAIN, rng), wanted, requests(seed))


@pytest.mark.slow
@pytest.mark.parametrize("lower", ["avx2", "avx512_bf16", "neon"])
def test_an_engine_at_a_lower_level_is_close_to_xla_and_to_alone(
    kernels, level, lower, monkeypatch
):
    if lower not in kernels.levels()[:-1]:
        pytest.skip(f"{lower} is not below the level of this processor")
    monkeypatch.setattr(native, "installed", lambda: Library(kernels.handle, lower))
    forced, asked = rig.made("native", rig.model()), requests(20)
    assert forced.report()["kernels"] == lower
    wanted = equal.alone(forced, asked)
    compare(wanted, equal.alone(rig.runner("xla"), asked), asked)
    compare(equal.run(forced, asked, equal.PLAIN, random.Random(0)), wanted, asked)


def test_a_plan_has_the_fewer_programs_of_an_engine_that_skips_padding(level, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(rig.CONFIG))
    counts = {}
    for kernels in ("auto", "xla"):
        config = EngineConfig.of(model=str(tmp_path), page_size=16, kernels=kernels)
        found, laid = sizing.plan(str(tmp_path), "cpu", (100,), config)
        assert laid.sizes.kernels == (level if kernels == "auto" else "")
        counts[kernels] = len(found.programs)
    fewer = {"auto": 7 if native.takes_rows(level, 1024) else 16, "xla": 16}
    assert counts == fewer


def test_kernels_are_close_to_xla(steps):
    other = rig.runner("xla")
    assert other.report()["kernels"] == "xla"
    compare(equal.alone(steps, requests(20)), equal.alone(other, requests(20)), requests(20))


def random_requests(rng: random.Random, least: int) -> list[list[Request]]:
    """Groups of requests with any sampling fields, ``least`` in all or a few more."""
    found: list[list[Request]] = []
    while sum(map(len, found)) < least:
        some = equal.draw_requests(rng, f"trace-{len(found)}")
        # Log-probabilities of prompts have programs of their own, which these steps are without.
        params = [dataclasses.replace(r.params, prompt_logprobs=None) for r in some]
        both = zip(some, params, strict=True)
        found.append([dataclasses.replace(r, params=p) for r, p in both])
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_compiles_over_500_random_requests(level):
    """After the engine is ready: lengths, arrivals, budgets, chunks and pools are drawn, too."""
    served, rng = rig.runner("native"), random.Random(14)
    assert served.report()["kernels"] == level
    assert any("jserve.product.v1" in served.programs.hlo(b) for b in rig.BUCKETS)
    before, n_programs, answered = programs.n_compiles(), len(served.programs), 0
    for some in random_requests(rng, 500):
        way = dataclasses.replace(equal.Way.draw(rng), drafts=False, random_buckets=False)
        answered += len(equal.run(served, some, way, rng))
    assert answered >= 500
    assert (programs.n_compiles(), len(served.programs)) == (before, n_programs)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_engines_in_one_process_do_not_stop(level):
    """10,000 steps on two threads, sharing XLA's pool."""
    runners = [rig.runner("native"), rig.runner("native", 2)]
    steps = [0, 0]

    def serve(which: int) -> None:
        rng, seed = random.Random(which), 100 * which
        while steps[which] < 5000:
            seed += 1
            answers = equal.run(runners[which], requests(seed), equal.PLAIN, rng)
            steps[which] += sum(len(tokens) for tokens, *_ in answers.values()) // 6

    threads = [threading.Thread(target=serve, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(550)
    assert min(steps) >= 5000
