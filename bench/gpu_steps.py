"""Stages of ``bench.gpu``: the device's ceilings, whole steps right or wrong, and their times.

Owns models with weights drawn on the device, KV filled with random values on random pages, and the
bytes and flops a step cannot do without. Must not know kernels. ``share`` is the time those take at
the measured ceilings over the measured time.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.dispatch import call_us
from bench.gpu import Record
from jserve.model.attention import backend
from jserve.model.families import family_for
from jserve.model.family import Arch
from jserve.model.hand import Row, pack
from jserve.model.shard import ShardRules, make_mesh
from jserve.model.step import DeviceState, StepModel, make_step
from jserve.model.view import Bucket, StepDims
from jserve.runner.programs import use_compile_cache
from jserve.runner.state import new_state
from jserve.weights.dummy import draw_all

READ_BANDWIDTH = 4.3e12
PEAK_BF16 = 780e12
_LLAMA3 = {"family": "llama", "max_position": 131072, "rope_theta": 500000.0}
ARCHS = {
    "1b": Arch(L=16, D=2048, F=8192, N=32, K=8, H=64, V=128256, tied=True, **_LLAMA3),
    "8b": Arch(L=32, D=4096, F=14336, N=32, K=8, H=128, V=128256, **_LLAMA3),
    "tiny": Arch(L=1, D=64, F=96, N=2, K=1, H=64, V=384, tied=True, **_LLAMA3),
}


# --- ceilings


def facts(record: Record) -> None:
    """What the machine is and what it can do at most."""
    device = jax.devices()[0]
    versions = {n: _version(n) for n in ("jax", "jaxlib", "jax-cuda13-plugin", "torch")}
    record.add("device", kind=device.device_kind, platform=device.platform, **versions)
    n = 2**20 if record.tiny else 2**33
    record.attempt("read bandwidth", functools.partial(_read, n))
    record.attempt("copy bandwidth", functools.partial(_copy, n))
    for dtype in ("bfloat16", "float8_e4m3fn"):
        side = 128 if record.tiny else 8192
        record.attempt(f"matmul {dtype}", functools.partial(_matmul, side, jnp.dtype(dtype)))
    for rows in (1, 8, 64, 256):
        shape = (rows, 256, 512) if record.tiny else (rows, 4096, 28672)
        record.attempt(f"skinny matmul {rows}", functools.partial(_skinny, *shape))
    for n_kept, n_donated in ((2, 1), (24, 8), (98, 38), (194, 70)):
        repeats = 3 if record.tiny else 300
        measure = functools.partial(_dispatch, n_kept, n_donated, repeats)
        record.attempt(f"dispatch of {n_kept} + {n_donated} arrays", measure)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def _time(fn: Any, *args: Any, repeats: int = 10) -> float:
    """Median seconds of a call, results waited for."""
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _random(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.jit(
        lambda: jax.random.normal(jax.random.key(1), shape, jnp.bfloat16).astype(dtype)
    )()


def _read(n_bytes: int) -> dict[str, float]:
    x = _random(n_bytes // 2 // 1024, 1024)
    spent = _time(jax.jit(lambda a: jnp.max(a, axis=1)), x)
    return {"bytes_per_s": n_bytes / spent, "seconds": spent}


def _copy(n_bytes: int) -> dict[str, float]:
    x = _random(n_bytes // 4 // 1024, 1024)
    spent = _time(jax.jit(lambda a: a + jnp.bfloat16(1)), x)
    return {"bytes_per_s": n_bytes / spent, "seconds": spent}


def _matmul(side: int, dtype: Any) -> dict[str, float]:
    a, b = _random(side, side, dtype=dtype), _random(side, side, dtype=dtype)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        dims = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.bfloat16)

    spent = _time(jax.jit(product), a, b)
    return {"tflops": 2 * side**3 / spent / 1e12, "seconds": spent}


def _skinny(rows: int, K: int, N: int) -> dict[str, float]:
    """A decode step's kind of product; eight weights in turn, so that none is in the L2."""
    x, weights = _random(max(rows, 2), K), [_random(N, K) for _ in range(8)]

    def chain(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for w in weights:
            y = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))
            x = x + y[:, :K] * jnp.bfloat16(1e-3)
        return x

    spent = _time(jax.jit(chain), x, weights) / 8
    return {"us": spent * 1e6, "bytes_per_s": N * K * 2 / spent}


def _dispatch(n_kept: int, n_donated: int, repeats: int) -> dict[str, float]:
    return {"us": call_us(n_kept, n_donated, put=False, repeats=repeats)}


# --- whole steps


class Rig:
    """A model on this machine's first device, its KV full of random values."""

    def __init__(self, arch: Arch, attn: str, *, n_pages: int, M: int, Z: int = 64) -> None:
        device = jax.devices()[0]
        attention = backend(attn, device.platform)
        self.arch, mesh, rules = arch, make_mesh(1, [device]), ShardRules()
        family = family_for({"architectures": ["LlamaForCausalLM"]})
        stored = attention.kv_dtype(jnp.bfloat16)
        self.model = StepModel(
            family=family,
            arch=arch,
            backend=attention,
            dims=StepDims(C=256, M=M, Z=Z, V=arch.V),
            mesh=mesh,
            rules=rules,
            n_pages=n_pages,
            kv_dtype=stored,
            dtype=jnp.bfloat16,
        )
        self.params = draw_all(family.specs(arch, 1), 0, mesh, rules, jnp.bfloat16)
        self.pages = np.random.default_rng(0).permutation(n_pages - 1) + 1
        self.state = new_state(self.model)
        self._programs: dict[Bucket, Any] = {}

    def fill(self, poison: np.ndarray | None = None) -> None:
        """Random keys and values; NaN where ``poison`` bool[P, Z] says."""
        shape, stored = self.model.layer_shape, self.model.kv_dtype
        heads_second = self.model.backend.kv_axis == 1

        @functools.partial(jax.jit, donate_argnums=0)
        def one(old: jax.Array, key: jax.Array, bad: jax.Array) -> jax.Array:
            P, Z, K, H = shape if not heads_second else (shape[0], shape[2], shape[1], shape[3])
            x = jax.random.normal(key, (P, Z, K, H), jnp.bfloat16)
            x = jnp.where(bad[:, :, None, None], jnp.nan, x)
            x = x.swapaxes(1, 2) if heads_second else x
            return jax.lax.bitcast_convert_type(x, stored) if stored == jnp.uint16 else x

        bad = np.zeros((shape[0], self.model.dims.Z), bool) if poison is None else poison
        keys = jax.random.split(jax.random.key(5), 2 * self.arch.L).reshape(-1, 2)
        kv = [
            tuple(one(pool, k, jnp.asarray(bad)) for pool, k in zip(layer, two, strict=True))
            for layer, two in zip(self.state.kv, keys, strict=True)
        ]
        self.state = DeviceState(kv=kv, slots=self.state.slots)

    def program(self, bucket: Bucket) -> Any:
        if bucket not in self._programs:
            self._programs[bucket] = jax.jit(make_step(self.model, bucket), donate_argnums=(1,))
        return self._programs[bucket]

    def buffer(self, bucket: Bucket, decode: list[tuple[int, int]], prefill: Any = ()) -> Any:
        """(start, count) of the rows, each on pages of its own."""
        rng, at, Z = np.random.default_rng(3), 0, self.model.dims.Z
        rows = []
        for start, count in (*decode, *prefill):
            n = -(-(start + count) // Z)
            tokens = rng.integers(0, self.arch.V, count).tolist()
            rows.append(Row(self.pages[at : at + n].tolist(), start, tokens))
            at += n
        dims, attn = self.model.dims, self.model.backend
        return pack(bucket, dims, attn, rows[: len(decode)], rows[len(decode) :])

    def run(self, bucket: Bucket, buf: Any) -> Any:
        self.state, out = self.program(bucket)(self.params, self.state, buf)
        return out


def step_numerics(record: Record) -> None:
    """The same mixed step by ``hopper`` and by ``ref``, from the same weights and poisoned KV."""
    if record.tiny:
        cases = {"tiny": ("tiny", 1, [(70, 1), (3, 1)], [(10, 5)], Bucket(D=2, P=8, F=1))}
    else:
        mixed = Bucket(D=16, P=256, F=4)
        rows = [(int(n), 1) for n in np.random.default_rng(2).integers(0, 1500, 12)]
        verify = Bucket(D=8, P=0, F=0, J=4)
        cases = {
            "1b, 2 layers, mixed": ("1b", 2, rows, [(0, 100), (700, 60), (63, 65)], mixed),
            "8b, 2 layers, mixed": ("8b", 2, rows, [(0, 100), (700, 60), (63, 65)], mixed),
            "8b, 2 layers, verify": ("8b", 2, [(77, 4), (500, 3), (1, 1)], [], verify),
        }
    for name, (arch, L, decode, prefill, bucket) in cases.items():
        check = functools.partial(_step_check, arch, L, decode, prefill, bucket)
        record.attempt(name, check)


def _step_check(name: str, L: int, decode: Any, prefill: Any, bucket: Bucket) -> dict[str, Any]:
    arch = _with_layers(ARCHS[name], L)
    outs, pools = [], []
    for attn in ("ref", "hopper"):
        rig = Rig(arch, attn, n_pages=64 if name == "tiny" else 1024, M=32)
        rig.fill(_unseen(rig, (*decode, *prefill)))
        out = rig.run(bucket, rig.buffer(bucket, decode, prefill))
        outs.append(np.asarray(out.packed_RX))
        keys = np.asarray(rig.state.kv[-1][0], np.float32)
        pools.append(keys.swapaxes(1, 2) if rig.model.backend.kv_axis == 1 else keys)
        del rig
    return _compare_steps(outs, pools, bucket, len(decode), len(prefill))


def _with_layers(arch: Arch, L: int) -> Arch:
    return dataclasses.replace(arch, L=L)


def _unseen(rig: Rig, rows: Any) -> np.ndarray:
    """bool[P, Z]: places that no row may see, also those its own step writes."""
    P, Z = rig.model.n_pages, rig.model.dims.Z
    hidden, at = np.ones((P, Z), bool), 0
    for start, count in rows:
        n = -(-(start + count) // Z)
        hidden[rig.pages[at : at + n]] = (np.arange(n * Z) >= start).reshape(n, Z)
        at += n
    return hidden


def _compare_steps(outs: Any, pools: Any, bucket: Bucket, D: int, F: int) -> dict[str, Any]:
    rows = [*range(D), *range(bucket.D, bucket.D + F)]
    ref, got = (out[rows] for out in outs)
    J = bucket.J
    same = float((ref[:, 2] == got[:, 2]).mean())
    logprobs = [x[:, 2 + J].astype(np.int32).view(np.float32) for x in (ref, got)]
    known = ~np.isnan(pools[0])
    known[0] = False  # the scratch page: only one of the two writes padding there
    apart = np.abs(pools[0] - pools[1])[known].max()
    return {
        "keys_apart": float(apart),
        "same_tokens": same,
        "finite": bool((got[:, 1] == 1).all()),
        "logprob_diff": float(np.abs(logprobs[0] - logprobs[1]).max()),
        "ok": bool(same > 0.9 and (got[:, 1] == 1).all() and apart < 0.1),
    }


def ideal(arch: Arch, rows: list[tuple[int, int]]) -> tuple[int, float]:
    """(bytes, flops) a step cannot do without: every weight once, every key and value once."""
    head = arch.V * arch.D
    group = (arch.N + 2 * arch.K) * arch.H * arch.D + arch.N * arch.H * arch.D
    weights = arch.L * (group + 3 * arch.D * arch.F) + head
    keys = sum(s + c for s, c in rows)
    tokens = sum(c for _, c in rows)
    pairs = sum(c * s + c * (c + 1) / 2 for s, c in rows)
    n_bytes = 2 * weights + keys * 4 * arch.L * arch.K * arch.H
    flops = 2.0 * tokens * (weights - head) + 2.0 * len(rows) * head
    return n_bytes, flops + 4.0 * pairs * arch.L * arch.N * arch.H


def steps_1b(record: Record) -> None:
    loads = {1: (512, 2048, 8192), 8: (2048,), 32: (2048,), 64: (512, 2048), 256: (512, 2048)}
    _steps(record, "1b", loads, n_pages=10240)


def steps_8b(record: Record) -> None:
    loads = {
        1: (512, 2048),
        64: (2048, 8192),
        32: (2048,),
        128: (512, 2048),
        256: (512, 2048),
        8: (2048,),
    }
    _steps(record, "8b", loads, n_pages=9000)


def _steps(record: Record, name: str, loads: dict[int, tuple[int, ...]], n_pages: int) -> None:
    if record.tiny:
        name, loads, n_pages = "tiny", {2: (70,)}, 16
    begin = time.perf_counter()
    use_compile_cache(Path(tempfile.gettempdir()) / "jserve-gpu-programs")
    rig = Rig(ARCHS[name], "hopper", n_pages=n_pages, M=8 if record.tiny else 130)
    rig.fill()
    jax.block_until_ready(rig.state.kv)
    record.add("weights and KV", seconds=time.perf_counter() - begin)
    for batch, contexts in loads.items():
        for context in contexts:
            measure = functools.partial(_step_time, record, rig, batch, context)
            record.attempt(f"{name}, batch {batch}, context {context}", measure)
    chunk = Bucket(D=2, P=16, F=1) if record.tiny else Bucket(D=32, P=2048, F=8)
    rows = ([(70, 1)], [(5, 9)]) if record.tiny else ([(2047, 1)] * 32, [(2048, 2048)])
    record.attempt(f"{name}, mixed {chunk}", functools.partial(_timed, record, rig, chunk, *rows))


def _step_time(record: Record, rig: Rig, batch: int, context: int) -> dict[str, Any]:
    bucket = Bucket(D=max(batch, 2), P=0, F=0)
    return _timed(record, rig, bucket, [(context - 1, 1)] * batch, [])


def _timed(record: Record, rig: Rig, bucket: Bucket, decode: Any, prefill: Any) -> dict[str, Any]:
    begin = time.perf_counter()
    buf = rig.buffer(bucket, decode, prefill)
    for _ in range(3):  # the second run captures the graph
        jax.block_until_ready(rig.run(bucket, buf))
    compiled_s = time.perf_counter() - begin
    n = 2 if record.tiny else 30
    times, launches = [], []
    for _ in range(1 if record.tiny else 5):
        begin = time.perf_counter()
        for _ in range(n):
            out = rig.run(bucket, buf)
        launches.append((time.perf_counter() - begin) / n)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / n)
    spent = statistics.median(times)
    bandwidth = record.figure("facts", "read bandwidth", "bytes_per_s", READ_BANDWIDTH)
    n_bytes, flops = ideal(rig.arch, [*decode, *prefill])
    return {
        "ms": spent * 1e3,
        "tok_per_s": len(decode) / spent,
        "share": max(n_bytes / bandwidth, flops / PEAK_BF16) / spent,
        "launch_us": statistics.median(launches) * 1e6,
        "first_s": compiled_s,
    }


def profile(record: Record) -> None:
    """Kernels of decode steps by time; graphs are off while profiling, so gaps are not the step's."""
    name, batches = ("tiny", (2,)) if record.tiny else ("1b", (2, 64))
    rig = Rig(
        ARCHS[name], "hopper", n_pages=16 if record.tiny else 4200, M=8 if record.tiny else 130
    )
    rig.fill()
    for batch in batches:
        bucket = Bucket(D=batch, P=0, F=0)
        buf = rig.buffer(bucket, [(69 if record.tiny else 2047, 1)] * batch)
        for _ in range(2):
            jax.block_until_ready(rig.run(bucket, buf))
        record.attempt(
            f"{name}, batch {batch}", functools.partial(_profile, record, rig, bucket, buf)
        )


def _profile(record: Record, rig: Rig, bucket: Bucket, buf: Any) -> dict[str, Any]:
    steps = 1 if record.tiny else 5
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                jax.block_until_ready(rig.run(bucket, buf))
        path = next(Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(path))
    spent: Counter[str] = Counter()
    for plane in data.planes:
        if "GPU" in plane.name:
            for line in plane.lines:
                for event in line.events if "Stream" in line.name else ():
                    spent[event.name] += event.duration_ns
    for kernel, ns in spent.most_common(12):
        record.add(f"  {kernel[:42]}", us_per_step=ns / steps / 1e3)
    return {"kernels_us_per_step": sum(spent.values()) / steps / 1e3, "names": len(spent)}
