"""Stages of ``bench.gpu``: products of few rows with weights in groups, by ``quant_matmul`` and by XLA.

It owns the forms and matrices that are tried.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from bench.gpu_beside_xla import Comparison, interpreted, numerics, times
from bench.gpu_kernels import compare, relative
from bench.gpu_record import Record
from jserve.model import quant, quant_hopper
from jserve.model.quant import KINDS, Form, QTensor

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


def weights(M: int, N: int, D: int, form: Form, seed: int) -> tuple[Any, ...]:
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


def linked(args: tuple[Any, ...], y: Any) -> tuple[Any, ...]:
    """The next product's rows, which wait for this one's result."""
    return args[0] + (y[:, :1] * 1e-6).astype(args[0].dtype), args[1]


def in_float32(x: Any, w: QTensor) -> Any:
    """What both ways compute, up to their rounding."""
    exact = dataclasses.replace(w, form=dataclasses.replace(w.form, dtype="float32"))
    with jax.default_matmul_precision("highest"):
        return quant.product(x.astype(jnp.float32), exact)


def products(tiny: bool) -> Iterator[Comparison]:
    """The matrices of a layer, of 70B those of one device of eight, and each form."""
    first = next(iter(FORMS))
    ours = functools.partial(quant_hopper.product, **interpreted(tiny))
    for name, (N, D) in ({"tiny": (100, 512)} if tiny else MATRICES).items():
        for label in TINY_FORMS if tiny else FORMS if name == EVERY_FORM else (first,):
            form = FORMS[label]
            for M in (2,) if tiny else (1, 16, 64):
                inputs = functools.partial(weights, M, N, D, form)
                stored = jax.tree.leaves(jax.eval_shape(lambda inputs=inputs: inputs(0))[1])
                yield Comparison(
                    "quant_matmul",
                    f"{name}, {label}, {M} rows",
                    inputs,
                    ours,
                    {quant.way_of(form, M): quant.product},
                    linked,
                    sum(a.size * a.dtype.itemsize for a in stored) + M * (D * 2 + N * 4),
                )


def products_numerics(record: Record) -> None:
    """Every form, few rows and many, on fresh inputs against a float32 reference."""
    some = [c for c in products(record.tiny) if record.tiny or EVERY_FORM in c.shape]
    numerics(record, some, {"quant_matmul": _multiplied})


def _multiplied(c: Comparison, seed: int, tiny: bool) -> dict[str, Any]:
    """Also the form that the interpreter has proved, with weights through shared memory."""
    args = c.inputs(seed)
    want = in_float32(*args)
    proved = jax.jit(functools.partial(c.ours, tune={"register_w": False}))(*args)
    call = jax.jit(c.ours)
    found = compare(lambda: call(*args), want, slice(None), tiny=tiny)
    apart = relative(proved, want)
    return {**found, "proved_rel": apart, "ok": found["ok"] and apart < 1e-2}


def products_times(record: Record) -> None:
    """Every matrix of a layer, cold, by the kernel and by XLA, and the verdict."""
    times(record, (products,))
