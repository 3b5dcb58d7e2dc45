"""Stages of ``bench.gpu``: whole steps right or wrong, and their times: decode, mixed and verification.

It owns which steps are measured. ``share`` is the least time a step can take over the measured one.
"""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu_record import GRAPHS, Record
from bench.gpu_rig import ARCHS, FAMILIES, Rig, Span, least_seconds, level_of
from jserve.kv_layout import KV_FORMS
from jserve.model.arch import Arch, resized, with_kv_forms
from jserve.model.draft_tree import Parents
from jserve.model.kv_bytes import BYTES
from jserve.model.kv_quant import E4M3
from jserve.model.view import Bucket

BF16 = np.dtype(jnp.bfloat16)
TREE_OF_4 = (0, 0, 1)
TREE_OF_16 = tuple((j - 1) // 2 for j in range(1, 16))
BATCHES = (1, 8, 32, 64, 128, 256, 2, 4, 16)
"""In order of worth, for a stage that is cut."""
CONTEXTS = (2048, 512, 8192)
QUANTISED: dict[str, Any] = {"batches": (1, 64, 16, 8, 32), "contexts": (2048, 8192)}
"""Of steps with quantised weights."""


def step_numerics(record: Record) -> None:
    """The same mixed step by the attention of this call and by ``ref``, from the same weights and poisoned KV."""
    if record.tiny:
        rows, chunk = [(70, 1), (3, 1)], [(10, 5)]
        tree = Bucket(D=2, P=8, F=1, J=4, tree=TREE_OF_4)
        cases = {
            "tiny": ("tiny", 1, rows, chunk, Bucket(D=2, P=8, F=1), BF16),
            "tiny, tree, 8 bits": ("tiny", 1, [(70, 4), (3, 1)], chunk, tree, E4M3),
            "tiny, int8": ("tiny", 1, rows, chunk, Bucket(D=2, P=8, F=1), BYTES),
            "tiny, int4 weights": ("tiny", 1, rows, chunk, Bucket(D=2, P=8, F=1), BF16, "int4"),
        }
    else:
        mixed = Bucket(D=16, P=256, F=4)
        rows = [(int(n), 1) for n in np.random.default_rng(2).integers(0, 1500, 12)]
        chunks, few = [(0, 100), (700, 60), (63, 65)], [(77, 4), (500, 3), (1, 1)]
        verify = Bucket(D=8, P=0, F=0, J=4)
        tree = Bucket(D=8, P=256, F=4, J=4, tree=TREE_OF_4)
        cases = {
            "1b, 2 layers, mixed": ("1b", 2, rows, chunks, mixed, BF16),
            "8b, 2 layers, mixed": ("8b", 2, rows, chunks, mixed, BF16),
            "8b, 2 layers, verify": ("8b", 2, few, [], verify, BF16),
            "8b, 2 layers, mixed, 8 bits": ("8b", 2, rows, chunks, mixed, E4M3),
            "8b, 2 layers, mixed, int8": ("8b", 2, rows, chunks, mixed, BYTES),
            "8b, 2 layers, tree beside chunks": ("8b", 2, few, chunks, tree, BF16),
            "8b, 2 layers, verify, int4 weights": ("8b", 2, few, [], verify, BF16, "int4"),
        }
    for name, case in cases.items():
        record.attempt(name, functools.partial(_step_check, record, *case))


def _step_check(
    record: Record,
    name: str,
    L: int,
    decode: Any,
    prefill: Any,
    bucket: Bucket,
    dtype: Any,
    quantization: str = "",
) -> dict[str, Any]:
    """``ref`` multiplies quantised weights by XLA."""
    arch = _stored_as(_with_layers(ARCHS[name], L), dtype)
    outs, pools = [], []
    how: dict[str, Any] = {"M": 32, "kv_dtype": dtype, "quantization": quantization}
    how["cuda_graphs"] = record.cuda_graphs
    for attn in ("ref", record.attn):
        kernels = "" if attn == "ref" else level_of(record)
        rig = Rig(arch, attn, n_pages=64 if name == "tiny" else 1024, kernels=kernels, **how)
        rig.fill(_unseen(rig, (*decode, *prefill)))
        out = rig.run(bucket, rig.buffer(bucket, decode, prefill))
        outs.append(np.asarray(out.packed_RX))
        pools.append(rig.last_keys())
        del rig
    return _compare_steps(outs, pools, bucket, len(decode), len(prefill))


def _with_layers(arch: Arch, L: int) -> Arch:
    return resized(arch, L=L)


def _stored_as(arch: Arch, dtype: Any) -> Arch:
    """``arch`` with a scale for each key and value where KV is of bytes."""
    return with_kv_forms(arch, KV_FORMS[0], (), "bfloat16") if dtype == BYTES else arch


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
    # Of two numbers that round to neighbours in e4m3 one is up to an eighth above the other; in int8 by less.
    apart = (np.abs(pools[0] - pools[1]) / np.maximum(1, np.abs(pools[0])))[known].max()
    return {
        "keys_apart": float(apart),
        "same_tokens": same,
        "finite": bool((got[:, 1] == 1).all()),
        "logprob_diff": float(np.abs(logprobs[0] - logprobs[1]).max()),
        "ok": bool(same > 0.9 and (got[:, 1] == 1).all() and apart < 0.13),
    }


def graphs(record: Record) -> None:
    """A step of one layer as one CUDA graph, as graphs of XLA's own choice, and without: which of them
    run, and the fastest, which later stages take."""
    name, n_pages, M, context = ("tiny", 16, 8, 70) if record.tiny else ("1b", 512, 34, 2048)
    arch = _with_layers(ARCHS[name], 1)

    def measure(mode: str) -> dict[str, Any]:
        rig = Rig(arch, record.attn, n_pages=n_pages, M=M, cuda_graphs=mode)
        rig.fill()
        return {"cuda_graphs": mode, **_step_time(record, rig, 1, context)}

    for mode in GRAPHS:
        record.attempt(f"{name}, one layer, {mode}", functools.partial(measure, mode), share=0.4)
    ran = {x["ms"]: x["cuda_graphs"] for x in record.cases() if "ms" in x}
    record.add("verdict", cuda_graphs=ran[min(ran)] if ran else GRAPHS[-1], ok=bool(ran))


def steps_1b(record: Record) -> None:
    """KV of 256 rows of 8k: 69 GB."""
    _steps(record, "1b", n_pages=33000)


def steps_8b(record: Record) -> None:
    """KV of 64 rows of 8k: 71 GB beside 16 GB of weights."""
    _steps(record, "8b", n_pages=8450)


def steps_8b_kv8(record: Record) -> None:
    """Twice the rows in as many bytes, and half the bytes of each."""
    _steps(record, "8b", n_pages=16900, kv_dtype=E4M3)


def steps_8b_kv_int8(record: Record) -> None:
    """As many rows as there are of e4m3, with a scale for each key and value: 1/32 more bytes."""
    _steps(record, "8b", n_pages=16380, kv_dtype=BYTES, batches=(1, 64, 32), contexts=(2048, 8192))


def steps_8b_fp8(record: Record) -> None:
    """Matrices of e4m3 with a scale a row, and activations rounded to it."""
    _steps(record, "8b", n_pages=8450, **QUANTISED, quantization="fp8")


def steps_8b_int4(record: Record) -> None:
    """Matrices of 4 bits in groups of 128."""
    _steps(record, "8b", n_pages=8450, **QUANTISED, quantization="int4")


def steps_30b_a3b(record: Record) -> None:
    """Experts: KV of 64 rows of 2k, 13 GB beside 61 GB of weights."""
    _steps(record, "30b-a3b", n_pages=2112, batches=(1, 64, 8, 32), contexts=(2048, 512))


def steps_v2_lite(record: Record) -> None:
    """Experts and latent attention: KV of 64 rows of 8k, 16 GB beside 31 GB of weights."""
    _steps(record, "v2-lite", n_pages=8450, batches=(1, 64, 8, 32), contexts=(2048, 8192))


def _filled(
    record: Record, name: str, *, n_pages: int, M: int, kv_dtype: Any = BF16, quantization: str = ""
) -> Rig:
    """A process that goes on after a lost case draws anew, and adds no second line.

    Raises:
        SystemExit: it could not be drawn, 0 where it does not fit; the stage's lines say why.
    """
    found: list[Rig] = []

    def draw() -> dict[str, Any]:
        begin = time.perf_counter()
        how: dict[str, Any] = {"kv_dtype": kv_dtype, "cuda_graphs": record.cuda_graphs}
        how |= {"quantization": quantization, "kernels": level_of(record) if quantization else ""}
        arch = _stored_as(ARCHS[name], kv_dtype)
        rig = Rig(arch, record.attn, n_pages=n_pages, M=M, family=FAMILIES[name], **how)
        rig.fill()
        jax.block_until_ready(rig.state.kv)
        found.append(rig)
        return {"seconds": time.perf_counter() - begin, "pages": rig.model.n_pages}

    title = f"{name}, weights and KV drawn"
    record.attempt(title, draw)
    line = next(x for x in record.cases() if x["name"] == title)
    if "seconds" in line and not found:
        draw()
    if not found:
        raise SystemExit("error" in line)
    return found[0]


def _steps(
    record: Record,
    name: str,
    n_pages: int,
    *,
    kv_dtype: Any = BF16,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    quantization: str = "",
) -> None:
    M = 130
    if record.tiny:
        batches, contexts, n_pages, M = (2, 1), (70, 600), 16, 8
        name = f"tiny {name}" if f"tiny {name}" in ARCHS else "tiny"
    how: dict[str, Any] = {"kv_dtype": kv_dtype, "quantization": quantization}
    rig = _filled(record, name, n_pages=n_pages, M=M, **how)
    mixed = Bucket(D=2, P=16, F=1) if record.tiny else Bucket(D=32, P=2048, F=8)
    for context in contexts:
        for batch in batches:
            title = f"{name}, batch {batch}, context {context}"
            if rig.fits(batch, context):
                record.attempt(title, functools.partial(_step_time, record, rig, batch, context))
            else:
                record.add(title, skipped="no room")
    rows = ([(70, 1)], [(5, 9)]) if record.tiny else ([(2047, 1)] * 32, [(2048, 2048)])
    record.attempt(f"{name}, mixed {mixed}", functools.partial(_timed, record, rig, mixed, *rows))


def _decode_bucket(batch: int, J: int = 1, tree: Parents = ()) -> Bucket:
    return Bucket(D=max(batch, 2), P=0, F=0, J=J, tree=tree)


def _step_time(record: Record, rig: Rig, batch: int, context: int) -> dict[str, Any]:
    return _timed(record, rig, _decode_bucket(batch), [(context - 1, 1)] * batch, [])


def _timed(
    record: Record, rig: Rig, bucket: Bucket, decode: list[Span], prefill: list[Span]
) -> dict[str, Any]:
    buf = rig.buffer(bucket, decode, prefill)
    compiled = rig.compile(bucket)
    for _ in range(3):  # the second run captures the graph
        jax.block_until_ready(rig.run(bucket, buf))
    begin = time.perf_counter()
    jax.block_until_ready(rig.run(bucket, buf))
    n = 2 if record.tiny else max(3, min(30, int(0.15 / (time.perf_counter() - begin))))
    times, launches = [], []
    for _ in range(1 if record.tiny else 5):
        begin = time.perf_counter()
        for _ in range(n):
            out = rig.run(bucket, buf)
        launches.append((time.perf_counter() - begin) / n)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / n)
    spent = statistics.median(times)
    drawn = len(decode) * bucket.J + len(prefill)
    ran = rig.model.backend.name
    return {
        **({} if ran == record.attn else {"ran": ran}),
        "ms": spent * 1e3,
        "tok_per_s": len(decode) / spent,
        "share": least_seconds(record, rig, [*decode, *prefill], drawn) / spent,
        "launch_us": statistics.median(launches) * 1e6,
        "compile_s": compiled,
    }


def verify(record: Record) -> None:
    """What it costs to verify drafts: a step of J tokens a row against a decode step, and the tokens
    a second that makes when so many of them stand (the drafts themselves cost nothing here)."""
    name, widths, batches, context = "8b", (2, 4, 8, 16), (1, 8, 32), 2048
    n_pages, M = 1100, 34
    if record.tiny:
        name, widths, batches, context, n_pages, M = "tiny", (4,), (2,), 70, 16, 8
    rig = _filled(record, name, n_pages=n_pages, M=M)
    trees = (TREE_OF_4,) if record.tiny else (TREE_OF_4, TREE_OF_16)
    for batch in batches:
        decode = functools.partial(_step_time, record, rig, batch, context)
        record.attempt(f"{name}, batch {batch}, decode", decode)
        alone = record.figure("verify", f"{name}, batch {batch}, decode", "ms", math.nan)
        one = functools.partial(_verify_time, record, rig, batch, context, alone)
        for J in widths:
            measure = functools.partial(one, _decode_bucket(batch, J))
            record.attempt(f"{name}, batch {batch}, verify of {J}", measure)
        for tree in trees:
            measure = functools.partial(one, _decode_bucket(batch, 1 + len(tree), tree))
            record.attempt(f"{name}, batch {batch}, tree of {1 + len(tree)}", measure)


def _verify_time(
    record: Record, rig: Rig, batch: int, context: int, decode_ms: float, bucket: Bucket
) -> dict[str, Any]:
    J = bucket.J
    found = _timed(record, rig, bucket, [(context - J, J)] * batch, [])
    rates = {
        f"tok_per_s_at_{stand}": batch * stand / found["ms"] * 1e3
        for stand in (2, 3, 4)
        if stand <= J
    }
    return {
        "ms": found["ms"],
        "over_decode": found["ms"] / decode_ms,
        **rates,
        "share": found["share"],
        "launch_us": found["launch_us"],
    }


def profile(record: Record) -> None:
    """Kernels of decode steps by time; graphs are off while profiling, so gaps are not the step's."""
    name, batches = ("tiny", (2,)) if record.tiny else ("1b", (2, 64))
    pages, M = (16, 8) if record.tiny else (4200, 130)
    rig = _filled(record, name, n_pages=pages, M=M)
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
