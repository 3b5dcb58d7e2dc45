"""Stages of ``bench.gpu``: the experts of a layer, right or wrong, and beside the limits.

It owns the layers of well-known mixtures of experts, what their tokens choose, and the bytes and flops that times are
held against: the weights of the distinct experts that were chosen, and 6 D F a (token, expert) pair. The times hold all
that a layer does after the router: rows gathered, both products, outputs weighted and summed.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import experts_devices as devices
from bench.gpu_kernels import PEAK_BF16, READ_BANDWIDTH, compare, seconds
from bench.gpu_record import NotHere, Record
from pallas_kernels.grouped_matmul import Activation, Experts, ExpertSpec, grouped_mlp, ref
from pallas_kernels.launch import interpreter

MANY_TOKENS = 1024
"""From here on products are the limit, not bytes."""
GATHERED_TOKENS = 8
"""Up to so many tokens XLA's fused gather, which reads an expert for every pair, is timed beside the kernel."""


class Layer(NamedTuple):
    """X of E experts of F, in a model of D."""

    E: int
    X: int
    D: int
    F: int
    activation: Activation = Activation()
    bias: bool = False


LAYERS = {
    "qwen3-30b-a3b": Layer(128, 8, 2048, 768),
    "gpt-oss-20b": Layer(32, 4, 2880, 2880, Activation(name="clamped"), True),
    "deepseek-v2-lite": Layer(64, 6, 2048, 1408),
    "mixtral-8x7b": Layer(8, 2, 4096, 14336),
}
TINY = {"tiny": Layer(4, 2, 128, 64, Activation(name="clamped"), True)}


class Step(NamedTuple):
    """What one call gets."""

    x_TD: jax.Array
    expert_TX: jax.Array
    weight_TX: jax.Array
    experts: Experts


def choices(layer: Layer, T: int, seed: int, kind: str = "balanced") -> np.ndarray:
    """int32[T, X]: ``balanced``: at random; ``zipf``: few experts get most; ``one``: the first X get all."""
    rng = np.random.default_rng(seed)
    if kind == "one":
        return np.tile(np.arange(layer.X, dtype=np.int32), (T, 1))
    likely = np.zeros(layer.E) if kind == "balanced" else -np.log(np.arange(1, layer.E + 1))
    noise = rng.gumbel(size=(T, layer.E)) + likely
    return np.argsort(-noise, axis=1)[:, : layer.X].astype(np.int32)


def step(layer: Layer, expert_TX: np.ndarray, seed: int) -> Step:
    """Experts that nobody chose, and tokens that choose none, are NaN."""
    keys = iter(jax.random.split(jax.random.key(seed), 6))
    idle_E = jnp.asarray(~np.isin(np.arange(layer.E), expert_TX))
    live_T = jnp.asarray((expert_TX < layer.E).any(1))

    def draw(*shape: int, size: float = 1.0) -> jax.Array:
        def random(key: jax.Array) -> jax.Array:
            x = jax.random.normal(key, (layer.E, *shape), jnp.bfloat16) * size
            return jnp.where(idle_E.reshape(-1, *(1,) * len(shape)), jnp.nan, x)

        return jax.jit(random)(next(keys))

    (T, X), (_, _, D, F, _, bias) = expert_TX.shape, layer
    experts = Experts(draw(2, F, D, size=D**-0.5), draw(D, F, size=F**-0.5))
    if bias:
        experts = experts._replace(gate_up_bias_E2F=draw(2, F), down_bias_ED=draw(D))
    x_TD = jax.random.normal(next(keys), (T, D), jnp.bfloat16)
    x_TD = jnp.where(live_T[:, None], x_TD, jnp.nan)
    weight_TX = jax.random.uniform(next(keys), (T, X))
    return Step(x_TD, jnp.asarray(expert_TX), weight_TX / weight_TX.sum(1, keepdims=True), experts)


Call = Callable[[Step], jax.Array]


def by_kernel(layer: Layer, tune: dict[str, Any] | None, tiny: bool) -> Call:
    """float32[T, D] of a step."""
    interpret = interpreter() if tiny else None
    spec = ExpertSpec(activation=layer.activation, tune=tune, interpret=interpret)

    def call(s: Step) -> jax.Array:
        y_YD, row_TX = grouped_mlp(s.x_TD, s.expert_TX, s.experts, spec)
        y_TXD = jnp.where(row_TX[:, :, None] >= 0, y_YD[jnp.maximum(row_TX, 0)], 0.0)
        return (y_TXD * s.weight_TX[:, :, None]).sum(1)

    return call


def by_gather(layer: Layer) -> Call:
    """The same by XLA, which fuses the gather of the weights into the products."""

    def each(x_TXD: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("txd,tx...d->tx...", x_TXD, w, preferred_element_type=jnp.float32)

    def call(s: Step) -> jax.Array:
        e, (gate_up, down, b, c) = s.expert_TX, s.experts
        x_TXD = jnp.broadcast_to(s.x_TD[:, None], (*e.shape, layer.D))
        y = each(x_TXD, gate_up[e])
        y = y if b is None else y + b[e]
        h = ref.activate(y[:, :, 0], y[:, :, 1], layer.activation).astype(down.dtype)
        y_TXD = each(h, down[e])
        y_TXD = y_TXD if c is None else y_TXD + c[e]
        return (y_TXD * s.weight_TX[:, :, None]).sum(1)

    return call


# --- right or wrong


def experts_numerics(record: Record) -> None:
    """Few and many tokens, all sorts of choices, every width of a tile; fresh inputs, whose seed the record holds."""
    layers = TINY if record.tiny else {n: x._replace(E=min(x.E, 16)) for n, x in LAYERS.items()}
    counts = (3,) if record.tiny else (1, 5, 64, 700)
    for (name, layer), T in itertools.product(layers.items(), counts):
        for kind in ("balanced", "one") if T > 1 else ("balanced",):
            check = functools.partial(_check, layer, T, kind, None, record.tiny)
            record.attempt(f"{name}, {T} tokens, {kind}", check)
    name, layer = next(iter(layers.items()))
    for columns in (8, 64) if record.tiny else (8, 16, 32, 64, 128):
        tune = {"columns": columns}
        T = 3 if record.tiny else 100
        check = functools.partial(_check, layer, T, "zipf", tune, record.tiny)
        record.attempt(f"{name}, tiles of {columns}", check)


def _check(layer: Layer, T: int, kind: str, tune: Any, tiny: bool) -> dict[str, Any]:
    seed = time.time_ns() % 2**31
    chosen = choices(layer, T, seed, kind)
    if T > 1:
        chosen[T // 2] = layer.E  # padding
    s = step(layer, chosen, seed)
    spec = ExpertSpec(activation=layer.activation)
    y_TXD = jax.jit(lambda s: ref.grouped_mlp(s.x_TD, s.expert_TX, s.experts, spec))(s)
    want = (y_TXD * s.weight_TX[:, :, None]).sum(1)
    call = jax.jit(by_kernel(layer, tune, tiny))
    return {"seed": seed, **compare(lambda: call(s), want, slice(None), tiny=tiny)}


# --- fast or slow


def experts_times(record: Record) -> None:
    """At few tokens the share of the read bandwidth, distinct experts counted, and XLA's gather beside it; at many
    the share of the matrix rate."""
    limit = record.figure("facts", "read bandwidth", "bytes_per_s", READ_BANDWIDTH)
    counts = (2,) if record.tiny else (1, 2, 4, 8, 64, 256, 2048, 8192)
    for (name, layer), T in itertools.product((TINY if record.tiny else LAYERS).items(), counts):
        call = by_kernel(layer, None, record.tiny)
        measure = functools.partial(_time, layer, T, "balanced", call, record.tiny, limit)
        record.attempt(f"{name}, {T} tokens", measure)
        if T <= GATHERED_TOKENS:
            measure = functools.partial(
                _time, layer, T, "balanced", by_gather(layer), record.tiny, limit
            )
            record.attempt(f"{name}, {T} tokens, XLA's gather", measure)
        if T in (64, 8192):
            measure = functools.partial(_time, layer, T, "zipf", call, record.tiny, limit)
            record.attempt(f"{name}, {T} tokens, few experts get most", measure)


def _time(
    layer: Layer, T: int, kind: str, call: Call, tiny: bool, limit: float
) -> dict[str, float]:
    calls = 1 if tiny else 8 if T < MANY_TOKENS else 2
    # Every call of the chain chooses anew, so that few experts are not in the L2 either.
    chosen = np.stack([choices(layer, T, i, kind) for i in range(calls)])
    every = np.arange(layer.E, dtype=np.int32).reshape(-1, 1)
    first = step(layer, every, 7)
    at = step(layer, chosen[0], 8)._replace(experts=first.experts)

    def chain(s: Step, chosen_CTX: jax.Array) -> jax.Array:
        for expert_TX in chosen_CTX:
            y_TD = call(s._replace(expert_TX=expert_TX))
            s = s._replace(x_TD=s.x_TD + (y_TD * 1e-3).astype(s.x_TD.dtype))
        return s.x_TD

    spent = seconds(chain, (at, jnp.asarray(chosen)), calls, 1 if tiny else 7)
    flops = 6.0 * T * layer.X * layer.D * layer.F / spent
    if T >= MANY_TOKENS:
        return {"us": spent * 1e6, "tflops": flops / 1e12, "share": flops / PEAK_BF16}
    read = np.mean([weight_bytes(layer, one) for one in chosen]) / spent
    return {"us": spent * 1e6, "bytes_per_s": float(read), "share": float(read / limit)}


def weight_bytes(layer: Layer, expert_TX: np.ndarray) -> int:
    """Of the distinct experts that were chosen."""
    return len(np.unique(expert_TX)) * 3 * layer.F * layer.D * 2


def experts_devices(record: Record) -> None:
    """A layer over all GPUs: whole experts on each, with and without EPLB, against a part of each expert."""
    n = min(len(jax.devices()), 8)

    def measure(law: str, T: int) -> dict[str, Any]:
        if n < 2:
            raise NotHere("a second device")
        return devices.measure(law, devices.ways_of(law, n), T, 2 if record.tiny else 15, "")

    for law, T in itertools.product(devices.LAWS, (8,) if record.tiny else (1, 16, 256, 4096)):
        record.attempt(f"{n} devices, {law}, {T} tokens", functools.partial(measure, law, T))


def experts_tune(record: Record) -> None:
    """Tiles, warpgroups, copies in flight and panels for tune.json."""
    limit = record.figure("facts", "read bandwidth", "bytes_per_s", READ_BANDWIDTH)
    few = [
        {"columns": c, "warpgroups": w, "parts": p, "depth": d, "stages": s}
        for c, w, p, d, s in (
            (8, 1, 1, 64, 12), (8, 1, 2, 128, 6), (8, 2, 1, 64, 6), (8, 2, 2, 64, 6),
            (16, 1, 1, 128, 5), (16, 2, 2, 64, 5), (32, 1, 2, 64, 9), (32, 2, 2, 64, 5),
        )
    ]  # fmt: skip
    many = [
        {"columns": c, "warpgroups": 2, "parts": 2, "depth": 64, "stages": s, "panel": p}
        for c, s, p in ((64, 5, 8), (128, 4, 1), (128, 4, 4), (128, 4, 16), (128, 3, 8))
    ]
    layers = TINY if record.tiny else {n: LAYERS[n] for n in ("qwen3-30b-a3b", "mixtral-8x7b")}
    for (name, layer), (T, tunes) in itertools.product(
        layers.items(), ((2, few[:1]),) if record.tiny else ((8, few), (64, few), (8192, many))
    ):
        for tune in tunes:
            call = by_kernel(layer, tune, record.tiny)
            measure = functools.partial(_time, layer, T, "balanced", call, record.tiny, limit)
            record.attempt(f"{name}, {T} tokens, {tuple(tune.values())}", measure)
