"""Mixtures of experts compiled for an H200 that is not there. Skipped without the CUDA plugin (see conftest)."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jserve.model.arch import Mlp, Moe, resized
from jserve.model.view import Bucket
from jserve.sizing.compiled import compile_step
from jserve.sizing.models import find
from pallas_kernels import aot
from pallas_kernels.grouped_matmul import Activation, Experts, grouped_mlp
from pallas_kernels.grouped_matmul.api import tiles_of
from pallas_kernels.grouped_matmul.hopper import Tile, _scratch
from tests.pallas_kernels import tma
from tests.pallas_kernels.barriers import check_barriers
from tests.pallas_kernels.experts import MIXTURES, Mixture
from tests.pallas_kernels.shapes import ARCHS, step_model
from tests.pallas_kernels.test_compile import check_descriptors, check_registers

pytestmark = pytest.mark.usefixtures("h200")

CLAMPED = Activation(name="clamped")
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"E": 128, "X": 8, "D": 2048, "F": 768},
    "gpt-oss-20b": {"E": 32, "X": 4, "D": 2880, "F": 2880, "activation": CLAMPED, "bias": True},
    "mixtral-8x7b": {"E": 8, "X": 2, "D": 4096, "F": 14336},
    "deepseek-v2-lite": {"E": 64, "X": 6, "D": 2048, "F": 1408},
}
SHAPES = {f"{name}, {T}": Mixture(T=T, **m) for name, m in MODELS.items() for T in (8, 64, 8192)}
FEW = {"qwen3-30b-a3b, 64", "gpt-oss-20b, 64", "mixtral-8x7b, 8192"}


def shapes(m: Mixture) -> tuple[Any, Any, Experts]:
    def of(*shape: int, dtype: Any = m.dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    biases = (of(m.E, 2, m.F), of(m.E, m.D)) if m.bias else (None, None)
    experts = Experts(of(m.E, 2, m.F, m.D), of(m.E, m.D, m.F), *biases)
    return of(m.T, m.D), of(m.T, m.X, dtype=jnp.int32), experts


def compiled(m: Mixture) -> tuple[aot.Report, tuple[Tile, Tile], list[tma.Descriptor]]:
    args = shapes(m)
    with tma.recorded() as descriptors:
        report = aot.compile_for(lambda x, chosen, e: grouped_mlp(x, chosen, e, m.spec()), *args)
    return report, tiles_of(*args, m.spec())[1:], descriptors


def check(m: Mixture) -> aot.Report:
    report, tiles, descriptors = compiled(m)
    check_descriptors(descriptors)
    assert len(descriptors) == 6, "weights, tokens and result of each product"
    assert len(report.kernels) == 2
    for kernel, tile in zip(report.kernels, tiles, strict=True):
        check_registers(kernel, tile.warpgroups, 1)
        check_barriers(kernel.ptx, _scratch(tile, m.dtype, m.dtype))
    assert report.spills == 0, report.kernels
    assert not report.ignored
    assert 0 < report.smem_bytes <= aot.SMEM_LIMIT
    assert not report.sorts()
    return report


@pytest.mark.parametrize("name", MIXTURES)
def test_variants(name: str) -> None:
    check(MIXTURES[name])


@pytest.mark.parametrize("name", [n for n in SHAPES if n in FEW])
def test_models(name: str) -> None:
    check(SHAPES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SHAPES if n not in FEW])
def test_more_models(name: str) -> None:
    check(SHAPES[name])


def test_matrices_are_read_by_the_kernels_alone() -> None:
    """Nothing copies, widens or gathers them; one launch, a CUDA graph; scratch is rows of tokens."""
    m = SHAPES["qwen3-30b-a3b, 64"]
    report = check(m)
    read = {n: k for n, k in report.module.reads("e").items() if report.module.size(n) > 1 << 20}
    assert read == {"e.gate_up_E2FD": 1, "e.down_EDF": 1}, read
    rows = 176 * 8
    assert report.temp_bytes < rows * (m.D * (2 + 4) + m.F * 2) * 1.2
    assert not report.copies(1 << 24)
    assert not re.search("kWhile|kConditional", report.thunks)


@pytest.mark.parametrize("bucket", [Bucket(D=64, P=0, F=0), Bucket(D=8, P=256, F=4)], ids=str)
def test_steps_of_a_model_with_experts(bucket: Bucket) -> None:
    """One CUDA graph; each matrix of the experts is read by one kernel, and nothing as large is copied."""
    model = step_model(resized(ARCHS["qwen3-30b-a3b"], L=2))
    report = compile_step(model, bucket)
    assert report.launches() == ["kCommandBuffer"]
    assert report.spills == 0, report.kernels
    assert not report.ignored
    attention = (bucket.D > 0) * 2 + (bucket.P > 0)
    assert len(re.findall(r"\d: kCustomCall ", report.thunks)) == (attention + 2) * 2
    experts = {n: k for n, k in report.module.reads("params").items() if "expert" in n}
    assert len(experts) == 4
    assert set(experts.values()) == {1}, experts
    assert not [c for c in report.copies(1 << 28) if " bf16[" in c]


def test_steps_of_few_tokens_gather() -> None:
    """Without a loop that would leave the graph."""
    model = step_model(resized(ARCHS["qwen3-30b-a3b"], L=1))
    report = compile_step(model, Bucket(D=4, P=0, F=0))
    assert report.launches() == ["kCommandBuffer"]
    assert len(re.findall(r"\d: kCustomCall ", report.thunks)) == 2


def expert_bytes(report: aot.Report, layers: int = 1) -> tuple[int, int]:
    """(bytes of expert matrices that a step reads, bytes that there are)."""
    read = report.module.bytes_read("params").items()
    read = {n: k for n, k in read if "['expert_" in n and "_bias" not in n}
    assert len(read) == 2 * layers, read
    return sum(read.values()), sum(report.module.size(n) for n in read)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek-v2-lite", "llama-4-scout"])
def test_experts_beside_dense_attention(name: str) -> None:
    """Latents, and chunks of attention, which the attention kernels lack: experts by their own."""
    arch = resized(ARCHS[name], L=2)
    report = compile_step(step_model(arch, attention="dense_experts"), Bucket(D=64, P=0, F=0))
    assert report.spills == 0, report.kernels
    assert not report.ignored
    layers = sum(isinstance(layer.ffn, Moe) for layer in arch.layers)
    assert len(re.findall(r"\d: kCustomCall ", report.thunks)) == 2 * layers
    read, there = expert_bytes(report, layers)
    assert read == there
    assert not [c for c in report.copies(1 << 28) if " bf16[" in c]


ROW_READS = ("qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b", "deepseek-v2-lite", "olmoe-1b-7b")


@pytest.mark.parametrize(
    "name", [ROW_READS[0], *(pytest.param(n, marks=pytest.mark.slow) for n in ROW_READS[1:])]
)
def test_a_row_reads_the_experts_that_it_chose(name: str) -> None:
    """8 of 128, 4 of 32, 2 of 8, 6 of 64, 8 of 64. A step of one token has a second row, padding, which reads an expert
    of the first one's once more."""
    found = find(name)
    arch = resized(found.arch, L=1 + sum(isinstance(x.ffn, Mlp) for x in found.arch.layers))
    m, bucket = arch.layers[-1].ffn, Bucket(D=2, P=0, F=0)
    report = compile_step(step_model(arch), bucket)
    read, there = expert_bytes(report)
    assert read / bucket.D == pytest.approx(there * m.X / m.E, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [Bucket(D=64, P=0, F=0), Bucket(D=4, P=0, F=0)], ids=str)
def test_steps_over_devices_with_different_experts(bucket: Bucket) -> None:
    """By the kernel and by the gather: one CUDA graph, and the sums that tensor parallelism has."""
    model = step_model(resized(ARCHS["qwen3-30b-a3b"], L=1), tp=2, ep=2)
    report = compile_step(model, bucket)
    assert report.launches() == ["kCommandBuffer"]
    assert report.spills == 0, report.kernels
    assert not report.ignored
    kernels = 4 if bucket.D > 4 else 2
    assert len(re.findall(r"\d: kCustomCall ", report.thunks)) == kernels
    assert Counter(report.collectives()) == {"all-reduce": 3, "all-gather": 1}
