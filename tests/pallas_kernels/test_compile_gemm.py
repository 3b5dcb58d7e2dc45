"""The products of stages ``gemm_*`` of ``bench.gpu``, compiled for an H200 that is not there: what is timed beside them
is cuBLASLt's. Skipped without the CUDA plugin (see conftest)."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest

from bench.gpu_gemm import CUBLASLT, Gemm, gemms, served
from jserve.model import quant
from jserve.model.dot import dot
from jserve.model.native import HOPPER
from pallas_kernels import aot

pytestmark = pytest.mark.usefixtures("h200")
ALL = {gemm.title: gemm for gemm in gemms(False)}
EIGHT = {"fp8": "__cublas$lt$matmul$f8", "int8": "__cublas$lt$matmul"}


def compiled(gemm: Gemm, call: Any, inputs: Any, options: dict[str, Any] | None = None) -> Any:
    return aot.compile_for(call, *jax.eval_shape(lambda: inputs(0)), options=options)


def libraries(report: aot.Report) -> list[str]:
    return re.findall(r'custom_call_target="(__cublas[^"]*)"', report.hlo)


@pytest.mark.parametrize("rows", [1, 4096])
@pytest.mark.parametrize("form", EIGHT)
def test_numbers_of_8_bits_are_multiplied_by_cublaslt(form: str, rows: int) -> None:
    gemm = ALL[f"8b gate_up, {form}, {rows} rows"]
    beside = compiled(gemm, quant.product, gemm.inputs, CUBLASLT)
    assert libraries(beside) == [EIGHT[form]]
    ours = compiled(gemm, served(HOPPER), gemm.inputs)
    assert not libraries(ours), "XLA's own product is timed"
    assert ours.temp_bytes < gemm.N * gemm.D, "it reads the matrix as it is stored"


@pytest.mark.parametrize("form", ["int4", "int8-weight-only"])
def test_others_are_timed_beside_bfloat16_by_cublas(form: str) -> None:
    gemm = ALL[f"8b gate_up, {form}, 64 rows"]
    [library] = libraries(compiled(gemm, dot, gemm.wide, CUBLASLT))
    assert library.startswith("__cublas")
    ours = compiled(gemm, served(HOPPER), gemm.inputs)
    assert len(ours.kernels) == (form == "int4"), "quant_matmul is what steps have"
    assert not libraries(ours)
