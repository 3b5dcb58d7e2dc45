"""Stages of ``bench.gpu``: products with quantised weights as a step computes them, from one row to many, beside
cuBLASLt's.

It owns which products are timed, what limits them, and how XLA is told to take cuBLASLt. That multiplies numbers of 8
bits where activations are rounded to them, too; beside other forms it multiplies the matrix in bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench.gpu_beside_xla import Call, Comparison, duration, sets_of
from bench.gpu_kernels import PEAK_BF16, READ_BANDWIDTH, compare, relative
from bench.gpu_products import MATRICES, linked, weights
from bench.gpu_record import Record
from bench.gpu_rig import level_of
from jserve.model import quant
from jserve.model.dot import dot
from jserve.model.native import kernels
from jserve.model.quant import Form, QTensor

CUBLASLT: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_cublaslt": True}
"""XLA's options of a program whose products are cuBLASLt's."""
FORMS = {
    "fp8": Form(kind="e4m3", rounded=True),
    "int8": Form(kind="int8", rounded=True),
    "int4": Form(kind="int4", group=128),
    "int8-weight-only": Form(kind="int8"),
}
"""Those of ``--quantization``, as an 8B model has them."""
LARGEST = "8b gate_up"
"""The matrix that is multiplied by any number of rows."""
ROWS, FEW = (1, 64, 1024, 4096, 16, 256), (1, 64)
"""In order of worth; those of the other matrices."""
RATES = {"e4m3": "float8_e4m3fn", "int8": "int8", "bfloat16": "bfloat16"}
"""Numbers that are multiplied -> their name in stage ``facts``."""
PEAKS = {"e4m3": 2 * PEAK_BF16, "int8": 2 * PEAK_BF16, "bfloat16": PEAK_BF16}
"""Operations a second where that stage has not said."""


class Gemm(NamedTuple):
    """A product of ``M`` rows with a matrix [N, D] in a form."""

    title: str
    form: Form
    M: int
    N: int
    D: int

    @property
    def numbers(self) -> str:
        """What the matrix unit multiplies."""
        return self.form.kind if self.form.rounded else "bfloat16"

    @property
    def flops(self) -> int:
        return 2 * self.M * self.N * self.D

    def inputs(self, seed: int) -> tuple[Any, ...]:
        """Rows of x, and the matrix."""
        return weights(self.M, self.N, self.D, self.form, seed)

    def wide(self, seed: int) -> tuple[Any, ...]:
        """``inputs`` with the matrix in bfloat16."""
        x, w = self.inputs(seed)
        return x, jax.jit(quant.widened)(w)

    def comparison(self, inputs: Any, call: Call) -> Comparison:
        """What times ``call`` on such inputs, cold."""
        stored = jax.tree.leaves(jax.eval_shape(lambda: inputs(0))[1])
        n_bytes = sum(a.size * a.dtype.itemsize for a in stored)
        n_bytes += self.M * (self.D * 2 + self.N * 4)
        return Comparison("gemm", self.title, inputs, call, {}, linked, n_bytes)


def gemms(tiny: bool) -> Iterator[Gemm]:
    """Every form with any number of rows, and the rounded ones with the other matrices of a layer of 8B: those of
    ``int4`` are in ``products_times``."""
    if tiny:
        yield from (Gemm(f"tiny, {n}, 2 rows", form, 2, 96, 256) for n, form in FORMS.items())
        return
    for name, form in FORMS.items():
        for matrix, rows in {m: ROWS if m == LARGEST else FEW for m in MATRICES}.items():
            if matrix == LARGEST or (form.rounded and matrix.startswith("8b ")):
                for M in rows:
                    yield Gemm(f"{matrix}, {name}, {M} rows", form, M, *MATRICES[matrix])


def served(level: str) -> Call:
    """The product as a step has it; ``level`` of ``native.kernels``."""

    def call(x: jax.Array, w: QTensor) -> jax.Array:
        with kernels(level):
            return dot(x, w)

    return call


def exact(x: jax.Array, w: QTensor) -> jax.Array:
    """The product with the matrix and the rounded activations in float32."""
    wide = quant.widened(dataclasses.replace(w, form=dataclasses.replace(w.form, dtype="float32")))
    if w.form.rounded:
        q, scale = quant.rounded(quant.blocks(x, w.form), w.form)
        x = (q.astype(jnp.float32) * scale[..., None]).reshape(x.shape)
    with jax.default_matmul_precision("highest"):
        return dot(x.astype(jnp.float32), wide)


def gemm_numerics(record: Record) -> None:
    """The served product and cuBLASLt's, which the tuner may take, against float32: both sum fp8 as they like."""
    for gemm in gemms(record.tiny):
        if record.tiny or LARGEST in gemm.title:
            record.attempt(gemm.title, functools.partial(_right, record, gemm))


def _right(record: Record, gemm: Gemm) -> dict[str, Any]:
    args = gemm.inputs(gemm.M)
    want, ours = jax.jit(exact)(*args), jax.jit(served(level_of(record)))
    found = compare(lambda: ours(*args), want, slice(None), tiny=record.tiny)
    if gemm.numbers == "bfloat16":
        return found
    by_library = jax.jit(quant.product).lower(*args).compile(CUBLASLT)
    apart = relative(by_library(*args), want)
    return {**found, "cublaslt_rel": apart, "ok": bool(found["ok"] and apart < 1e-2)}


def gemm_times(record: Record) -> None:
    """Each product, cold, its share of the limit, and cuBLASLt's time over it."""
    for gemm in gemms(record.tiny):
        record.attempt(gemm.title, functools.partial(_timed, record, gemm))


def _timed(record: Record, gemm: Gemm) -> dict[str, Any]:
    ours = gemm.comparison(gemm.inputs, served(level_of(record)))
    spent = _time(record, ours)
    same = gemm.numbers != "bfloat16"
    beside = ours._replace(ours=quant.product) if same else gemm.comparison(gemm.wide, dot)
    library = _time(record, beside, CUBLASLT)
    return {
        "us": spent * 1e6,
        "bytes_per_s": ours.n_bytes / spent,
        "tflops": gemm.flops / spent / 1e12,
        "share": _least(record, gemm, ours.n_bytes) / spent,
        "cublaslt_us": library * 1e6,
        "cublaslt": gemm.numbers,
        "ratio": library / spent,
    }


def _time(record: Record, c: Comparison, options: dict[str, Any] | None = None) -> float:
    calls = 1 if record.tiny else 8
    return duration(c, c.ours, sets_of(c, record.tiny), calls, record.tiny, options)


def _least(record: Record, gemm: Gemm, n_bytes: int) -> float:
    """Seconds that the card needs, by the rates that stage ``facts`` measured."""
    rate = record.figure("facts", "read bandwidth", "bytes_per_s", READ_BANDWIDTH)
    name, usual = f"matmul {RATES[gemm.numbers]}", PEAKS[gemm.numbers] / 1e12
    peak = record.figure("facts", name, "tflops", usual) * 1e12
    return max(n_bytes / rate, gemm.flops / peak)
