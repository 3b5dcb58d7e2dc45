"""Whole steps with the native kernels: which products they take, that results depend on little else, nothing is
copied, and no thread waits for ever."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.config import EngineConfig
from jserve.model import native
from jserve.model.dot import dot, gate_up
from jserve.model.mesh import AXIS, make_mesh
from jserve.runner import programs
from jserve.sampling import SamplingParams
from jserve.sizing import plan as sizing
from jserve.types import Request
from tests.native import rig
from tests.whole import equal

TOLERANCE = 0.06
"""Of log-probabilities in bfloat16, between steps of other widths."""


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


@pytest.mark.parametrize("n", [1, 2, 4])
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


ONE_THREAD = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax.numpy as jnp, jax, numpy as np, sys
from pathlib import Path

from jserve.config import EngineConfig
from jserve.model import native
from jserve.model.dot import dot
from jserve.native import library
native.installed = lambda: library.load(Path(sys.argv[1]))
level, reason = native.available("cpu", "bfloat16")
assert level, reason
x, w = jnp.ones((5, 1024)), jnp.ones((2048, 1024), jnp.bfloat16)
with native.kernels(level):
    f = jax.jit(lambda x, w: dot(jnp.tanh(dot(x, w))[:, :1024], w))
    for _ in range(50):
        y = f(x, w)
assert (np.asarray(y) == 1024).all()
"""


def test_a_pool_of_one_thread(kernels, level):
    command = [sys.executable, "-c", ONE_THREAD, kernels.handle._name]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, timeout=120, capture_output=True, text=True, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr


# --- steps of a model


@pytest.fixture(scope="module")
def steps(level):
    return rig.runner("native")


@pytest.mark.slow
def test_the_steps_of_a_bfloat16_model_call_them_and_copy_no_kv(steps, level):
    assert steps.report()["kernels"] == level
    for bucket in rig.BUCKETS:
        text = steps.programs.hlo(bucket)
        n_rows = bucket.D * bucket.J + bucket.P
        for name in ("product", "gate_up"):
            # The head multiplies those rows alone that draw.
            few = native.takes_rows(level, bucket.D + bucket.F if name == "product" else n_rows)
            assert (f"jserve.{name}.v1" in text) == few
        for name in ("attention.v2", "write_kv.v1"):
            assert (f"jserve.{name}" in text) == native.has_attention(level)
        shape = ",".join(map(str, steps.state.kv[0][0].shape))
        assert not re.findall(rf"= \w+\[{shape}\]\S* (?:copy|copy-start|convert|transpose)\(", text)
        assert "input_output_alias" in text


def requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)
    found = []
    for i in range(6):
        prompt = [rng.randrange(equal.V) for _ in range(rng.choice((1, 7, 16, 17, 40)))]
        found.append(Request(id=f"{seed}-{i}", prompt_ids=tuple(prompt), params=params))
    return found


def compare(got, want) -> None:
    """Equal tokens with equal log-probabilities, up to a first other token that was as likely."""
    assert got.keys() == want.keys()
    for key, (tokens, _, logprobs, _) in want.items():
        for i, (a, b) in enumerate(zip(got[key][2], logprobs, strict=True)):
            assert abs(a - b) < TOLERANCE, f"{key}: token {i}"
            if got[key][0][i] != tokens[i]:
                break


@pytest.mark.parametrize("seed", range(4))
def test_any_way_of_running_is_close_to_alone(steps, seed):
    rng = random.Random(seed)
    wanted = equal.alone(steps, requests(seed))
    way = equal.Way.draw(rng)
    way = equal.dataclasses.replace(way, random_buckets=False, drafts=False, n_pages=40)
    compare(equal.run(steps, requests(seed), way, rng), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sharded_is_close_to_one_device(steps, tp):
    rng = random.Random(0)
    other = rig.runner("native", tp)
    assert other.report()["kernels"] != "xla"
    for seed in (10, 11):
        wanted = equal.alone(steps, requests(seed))
        compare(equal.run(other, requests(seed), equal.PLAIN, rng), wanted)


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
    compare(equal.alone(steps, requests(20)), equal.alone(other, requests(20)))


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
