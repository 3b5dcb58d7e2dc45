"""The kernels beside attention compiled for an H200 that is not there, at the shapes that ``bench.gpu`` times
them at, and what XLA makes in their place. Skipped without the CUDA plugin (see conftest)."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench import passes
from bench.gpu_beside_xla import Comparison
from bench.gpu_candidates import COMPARISONS, tunings
from bench.gpu_products import FORMS, products
from pallas_kernels import aot
from pallas_kernels.kv_write import Angles, Places, kv_write
from pallas_kernels.quant_matmul import KINDS, Weights, bits, quant_matmul
from tests.pallas_kernels import tma
from tests.pallas_kernels.barriers import Launch, check_barriers, launched
from tests.pallas_kernels.test_compile import check_registers

pytestmark = pytest.mark.usefixtures("h200")

ALL = [c for some in (*COMPARISONS, products) for c in some(False) if "flat" not in c.shape]
"""Logits with and without a peak are one program, and a kernel is compiled once a process."""
FEW = {
    "[256, 128256], peak",
    "1b, 2 tokens",
    "qwen3 8b, norms, 256 tokens",
    "70b tp8, 32 tokens",
    "70b, 256 tokens",
    "8b down, int4 g128, 1 rows",
    "8b gate_up, int4 g128, 64 rows",
    "70b tp8 gate_up, int4 g128, 16 rows",
}
F8 = jnp.float8_e4m3fn


def struct(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def check(report: aot.Report, launches: list[Launch], descriptors: list[tma.Descriptor]) -> None:
    """One kernel, of whose warpgroups one loads where there are several."""
    [kernel], [launch] = report.kernels, launches
    assert report.spills == 0, report.kernels
    assert 0 < report.smem_bytes <= aot.SMEM_LIMIT
    assert not report.ignored
    loading = int(launch.warpgroups > 1)
    check_registers(kernel, launch.warpgroups - loading, loading)
    check_barriers(kernel.ptx, launch.scratch)
    copies = len(re.findall(r"cp\.async\.bulk\.tensor\.", kernel.ptx))
    assert bool(descriptors) == bool(copies)
    assert not [fault for one in descriptors for fault in one.faults()]


def checked(call: Any, *args: Any, donate: tuple[int, ...] = ()) -> aot.Report:
    """Compile ``call``, which has to pass ``check``."""
    with tma.recorded() as descriptors, launched() as launches:
        report = aot.compile_for(call, *args, donate=donate)
    check(report, launches, descriptors)
    return report


def arguments(c: Comparison) -> Any:
    return jax.eval_shape(lambda: c.inputs(0))


def name(c: Comparison) -> str:
    return c.shape


@pytest.mark.parametrize("c", [c for c in ALL if c.shape in FEW], ids=name)
def test_shapes_of_models(c: Comparison) -> None:
    checked(c.ours, *arguments(c))


@pytest.mark.slow
@pytest.mark.parametrize("c", [c for c in ALL if c.shape not in FEW], ids=name)
def test_every_shape_of_models(c: Comparison) -> None:
    checked(c.ours, *arguments(c))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("c", "tune"),
    list(tunings(False)),
    ids=lambda x: x.shape if isinstance(x, Comparison) else str(x.values()),
)
def test_every_tuning_that_is_timed(c: Comparison, tune: dict[str, int]) -> None:
    checked(functools.partial(c.ours, tune=tune), *arguments(c))


@pytest.mark.parametrize(
    ("K", "G", "H", "dtype"),
    [(8, 4, 64, jnp.bfloat16), (4, 7, 128, F8), (2, 2, 256, jnp.bfloat16), (1, 8, 64, F8)],
)
def test_pools_are_written_in_place(K: int, G: int, H: int, dtype: Any) -> None:
    T, pool = 64, struct(1024, K, 64, H, dtype=dtype)
    ints, angle = struct(T, dtype=jnp.int32), struct(T, H // 2)
    bf16 = jnp.bfloat16
    more = {"bias_KCH": struct(K, G + 2, H, dtype=bf16), "norms": (struct(H, dtype=bf16),) * 2}
    if dtype == F8:
        more["scales_2K"] = struct(2, K)

    def call(y: Any, angles: Any, places: Any, pools: Any, more: Any) -> Any:
        return kv_write(y, angles, places, pools, eps=1e-6, **more)

    angles, places, y = Angles(angle, angle), Places(ints, ints), struct(4, T, K, G + 2, H)
    report = checked(call, y, angles, places, (pool, pool), more, donate=(3,))
    assert report.alias_bytes == 2 * 1024 * K * 64 * H * jnp.dtype(dtype).itemsize
    assert not report.copies(1 << 20)


@pytest.mark.parametrize(
    ("form", "register_w"),
    [
        ("int4 zeros g128", True),
        *(pytest.param(x, True, marks=pytest.mark.slow) for x in FORMS if x != "int4 zeros g128"),
        pytest.param("int4 zeros g128", False, marks=pytest.mark.slow),
    ],
)
def test_weights_are_read_as_they_are_stored(form: str, register_w: bool) -> None:
    """Once: these, scales, x and the splits' sums, in shared memory by whole registers."""
    c = next(c for c in ALL if c.shape == f"8b down, {form}, 16 rows")
    report = checked(functools.partial(c.ours, tune={"register_w": register_w}), *arguments(c))
    assert report.narrow_reads == 0
    splits, N, D, M = 4, 4096, 14336, 16
    others = (2 * splits + 3) * N * M * 4 + 4 * M * D * 4
    assert c.n_bytes <= report.module.moved("none") < c.n_bytes + others < 1.25 * c.n_bytes


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_registers_and_room_suffice_for_every_group(kind: str, group: int, rows: int) -> None:
    """With zeros, and 8 bits with scales of x."""
    N, D = 4096, 4096
    B, per = D // group, bits.per_byte(kind)
    w = Weights(struct(N, D // per, dtype=KINDS[kind]), struct(N, B), struct(N, B, dtype=jnp.int8))
    x, x_scale = struct(rows, D, dtype=jnp.bfloat16), None if per == 2 else struct(rows, B)

    def call(x: Any, w: Weights, x_scale: Any) -> Any:
        return quant_matmul(x, w, kind, x_scale_TB=x_scale)

    assert checked(call, x, w, x_scale).narrow_reads == 0


def test_by_xla_they_are_not() -> None:
    """What is timed beside the kernel: a matrix in bfloat16, written out and read again."""
    c = next(c for c in ALL if c.shape == "8b down, int4 g128, 64 rows")
    by_xla = aot.compile_for(c.by_xla["xla-widened"], *arguments(c))
    assert by_xla.temp_bytes >= 4096 * 14336 * 2
    assert by_xla.module.moved("none") > 4 * c.n_bytes


def test_no_sort_is_left() -> None:
    lines = list(passes.sampler(256, 128256))
    assert all("does not sort it" in line for line in lines)
    by_xla, ours = (int(line.split(" kernels")[0].split()[-1]) for line in lines)
    assert ours < 8 < by_xla < 50


def test_layer_of_a_model() -> None:
    """Qwen3 norms queries and keys: ten kernels and more between the four products and attention."""
    layer = passes.layer("qwen3-8b", 1)
    kinds = layer.groups()
    assert [len(kinds[f"product {m}"]) for m in passes.MATRICES] == [1, 1, 1, 1]
    assert len(kinds["a kernel of ours"]) == 2
    assert len(kinds["norm of queries or keys"]) == 2
    assert len(kinds["norm"]) == 2
    assert len(layer.between) == len(layer.passes) - 6 >= 10
    assert 11 <= layer.chain < len(layer.passes)
    assert all(title.split(":")[0] not in ("copy", "transpose") for title in kinds)
    table = "\n".join([*passes.table(layer), *passes.summary([layer])])
    assert "| product qkv | 1 |" in table
    assert f"| qwen3-8b, 1 | {len(layer.passes)} | {layer.chain} |" in table
