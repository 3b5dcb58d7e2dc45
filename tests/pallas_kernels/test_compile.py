"""Every kernel and whole steps compiled for an H200 that is not there: registers, shared memory,
copies, command buffers. Skipped without the CUDA plugin (see conftest)."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jserve.model.view import Bucket
from pallas_kernels import aot
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.ragged_prefill import ragged_prefill
from tests.pallas_kernels.shapes import ARCHS, compile_step, step_model

pytestmark = pytest.mark.usefixtures("h200")

F8 = jnp.float8_e4m3fn

# H, G, K, Z, J, variant
KERNELS = {
    "1b": (64, 4, 8, 64, 1, {}),
    "8b": (128, 4, 8, 64, 1, {}),
    "8b verify": (128, 4, 8, 64, 4, {}),
    "7b of odd groups": (128, 7, 4, 64, 1, {}),
    "70b tp 8": (128, 8, 1, 64, 1, {}),
    "small pages": (128, 4, 8, 16, 1, {}),
    "wide heads": (256, 2, 4, 64, 1, {}),
    "everything": (64, 8, 8, 128, 16, {"window": 128, "soft_cap": 30.0, "sinks": True}),
    "everything, wide": (256, 8, 2, 32, 4, {"window": 1024, "soft_cap": 30.0, "sinks": True}),
    "1b, 8 bits": (64, 4, 8, 64, 1, {"kv": F8}),
    "8b, 8 bits": (128, 4, 8, 64, 4, {"kv": F8}),
    "8 bits of every kind": (128, 8, 1, 32, 1, {"kv": F8, "window": 1024, "sinks": True}),
}
TREE = (-1, *((j - 1) // 2 for j in range(1, 16)))


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(*shape: int) -> Any:
    return struct(*shape, dtype=jnp.int32)


def check(report: aot.Report, n_kernels: int) -> None:
    assert len(report.kernels) == n_kernels
    assert report.spills == 0, report.kernels
    assert 0 < report.smem_bytes <= aot.SMEM_LIMIT
    assert not report.ignored, "ptxas did not honour the registers that were asked for"


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("parents", [(), TREE], ids=["chain", "tree"])
def test_paged_attention(name: str, parents: tuple[int, ...]) -> None:
    H, G, K, Z, J, variant = KERNELS[name]
    if parents and H > 128:
        pytest.skip("refused")
    J = len(parents) or J
    D, N = 64, K * G
    rest, more = split(variant, K, N)

    def call(q: Any, k: Any, v: Any, table: Any, start: Any, length: Any, more: Any) -> Any:
        rows = (table, start, length)
        return paged_attention(q, k, v, *rows, scale=0.1, parents=parents, **more, **rest)

    pool = struct(1024, K, Z, H, dtype=variant.get("kv", jnp.bfloat16))
    report = aot.compile_for(
        call, struct(D, J, N, H), pool, pool, ints(D, 64), ints(D), ints(D), more
    )
    check(report, 2)


def split(variant: dict[str, Any], K: int, N: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is static of a variant, and the shapes of its arrays."""
    arrays = {}
    if variant.get("sinks"):
        arrays["sinks_N"] = struct(N, dtype=jnp.float32)
    if "kv" in variant:
        arrays["scales_2K"] = struct(2, K, dtype=jnp.float32)
    return {k: v for k, v in variant.items() if k not in ("sinks", "kv")}, arrays


@pytest.mark.parametrize("name", KERNELS)
def test_ragged_prefill(name: str) -> None:
    H, G, K, Z, _, variant = KERNELS[name]
    P, F, N = 2048, 8, K * G
    rest, more = split(variant, K, N)

    def call(q: Any, k: Any, v: Any, table: Any, a: Any, b: Any, c: Any, more: Any) -> Any:
        return ragged_prefill(q, k, v, table, a, b, c, scale=0.1, **more, **rest)

    pool = struct(1024, K, Z, H, dtype=variant.get("kv", jnp.bfloat16))
    args = (struct(P, N, H), pool, pool, ints(F, 64), ints(F), ints(F), ints(F), more)
    check(aot.compile_for(call, *args), 1)


def layer_bytes(model: Any) -> int:
    """Bytes of one layer's keys on one device."""
    return math.prod(model.layer_shape) * 2 // model.tp


def smallest_matrix(model: Any) -> int:
    arch = model.arch
    return 2 * arch.D * arch.N * arch.H // model.tp


def check_step(name: str, bucket: Bucket, tp: int = 1) -> aot.Report:
    model = step_model(ARCHS[name], tp=tp)
    report = compile_step(model, bucket)
    assert report.spills == 0, report.kernels
    assert report.temp_bytes < 2 * layer_bytes(model), "scratch is as large as a layer's KV"
    assert report.alias_bytes >= 2 * model.arch.L * layer_bytes(model), "KV is not updated in place"
    large = report.copies(min(layer_bytes(model), smallest_matrix(model)))
    moved = [copy for copy in large if " bf16[" in copy]
    assert not moved, moved
    return report


def test_layers_of_a_decode_step_are_one_graph() -> None:
    """All layers and their kernels lie in one CUDA graph. The sampler's conditional is outside: the
    loop in one of its branches keeps it from being captured."""
    report = check_step("llama-3.2-1b", Bucket(D=8, P=0, F=0))
    assert report.launches()[0] == "kCommandBuffer"
    assert len(report.launches()) <= 3, report.launches()
    first = re.split(r"\n(?=\d)", report.thunks)[0]
    assert len(re.findall(r"\d: kCustomCall ", first)) == 2 * 16
    assert report.nodes() < 420


def test_mixed_step_of_1b() -> None:
    check_step("llama-3.2-1b", Bucket(D=16, P=256, F=4))


def test_verify_step_of_1b() -> None:
    check_step("llama-3.2-1b", Bucket(D=8, P=0, F=0, J=4))


def test_sharded_decode_step_of_8b() -> None:
    report = check_step("llama-3.1-8b", Bucket(D=64, P=0, F=0), tp=2)
    assert report.collectives().count("all-reduce") == 2 * 32 + 1
    assert report.collectives().count("all-gather") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-7b", "qwen3-8b"])
@pytest.mark.parametrize("bucket", [Bucket(D=256, P=0, F=0), Bucket(D=64, P=2048, F=8)], ids=str)
def test_other_models(name: str, bucket: Bucket) -> None:
    check_step(name, bucket)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp"), [("llama-3.1-8b", 4), ("llama-3.1-70b", 8)])
def test_other_shardings(name: str, tp: int) -> None:
    check_step(name, Bucket(D=64, P=0, F=0), tp=tp)
