"""Stages of ``bench.gpu``: kernels that no device has timed, right or wrong, and beside XLA at the shapes of 1B, 8B and
70B.

It owns their inputs, what XLA does in their place, and the verdict: a kernel stays if it takes less than 1 / 1.05
of XLA's time at every shape listed here (it then moves to ``pallas_kernels`` by hand). Of XLA's ways to the same
result the fastest counts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.candidates.sample_threshold import ref as threshold_ref, sample_threshold
from bench.gpu_kernels import L2_BYTES, READ_BANDWIDTH, compare, relative, seconds
from bench.gpu_record import Record
from jserve.model import kv_pool, quant, quant_hopper
from jserve.model.norms import rms_norm
from jserve.model.quant import KINDS, Form, QTensor
from jserve.model.rope import rotate
from jserve.model.sample import threshold
from pallas_kernels.add_norm import add_norm, ref as norm_ref
from pallas_kernels.kv_write import Angles, Places, kv_write, ref as kv_ref
from pallas_kernels.launch import interpreter
from pallas_kernels.paged_attention import q_rows_of

Call = Callable[..., Any]
NEEDED = 1.05
EPS = 1e-6


class Contest(NamedTuple):
    """One shape of one kernel. ``inputs`` makes a fresh set of arguments from a seed; ``link`` gives
    the next call's arguments some dependence on the last call's result."""

    kernel: str
    shape: str
    inputs: Callable[[int], tuple[Any, ...]]
    ours: Call
    by_xla: dict[str, Call]
    link: Callable[[tuple[Any, ...], Any], tuple[Any, ...]]
    n_bytes: int
    """Fewest bytes that a call must move."""


class _Limits(NamedTuple):
    """What ``jserve.model.sample.threshold`` reads of a step's draws."""

    temperature_E: Any
    top_k_E: Any
    top_p_E: Any
    min_p_E: Any


class _Places(NamedTuple):
    """What ``kv_pool.write_kv`` reads of a step's view."""

    write_page_T: Any
    write_off_T: Any
    pos_T: Any


# --- the bound of top_k and top_p


def _logits(R: int, V: int, peak: float, k: int, p: float, seed: int) -> tuple[Any, ...]:
    key = jax.random.key(seed)
    x = jax.random.normal(key, (R, V), jnp.float32) * 2
    x = x + peak * (jax.random.uniform(jax.random.split(key)[0], (R, V)) > 1 - 50 / V)
    full = functools.partial(jnp.full, (R,))
    return x, full(0.8), full(k, jnp.int32), full(p), full(0.0)


def _threshold_by_xla(x: Any, t: Any, k: Any, p: Any, m: Any) -> Any:
    scaled = (x - x.max(1, keepdims=True)) / t[:, None]
    return threshold(scaled, _Limits(t, k, p, m))  # type: ignore[arg-type]


def sampling(tiny: bool) -> Iterator[Contest]:
    """Logits with a peak, as models give, and without one, which is the worst case."""
    V, batches = (3000, (2,)) if tiny else (128256, (1, 32, 256))
    kinds = {"peak": (12.0, 50, 0.9), "flat, top_p alone": (0.0, 0, 0.9)}
    ours = functools.partial(sample_threshold, **_interpreted(tiny))
    for R in batches:
        for kind, (peak, k, p) in kinds.items():
            yield Contest(
                "sample_threshold",
                f"[{R}, {V}], {kind}",
                functools.partial(_logits, R, V, peak, k, p),
                ours,
                {"threshold": _threshold_by_xla},
                lambda args, t: (args[0], args[1] + t * 1e-9, *args[2:]),
                R * V * 4,
            )


# --- turning and writing keys and values


def _projections(T: int, K: int, G: int, H: int, normed: bool, seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    Z, P = 64, max(T // 32, 4)  # small: a chain begins with a copy of the pools
    y = jax.random.normal(jax.random.key(seed), (1, T, K, G + 2, H))
    angle = jnp.asarray(rng.uniform(0, 6, (T, H // 2)), jnp.float32)
    places = rng.permutation(P * Z)[:T]
    page, off = (jnp.asarray(x, jnp.int32) for x in (places // Z, places % Z))
    keys, values = jax.random.normal(jax.random.key(seed + 1), (2, P, K, Z, H), jnp.bfloat16)
    norms = (tuple(jnp.ones((2, H), jnp.bfloat16) * 1.5),) if normed else ()
    angles, places = Angles(jnp.cos(angle), jnp.sin(angle)), Places(page, off)
    return y, angles, places, (keys, values), *norms


def _kv_ours(options: dict[str, Any], *args: Any) -> Any:
    G, norms = args[0].shape[3] - 2, dict(zip(["norms"], args[4:], strict=False))
    return kv_write(*args[:4], **norms, eps=EPS, q_rows=q_rows_of(G), **options)


def _kv_by_xla(y: Any, angles: Any, places: Any, pools: Any, *norms: Any) -> Any:
    """What the served step does of it."""
    y, (cos, sin), (page, off) = y.sum(0), angles, places
    T, K, C, H = y.shape
    q, k, v = y[:, :, :-2].reshape(T, -1, H), y[:, :, -2], y[:, :, -1]
    if norms:
        q, k = rms_norm(q, norms[0][0], EPS), rms_norm(k, norms[0][1], EPS)
    tables = jnp.stack([cos, cos], 1), jnp.stack([-sin, sin], 1)
    view: Any = _Places(page, off, page)
    pools = kv_pool.write_kv(pools, rotate(k, *tables), v, view)
    q = rotate(q, *tables).reshape(T, K, C - 2, H).astype(pools[0].dtype)
    return jnp.pad(q, ((0, 0), (0, 0), (0, -(C - 2) % 8), (0, 0))), *pools


def _same_pools(args: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
    """The pools go on; other projections wait for these queries."""
    head, _ = jax.lax.optimization_barrier((args[:3], out[0]))
    return (*head, tuple(out[1:]), *args[4:])


def writing(tiny: bool) -> Iterator[Contest]:
    shapes = {
        "1b": (8, 4, 64, False),
        "8b": (8, 4, 128, False),
        "qwen3 8b, norms": (8, 4, 128, True),
        "70b": (8, 8, 128, False),
        "70b tp8": (1, 8, 128, False),
    }
    if tiny:
        shapes = {"tiny": (1, 2, 64, True)}
    ours = functools.partial(_kv_ours, _interpreted(tiny))
    for name, (K, G, H, normed) in shapes.items():
        for T in (2,) if tiny else (2, 32, 256):
            yield Contest(
                "kv_write",
                f"{name}, {T} tokens",
                functools.partial(_projections, T, K, G, H, normed),
                ours,
                {"scatter": _kv_by_xla},
                _same_pools,
                T * K * H * ((G + 2) * 4 + (G + 2) * 2),
            )


# --- partial sums, residual and norm


def _sums(S: int, T: int, D: int, seed: int) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(seed), 2)
    y, x = jax.random.normal(keys[0], (S, T, D)), jax.random.normal(keys[1], (T, D))
    return y, x, jnp.ones(D, jnp.bfloat16) * 1.5


def _norm_by_xla(y: Any, x: Any, weight: Any) -> Any:
    """What the served step does of it."""
    x = x + y.sum(0)
    return x, rms_norm(x, weight, EPS).astype(jnp.bfloat16)


def _next_norm(args: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
    """The residual stream goes on; other sums wait for the norm of this one."""
    y, _ = jax.lax.optimization_barrier((args[0], out[1]))
    return y, out[0], args[2]


def norming(tiny: bool) -> Iterator[Contest]:
    """As many parts as ``jserve.model.fused`` splits a product into; over 8 devices one sum of all."""
    shapes = {"1b": (8, 2048), "8b": (8, 4096), "70b": (4, 8192), "70b tp8": (1, 8192)}
    ours = functools.partial(add_norm, eps=EPS, dtype=jnp.bfloat16, **_interpreted(tiny))
    for name, (S, D) in ({"tiny": (2, 512)} if tiny else shapes).items():
        for T in (2,) if tiny else (2, 32, 256):
            yield Contest(
                "add_norm",
                f"{name}, {T} tokens",
                functools.partial(_sums, S, T, D),
                ours,
                {"fusions": _norm_by_xla},
                _next_norm,
                T * D * (S * 4 + 4 + 4 + 2),
            )


# --- weights in groups

FORMS = {
    "int4 g128": Form(kind="int4", group=128),
    "int4 zeros g128": Form(kind="int4", group=128, zeros=True),
    "uint4 shifts g32": Form(kind="uint4", group=32, shifts=True),
    "e2m1 g32": Form(kind="e2m1", group=32),
    "e2m1 g16": Form(kind="e2m1", group=16),
    "int8 g32": Form(kind="int8", group=32),
    "fp8 blocks": Form(kind="e4m3", group=128, rounded=True),
}
"""As on load, of AWQ, GGUF's Q4_K, mxfp4, nvfp4, GGUF's Q8_0, DeepSeek-V3."""
MATRICES = {
    "1b qkv": (3072, 2048),
    "1b gate_up": (16384, 2048),
    "1b down": (2048, 8192),
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b gate_up": (28672, 4096),
    "8b down": (4096, 14336),
    "70b tp8 gate_up": (7168, 8192),
    "70b tp8 down": (8192, 3584),
}
EVERY_FORM = "8b down"
"""The matrix that is tried in all forms; the others in the first."""
TINY_FORMS = ("int4 zeros g128", "e2m1 g16", "fp8 blocks")


def _weights(M: int, N: int, D: int, form: Form, seed: int) -> tuple[Any, ...]:
    """Rows of x, and a matrix."""
    keys = iter(jax.random.split(jax.random.key(seed), 6))
    x = jax.random.normal(next(keys), (M, D), jnp.bfloat16)
    B, dtype = form.groups(D), KINDS[form.kind]
    if form.kind == "e4m3":
        q = jax.random.normal(next(keys), (N, D)).astype(dtype)
    else:
        whole = jax.random.bits(next(keys), (N, form.stored(D)), jnp.uint8)
        q = jax.lax.bitcast_convert_type(whole, dtype)
    scale, shift = (jax.random.uniform(next(keys), (N, B)) * 0.01 for _ in range(2))
    zero = jax.random.randint(next(keys), (N, B), -8, 8, jnp.int8) if form.zeros else None
    w = QTensor(q=q, scale=scale, zero=zero, form=form, shift=shift if form.shifts else None)
    return x, w


def _in_float32(x: Any, w: QTensor) -> Any:
    """What both ways compute, up to their rounding."""
    exact = dataclasses.replace(w, form=dataclasses.replace(w.form, dtype="float32"))
    with jax.default_matmul_precision("highest"):
        return quant.product(x.astype(jnp.float32), exact)


def products(tiny: bool) -> Iterator[Contest]:
    """The matrices of a layer, of 70B those of one device of eight, and each form."""
    first = next(iter(FORMS))
    ours = functools.partial(quant_hopper.product, **_interpreted(tiny))
    for name, (N, D) in ({"tiny": (100, 512)} if tiny else MATRICES).items():
        for label in TINY_FORMS if tiny else FORMS if name == EVERY_FORM else (first,):
            form = FORMS[label]
            for M in (2,) if tiny else (1, 16, 64):
                inputs = functools.partial(_weights, M, N, D, form)
                stored = jax.tree.leaves(jax.eval_shape(lambda inputs=inputs: inputs(0))[1])
                yield Contest(
                    "quant_matmul",
                    f"{name}, {label}, {M} rows",
                    inputs,
                    ours,
                    {quant.way_of(form, M): quant.product},
                    lambda args, y: (args[0] + (y[:, :1] * 1e-6).astype(args[0].dtype), args[1]),
                    sum(a.size * a.dtype.itemsize for a in stored) + M * (D * 2 + N * 4),
                )


def _interpreted(tiny: bool) -> dict[str, Any]:
    return {"interpret": interpreter()} if tiny else {}


CONTESTS = (sampling, writing, norming)
REFERENCES: dict[str, Call] = {
    "sample_threshold": threshold_ref.sample_threshold,
    "quant_matmul": _in_float32,
}


# --- stages


def candidate_numerics(record: Record) -> None:
    """Every shape on fresh inputs, whose seed the record holds, against float32 references."""
    _numerics(record, [c for some in CONTESTS for c in some(record.tiny)])


def products_numerics(record: Record) -> None:
    """The same of products with weights in groups: every form, few rows and many."""
    _numerics(record, [c for c in products(record.tiny) if record.tiny or EVERY_FORM in c.shape])


def _numerics(record: Record, contests: Sequence[Contest]) -> None:
    checks = {
        "sample_threshold": _kept,
        "kv_write": _written,
        "add_norm": _normed,
        "quant_matmul": _multiplied,
    }
    for contest in contests:
        measure = functools.partial(_on_fresh, checks[contest.kernel], contest, record.tiny)
        record.attempt(f"{contest.kernel} {contest.shape}", measure)


def _on_fresh(check: Call, contest: Contest, tiny: bool) -> dict[str, Any]:
    seed = time.time_ns() % 2**31
    return {"seed": seed, **check(contest, seed, tiny)}


def _kept(c: Contest, seed: int, tiny: bool) -> dict[str, Any]:
    """Of each row the tokens kept by kernel and reference; a mass within rounding of top_p may move
    the border by a token or two of those that lie densely there."""
    args = c.inputs(seed)
    call = jax.jit(c.ours)
    x, first = np.asarray(args[0]), np.asarray(call(*args))
    want = np.asarray(REFERENCES[c.kernel](*args))
    counts = [(x >= t[:, None]).sum(1) for t in (first, want)]
    apart = float((np.abs(counts[0] - counts[1]) / counts[1]).max())
    stable = all(np.array_equal(first, call(*args)) for _ in range(1 if tiny else 20))
    return {"counts_apart": apart, "stable": stable, "ok": apart < 2e-3 and stable}


def _written(c: Contest, seed: int, tiny: bool) -> dict[str, Any]:
    given = c.inputs(seed)
    norms = dict(zip(["norms"], given[4:], strict=False))
    want = kv_ref.kv_write(*given[:4], **norms, eps=EPS)
    G, call = given[0].shape[3] - 2, jax.jit(c.ours)
    runs = [call(*given) for _ in range(2 if tiny else 20)]
    q, keys, values = runs[0]
    rel = max(relative(x, y) for x, y in zip((q[:, :, :G], keys, values), want, strict=True))
    stable = all(
        np.array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
        for run in runs[1:]
        for x, y in zip((q[:, :, :G], keys, values), (run[0][:, :, :G], *run[1:]), strict=True)
    )
    return {"rel": rel, "stable": stable, "ok": bool(rel < 1e-2 and stable)}


def _normed(c: Contest, seed: int, tiny: bool) -> dict[str, Any]:
    y, x, weight = c.inputs(seed)
    want = norm_ref.add_norm(y, x, weight, EPS, jnp.bfloat16)
    call = jax.jit(c.ours)
    runs = [
        [np.asarray(part, np.float32) for part in call(y, x, weight)]
        for _ in range(2 if tiny else 20)
    ]
    rel = max(relative(x, y) for x, y in zip(runs[0], want, strict=True))
    stable = all(np.array_equal(x, y) for run in runs for x, y in zip(runs[0], run, strict=True))
    return {"rel": rel, "stable": stable, "ok": bool(rel < 1e-2 and stable)}


def _multiplied(c: Contest, seed: int, tiny: bool) -> dict[str, Any]:
    """Also the form that the interpreter has proved, with weights through shared memory."""
    args = c.inputs(seed)
    want = REFERENCES[c.kernel](*args)
    proved = jax.jit(functools.partial(c.ours, tune={"register_w": False}))(*args)
    call = jax.jit(c.ours)
    found = compare(lambda: call(*args), want, slice(None), tiny=tiny)
    apart = relative(proved, want)
    return {**found, "proved_rel": apart, "ok": found["ok"] and apart < 1e-2}


def candidate_times(record: Record) -> None:
    """Each shape by the kernel and by XLA, cold, and a verdict a kernel. Shares are of the read bandwidth, for the
    fewest bytes that a call must move."""
    _times(record, CONTESTS)


def products_times(record: Record) -> None:
    """The same of products with weights in groups, at every matrix of a layer."""
    _times(record, (products,))


def _times(record: Record, contests: Sequence[Callable[[bool], Iterator[Contest]]]) -> None:
    limit = record.figure("facts", "read bandwidth", "bytes_per_s", READ_BANDWIDTH)
    for some in contests:
        ratios: dict[str, float] = {}
        wanted = list(some(record.tiny))
        for contest in wanted:
            measure = functools.partial(_contest, contest, record.tiny, ratios, limit)
            record.attempt(f"{contest.kernel} {contest.shape}", measure)
        record.add(wanted[0].kernel, **verdict(ratios, len(wanted)))


def verdict(ratios: dict[str, float], wanted: int) -> dict[str, Any]:
    """What becomes of a kernel: XLA's time over its own at each shape decides."""
    if len(ratios) < wanted:
        return {"verdict": "open", "shapes": f"{len(ratios)} of {wanted}"}
    lost = [shape for shape, ratio in ratios.items() if ratio < NEEDED]
    found = {"verdict": "goes" if lost else "stays", "least": min(ratios.values())}
    return {**found, "lost": "; ".join(lost)} if lost else found


def _contest(c: Contest, tiny: bool, ratios: dict[str, float], limit: float) -> dict[str, Any]:
    calls = 1 if tiny else 8
    sets = _sets(c, tiny)
    mine = _time(c, c.ours, sets, calls, tiny)
    others = {name: _time(c, call, sets, calls, tiny) for name, call in c.by_xla.items()}
    best = min(others, key=lambda name: others[name])
    ratios[c.shape] = others[best] / mine
    return {
        "us": mine * 1e6,
        "xla_us": others[best] * 1e6,
        "ratio": ratios[c.shape],
        "xla": best,
        "bytes_per_s": c.n_bytes / mine,
        "share": c.n_bytes / mine / limit,
        "verdict": "stays" if ratios[c.shape] >= NEEDED else "goes",
    }


def tunings(tiny: bool) -> Iterator[tuple[Contest, dict[str, int]]]:
    """What is tried for the tune.json of each kernel that has one, at a shape with few and one with
    many rows."""
    grids: list[tuple[Any, tuple[str, ...], tuple[dict[str, int], ...]]] = [
        (
            sampling,
            ("[1, 128256], peak", "[256, 128256], peak"),
            tuple({"lines": n, "stages": s} for n, s in ((8, 8), (8, 24), (16, 8), (16, 12))),
        ),
        (
            products,
            ("8b down, int4 g128, 1 rows", "8b gate_up, int4 g128, 64 rows"),
            tuple(
                {"warpgroups": w, "depth": d, "stages": s}
                for w, d, s in ((1, 256, 4), (1, 128, 8), (2, 128, 8), (2, 256, 3))
            ),
        ),
    ]
    for some, shapes, tunes in grids:
        wanted = [c for c in some(tiny) if tiny or c.shape in shapes]
        yield from itertools.product(wanted[:2], tunes[:1] if tiny else tunes)


def candidate_tune(record: Record) -> None:
    """Figures for the tune.json of each."""
    for contest, tune in tunings(record.tiny):
        call = functools.partial(contest.ours, tune=tune)
        measure = functools.partial(_tuned, contest, call, record.tiny)
        record.attempt(f"{contest.kernel} {contest.shape}, {tuple(tune.values())}", measure)


def _tuned(c: Contest, call: Call, tiny: bool) -> dict[str, Any]:
    spent = _time(c, call, _sets(c, tiny), 1 if tiny else 8, tiny)
    return {"us": spent * 1e6, "bytes_per_s": c.n_bytes / spent}


def _sets(c: Contest, tiny: bool) -> list[tuple[Any, ...]]:
    """Arguments that together are far larger than the L2, or eight of them."""
    copies = 1 if tiny else max(1, min(8, 4 * L2_BYTES // c.n_bytes))
    return [c.inputs(seed) for seed in range(copies)]


def _time(c: Contest, call: Call, sets: Sequence[Any], calls: int, tiny: bool) -> float:
    def chain(sets: Sequence[tuple[Any, ...]]) -> Any:
        """Each call reads the next set, so that small ones are not in the L2 either."""
        sets, out = list(sets), None
        for i in range(calls):
            at = i % len(sets)
            args = sets[at] if out is None else c.link(sets[at], out)
            out = call(*args)
        return out

    return seconds(chain, (sets,), calls, 1 if tiny else 7)
