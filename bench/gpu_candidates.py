"""Stages of ``bench.gpu``: kernels that no device has timed, right or wrong, and beside XLA at the shapes of 1B, 8B and
70B.

It owns their inputs and what XLA does in their place. One that stays (``gpu_beside_xla.verdict``) moves to
``pallas_kernels`` by hand.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.candidates.sample_threshold import ref as threshold_ref, sample_threshold
from bench.gpu_beside_xla import Comparison, interpreted, numerics, timed, times
from bench.gpu_kernels import relative
from bench.gpu_products import products
from bench.gpu_record import Record
from jserve.model import kv_pool
from jserve.model.norms import rms_norm
from jserve.model.rope import rotate
from jserve.model.sample import threshold
from pallas_kernels.add_norm import add_norm, ref as norm_ref
from pallas_kernels.kv_write import Angles, Places, kv_write, ref as kv_ref
from pallas_kernels.paged_attention import q_rows_of

EPS = 1e-6


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


def sampling(tiny: bool) -> Iterator[Comparison]:
    """Logits with a peak, as models give, and without one, which is the worst case."""
    V, batches = (3000, (2,)) if tiny else (128256, (1, 32, 256))
    kinds = {"peak": (12.0, 50, 0.9), "flat, top_p alone": (0.0, 0, 0.9)}
    ours = functools.partial(sample_threshold, **interpreted(tiny))
    for R in batches:
        for kind, (peak, k, p) in kinds.items():
            yield Comparison(
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


def writing(tiny: bool) -> Iterator[Comparison]:
    shapes = {
        "1b": (8, 4, 64, False),
        "8b": (8, 4, 128, False),
        "qwen3 8b, norms": (8, 4, 128, True),
        "70b": (8, 8, 128, False),
        "70b tp8": (1, 8, 128, False),
    }
    if tiny:
        shapes = {"tiny": (1, 2, 64, True)}
    ours = functools.partial(_kv_ours, interpreted(tiny))
    for name, (K, G, H, normed) in shapes.items():
        for T in (2,) if tiny else (2, 32, 256):
            yield Comparison(
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


def norming(tiny: bool) -> Iterator[Comparison]:
    """As many parts as ``jserve.model.fused`` splits a product into; over 8 devices one sum of all."""
    shapes = {"1b": (8, 2048), "8b": (8, 4096), "70b": (4, 8192), "70b tp8": (1, 8192)}
    ours = functools.partial(add_norm, eps=EPS, dtype=jnp.bfloat16, **interpreted(tiny))
    for name, (S, D) in ({"tiny": (2, 512)} if tiny else shapes).items():
        for T in (2,) if tiny else (2, 32, 256):
            yield Comparison(
                "add_norm",
                f"{name}, {T} tokens",
                functools.partial(_sums, S, T, D),
                ours,
                {"fusions": _norm_by_xla},
                _next_norm,
                T * D * (S * 4 + 4 + 4 + 2),
            )


COMPARISONS = (sampling, writing, norming)


# --- stages


def candidate_numerics(record: Record) -> None:
    """Every shape on fresh inputs against float32 references."""
    checks = {"sample_threshold": _kept, "kv_write": _written, "add_norm": _normed}
    numerics(record, [c for some in COMPARISONS for c in some(record.tiny)], checks)


def _kept(c: Comparison, seed: int, tiny: bool) -> dict[str, Any]:
    """Of each row the tokens kept by kernel and reference; a mass within rounding of top_p may move
    the border by a token or two of those that lie densely there."""
    args = c.inputs(seed)
    call = jax.jit(c.ours)
    x, first = np.asarray(args[0]), np.asarray(call(*args))
    want = np.asarray(threshold_ref.sample_threshold(*args))
    counts = [(x >= t[:, None]).sum(1) for t in (first, want)]
    apart = float((np.abs(counts[0] - counts[1]) / counts[1]).max())
    stable = all(np.array_equal(first, call(*args)) for _ in range(1 if tiny else 20))
    return {"counts_apart": apart, "stable": stable, "ok": apart < 2e-3 and stable}


def _written(c: Comparison, seed: int, tiny: bool) -> dict[str, Any]:
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


def _normed(c: Comparison, seed: int, tiny: bool) -> dict[str, Any]:
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


def candidate_times(record: Record) -> None:
    """Each shape by the kernel and by XLA, cold, and a verdict a kernel. Shares are of the read bandwidth, for the
    fewest bytes that a call must move."""
    times(record, COMPARISONS)


def tunings(tiny: bool) -> Iterator[tuple[Comparison, dict[str, int]]]:
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
    for comparison, tune in tunings(record.tiny):
        call = functools.partial(comparison.ours, tune=tune)
        measure = functools.partial(timed, comparison, call, record.tiny)
        record.attempt(f"{comparison.kernel} {comparison.shape}, {tuple(tune.values())}", measure)
