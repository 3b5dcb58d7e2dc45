"""Latent attention compiled for an H200 that is not there: every variant, and whole steps of DeepSeek."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jserve.model.arch import resized
from jserve.model.view import Bucket
from jserve.sizing.compiled import compile_step
from pallas_kernels import aot
from pallas_kernels.mla_attention import LatentPages, LatentSpec, mla_attention, mla_chunks
from pallas_kernels.mla_attention.api import tile_of
from pallas_kernels.mla_attention.hopper import SMEM, TEAM
from pallas_kernels.spec import Chunks, Rows
from tests.pallas_kernels import tma
from tests.pallas_kernels.barriers import Launch, check_barriers, launched
from tests.pallas_kernels.latents import VARIANTS, Latents
from tests.pallas_kernels.shapes import ARCHS, step_model
from tests.pallas_kernels.test_compile import check, ints, layer_bytes, struct

pytestmark = pytest.mark.usefixtures("h200")
FEW = ("v2-lite", "smallest pages, float16")
"""In the default tier."""
P, F, D = 512, 8, 64


def rows(names: Any) -> list:
    return [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in names]


def spec_of(v: Latents, tune: dict[str, Any] | None = None) -> LatentSpec:
    return dataclasses.replace(v.spec, tune=tune)


def compiled_rows(v: Latents, tune: dict[str, Any] | None = None) -> aot.Report:
    def call(q: Any, pool: Any, table: Any, start: Any, length: Any) -> Any:
        pages = LatentPages(pool, table)
        return mla_attention(q, pages, Rows(start, length), spec_of(v, tune), dtype=jnp.bfloat16)

    pool = struct(1024, v.Z, v.C, dtype=v.dtype)
    with tma.recorded() as descriptors, launched() as launches:
        report = aot.compile_for(
            call, struct(D, v.J, v.N, v.C), pool, ints(D, 64), ints(D), ints(D)
        )
    check_all(report, descriptors, v, tune)
    check_launches(report, launches)
    return report


def compiled_chunks(v: Latents, tune: dict[str, Any] | None = None) -> aot.Report:
    def call(q: Any, pool: Any, table: Any, *chunks: Any) -> Any:
        return mla_chunks(q, LatentPages(pool, table), Chunks(*chunks), spec_of(v, tune))

    pool = struct(1024, v.Z, v.C, dtype=v.dtype)
    with tma.recorded() as descriptors, launched() as launches:
        report = aot.compile_for(call, struct(P, v.N, v.C), pool, ints(F, 64), *[ints(F)] * 3)
    check_all(report, descriptors, v, tune)
    check_launches(report, launches)
    return report


def check_launches(report: aot.Report, launches: list[Launch]) -> None:
    for kernel, launch in zip(report.kernels, launches, strict=True):
        assert kernel.threads == 128 * launch.warpgroups
        check_barriers(kernel.ptx, launch.scratch)
    assert "free" in launches[0].scratch, "the first has barriers"


def check_all(report: aot.Report, descriptors: list[tma.Descriptor], v: Latents, tune: Any) -> None:
    check(report, len(report.kernels), TEAM, 1)
    assert len(descriptors) >= 3, "queries, latents and results"
    assert not [fault for descriptor in descriptors for fault in descriptor.faults()]
    widest = max(jax.tree.leaves([d.box for d in descriptors]))
    assert widest <= 256
    pool = struct(1024, v.Z, v.C, dtype=v.dtype)
    tile = tile_of(struct(1, v.N, v.C), pool, spec_of(v, tune), out_dtype=jnp.float32)
    assert report.smem_bytes <= tile.smem_bytes(v.dtype, jnp.float32) <= SMEM == aot.SMEM_LIMIT


@pytest.mark.parametrize("name", rows(VARIANTS))
def test_rows(name: str) -> None:
    """Latents are an operand of one kernel alone: keys and values are read once."""
    report = compiled_rows(VARIANTS[name])
    assert len(report.kernels) == 2
    assert report.module.reads("pool") == {"pool": 1}
    assert not report.copies(1 << 24)


@pytest.mark.parametrize("name", rows(VARIANTS))
def test_chunks(name: str) -> None:
    report = compiled_chunks(VARIANTS[name])
    assert len(report.kernels) == 1
    assert report.module.reads("pool") == {"pool": 1}


@pytest.mark.slow
def test_the_form_of_the_interpreter() -> None:
    """Weights through shared memory, with room for one block at a time, for the first check on a device."""
    proved = {"register_p": False, "stages": 1}
    compiled_rows(VARIANTS["v2-lite"], proved)
    compiled_chunks(VARIANTS["v2-lite"], proved)


def check_step(bucket: Bucket, *, tp: int = 1, name: str = "deepseek-v2-lite") -> aot.Report:
    """One CUDA graph without a copy of KV, and no scratch as large as a layer's."""
    arch = resized(ARCHS[name], L=2)
    model = step_model(arch, tp=tp, n_pages=4096)
    report = compile_step(model, bucket)
    assert report.launches() == ["kCommandBuffer"], "a step is not one CUDA graph"
    assert report.spills == 0, report.kernels
    assert not report.ignored
    assert 0 < report.smem_bytes <= aot.SMEM_LIMIT
    assert report.temp_bytes < layer_bytes(model), "scratch is as large as a layer's KV"
    assert report.alias_bytes >= arch.L * layer_bytes(model), "KV is not updated in place"
    large = [c for c in report.copies(layer_bytes(model) // 2) if " bf16[" in c]
    assert not large, large
    attention = (bucket.D > 0) * 2 + (bucket.P > 0)
    calls = len(re.findall(r"\d: kCustomCall ", report.thunks))
    assert calls == attention * 2 + (2 if bucket.T > 4 else 0), "kernels of attention and experts"
    assert "kDynamicSliceFusion" not in report.thunks, "a kernel reads a slice of another array"
    return report


def test_decode_step() -> None:
    check_step(Bucket(D=64, P=0, F=0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bucket", "tp"),
    [
        (Bucket(D=8, P=256, F=4), 1),
        (Bucket(D=8, P=0, F=0, J=4), 1),
        (Bucket(D=8, P=256, F=4), 2),
    ],
    ids=str,
)
def test_more_steps(bucket: Bucket, tp: int) -> None:
    check_step(bucket, tp=tp)
