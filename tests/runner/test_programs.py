"""What is compiled: donated in place, no copy of the KV, sealed, and a start that counts its
programs."""

from __future__ import annotations

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.config import CacheOptions
from jserve.errors import ConfigError, WeightsError
from jserve.model.mesh import make_mesh
from jserve.model.step import make_step
from jserve.model.view import Bucket, StepDims
from jserve.runner import programs
from jserve.runner.memory import DeviceMemory, plan_memory
from jserve.runner.programs import compile_options
from jserve.runner.runner import ModelRunner
from jserve.speculation.drafters.drafter import kv_layout
from tests.runner.harness import ARCH, SMALL, Rig, jobs, make_runner, shared, tiny_params

BACKENDS = ["xla", pytest.param("ref", marks=pytest.mark.slow)]


def runner(attention: str) -> ModelRunner:
    return shared(attention_backend=attention)


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("bucket", SMALL, ids=str)
def test_the_step_updates_its_state_in_place(attention, bucket):
    r = runner(attention)
    memory, text = r.programs.memory(bucket), r.programs.hlo(bucket)
    state = jax.tree.leaves(r.state)
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in state)
    head = text[: text.index("\n")]
    assert head.count("may-alias") + head.count("must-alias") == len(state)
    layer = r.state.kv[0][0]
    assert memory.temp_size_in_bytes < 2 * layer.nbytes
    vocab = r.state.slots.vocab
    assert vocab is not None
    for array in (layer, vocab.counts_UV, vocab.bias_UV):
        shape = ",".join(map(str, array.shape))
        assert not re.findall(rf"= \w+\[{shape}\]\S* (?:copy|copy-start|convert|transpose)\(", text)


def test_the_check_for_copies_sees_one():
    """The same search on a step that keeps its old KV must find the copy."""
    r = runner("xla")
    params, state = r.model.abstract_params(), r.model.abstract_state()
    step = make_step(r.model, SMALL[0])
    buf = jax.ShapeDtypeStruct((r.programs.step(SMALL[0]).in_avals[0][2].shape[0],), jnp.int32)
    compiled = jax.jit(step).lower(params, state, buf).compile()
    layer = r.state.kv[0][0]
    assert compiled.memory_analysis().alias_size_in_bytes == 0
    shape = ",".join(map(str, layer.shape))
    assert re.findall(rf"= \w+\[{shape}\]\S* copy\(", compiled.as_text())


def test_nothing_compiles_over_a_random_trace():
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "structured_outputs": False}
    r = make_runner(None, **options, max_drafts=0, strict=True)
    assert len(r.ladder.buckets) == 4
    rng = np.random.default_rng(0)
    for seed in range(6):
        some = jobs(int(rng.integers(1, 4)), seed, temperature=float(seed % 2), top_p=0.9)
        some[0] = jobs(1, seed, repetition_penalty=1.1, logit_bias={4: 1.0}, logprobs=2)[0]
        if seed == 3:
            some[-1] = jobs(1, seed, prompt_logprobs=1)[0]
        if seed == 4:
            some[-1] = jobs(1, seed, logprob_token_ids=(3, 99))[0]
        Rig(r, seed=seed, chunk=-1, depth=seed % 3, pick=0.7).run(some)
    assert r.programs.late_compiles == 0
    assert len(r.programs) == len(r.ladder.buckets) + 2  # slots are filled by two


def test_a_late_compile_is_an_error_when_strict_and_counted_when_not(caplog, monkeypatch):
    strict, lax = shared(), runner("xla")
    monkeypatch.setattr(strict.programs, "strict", True)
    lax.programs.seal()
    strict.programs.seal()
    jax.jit(lambda x: x * 3 + 1)(np.float32(2))
    (job,) = jobs(1)
    with pytest.raises(RuntimeError, match="compiled in this process after"):
        Rig(strict).run([job])
    Rig(lax).run([job])
    assert lax.programs.late_compiles >= 1
    assert len([m for m in caplog.messages if "compiled in this process" in m]) == 1


@pytest.mark.slow
def test_the_start_of_another_engine_is_not_held_against_one_that_is_ready():
    ready = make_runner(strict=True)
    before = programs.n_compiles()
    other = make_runner(SMALL[:1], n_pages=77)  # a program of its own, compiled here and in threads
    assert programs.n_compiles() == before
    assert ready.programs.late_compiles == other.programs.late_compiles == 0
    Rig(ready).run(jobs(1))
    other.reset()
    assert other.programs.late_compiles == 0
    with programs.starting():
        jax.jit(lambda x: x * 5 + 2)(np.float32(2))
    assert ready.programs.late_compiles == 0
    jax.jit(lambda x: x * 7 + 3)(np.float32(2))
    assert ready.programs.late_compiles == other.programs.late_compiles == 1


def test_other_weights_take_effect_without_a_compile():
    r = shared()
    (job,) = jobs(1, temperature=0.0)
    first = Rig(r).run([job])
    r.update_weights(tiny_params(make_mesh(1), seed=1))
    second = Rig(r).run([job])
    r.update_weights(tiny_params(make_mesh(1), seed=0))
    assert first != second
    assert Rig(r).run([job]) == first
    wrong = tiny_params(make_mesh(1))
    wrong["embed"] = wrong["embed"][:, :-1]
    with pytest.raises(WeightsError, match="embed"):
        r.update_weights(wrong)
    with pytest.raises(WeightsError, match="missing"):
        r.update_weights({"embed": wrong["embed"]})
    assert Rig(r).run([job]) == first


def test_reset_gives_a_working_state_after_a_lost_one():
    r = shared()
    some = jobs(2, temperature=0.0)
    want = Rig(r).run(some)
    for leaf in jax.tree.leaves(r.state):
        leaf.delete()
    with pytest.raises((RuntimeError, ValueError)):
        Rig(r).run(some)
    r.reset()
    assert Rig(r).run(some) == want


def test_the_warm_up_tells_the_scheduler_what_steps_cost():
    r = runner("xla")
    shapes = {(b.D, b.P) for b in SMALL}
    assert r.limits.step_times
    assert {(t.n_decode, t.n_prefill) for t in r.limits.step_times} <= shapes
    assert all(t.seconds > 0 for t in r.limits.step_times)


def test_the_time_of_a_step_is_the_devices_alone():
    """Whatever the host takes to pack it, also where no other step hides that."""
    r = make_runner()
    pack, now = r._packer.pack, [0.0]

    def slow(plan, bucket=None):
        now[0] += 5.0
        return pack(plan, bucket)

    r._clock, r._packer.pack = lambda: now[0], slow  # type: ignore[method-assign]
    rig, times = Rig(r), []
    collect = r.collect
    r.collect = lambda flight: times.append(collect(flight)) or times[-1]  # type: ignore[method-assign]
    rig.run(jobs(2))
    assert times
    assert all(result.device_us < 5e6 for result in times)


def test_a_bucket_of_one_row_is_refused():
    with pytest.raises(ValueError, match="fewer than two"):
        make_step(runner("xla").model, Bucket(D=1, P=0, F=0))


DIMS = StepDims(C=4, M=8, Z=8, V=128)


def _kv(tp=1):
    return kv_layout(ARCH, None, page_size=DIMS.Z, dtype="float32", tp=tp)


def _plan(**options):
    params = tiny_params(make_mesh(1))
    return plan_memory(
        kv=_kv(),
        dims=DIMS,
        weight_bytes=sum(x.nbytes for x in jax.tree.leaves(params)),
        options=CacheOptions(**options),
        memory=DeviceMemory.of(jax.devices()[0]),
    )


def test_the_pool_is_sized_by_option_or_by_use():
    one = _kv().page_bytes
    assert one == 2 * ARCH.L * ARCH.K * ARCH.H * 8 * 4
    assert _kv(tp=8).page_bytes == one // 4
    assert _plan(n_pages=33).n_pages == 33
    assert _plan(kv_memory_gb=40 * one / 2**30).n_pages == 40
    assert _plan().n_pages == 2 * 4 * 8 + 1
    assert _plan(n_pages=33).report()["kv_tokens"] == 32 * 8


@pytest.mark.parametrize("options", [{"n_pages": 8}, {"kv_memory_gb": 1e-6}])
def test_a_pool_too_small_for_one_sequence_is_refused(options):
    with pytest.raises(ConfigError) as caught:
        _plan(**options)
    assert caught.value.field == next(iter(options))


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(ConfigError, match="max_model_len"):
        make_runner(max_model_len=129)


def test_programs_are_compiled_with_the_options_of_the_platform(monkeypatch):
    """On a GPU these make a step one CUDA graph (proved in tests/pallas_kernels)."""
    monkeypatch.delenv("XLA_FLAGS")
    flag = "xla_gpu_enable_command_buffer"
    level = "xla_backend_optimization_level"
    assert compile_options("gpu", "xla") == {}
    assert compile_options("cpu") == {level: "1"}
    parts = str(compile_options("gpu")[flag]).split(",")
    assert {"CONDITIONAL", "WHILE", "COLLECTIVES", "CUSTOM_CALL"} <= set(parts)
    assert compile_options("gpu", "off") == {flag: ""}
    monkeypatch.setenv("XLA_FLAGS", f"--{flag}=FUSION")
    assert compile_options("gpu") == {}
    monkeypatch.setenv("XLA_FLAGS", f"--{level}=3")
    assert compile_options("cpu") == {}
    options = {"xla_no_such_option": "1"}
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        programs.Programs(runner("xla").model, [Bucket(D=2, P=0, F=0)], options=options)


def test_a_runner_compiles_with_the_options_it_was_asked_for(monkeypatch):
    asked = []

    def options(platform, cuda_graphs):
        asked.append((platform, cuda_graphs))
        return {"xla_no_such_option": "1"}

    monkeypatch.setattr("jserve.runner.runner.compile_options", options)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        make_runner(cuda_graphs="off")
    assert asked == [("cpu", "off")]


def test_a_program_that_does_not_compile_ends_the_start_without_those_behind_it():
    begun = []

    def compiler(name, *args, **how):
        begun.append(name)
        if len(begun) > 1:
            time.sleep(0.5)
        raise ValueError("no program")

    model, buckets = runner("xla").model, [Bucket(D=d, P=0, F=0) for d in (2, 4, 8)]
    with pytest.raises(ValueError, match="no program"):
        programs.Programs(model, buckets, threads=1, compiler=compiler)
    assert len(begun) <= 2
