"""Arrivals at barriers: one that announces fewer than come is refused by the interpreter, so what runs there announces
right; what the kernels of the table announce when compiled is announced there too."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench.gpu_products import products
from pallas_kernels.launch import interpreter, plgpu
from pallas_kernels.mla_attention import LatentPages, LatentSpec, mla_attention, mla_chunks
from pallas_kernels.paged_attention import hopper as decode_kernel
from pallas_kernels.paged_attention.api import tile_of as decode_tile
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.ragged_prefill import hopper as prefill_kernel
from pallas_kernels.ragged_prefill.api import tile_of as prefill_tile
from pallas_kernels.spec import AttentionSpec, Chunks, Rows
from tests.pallas_kernels import test_paged_attention as decode, test_ragged_prefill as prefill
from tests.pallas_kernels.barriers import THREADS, announced, check_barriers, launched
from tests.pallas_kernels.latents import FEW, VARIANTS as LATENTS, Latents
from tests.pallas_kernels.rows import PRODUCTS
from tests.pallas_kernels.test_quant_matmul import Inputs
from tests.pallas_kernels.variants import CHAINS, VARIANTS, Variant


def fewer(kernel: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Barriers ``name`` of ``kernel`` announce one arrival fewer than come."""
    scratch = kernel._scratch

    def planted(*args: Any) -> Mapping[str, Any]:
        found = scratch(*args)
        n = found[name].num_arrivals - 1
        one = {name: plgpu.Barrier(num_arrivals=n, num_barriers=found[name].num_barriers)}
        return found | one

    monkeypatch.setattr(kernel, "_scratch", planted)


def test_an_arrival_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer(decode_kernel, "k_here", monkeypatch)
    with pytest.raises(Exception, match=r"[Bb]arrier"):
        decode.run(((70, 1),))


def test_also_of_those_that_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer(prefill_kernel, "v_free", monkeypatch)
    with pytest.raises(Exception, match=r"[Bb]arrier"):
        prefill.run(((100, 30),))


WHOLE = {"block": 128, "stages": 2}
"""A block of prefill as it is compiled: of pages of 8 tokens 16 copies arrive."""
SMALL = "8b, small pages"


def test_blocks_of_many_small_pages() -> None:
    prefill.run(((130, 30), (0, 3)), H=CHAINS[SMALL].H, Z=CHAINS[SMALL].Z, tune=WHOLE)


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return struct(*shape, dtype=jnp.int32)


def of_decode(v: Variant, tune: dict[str, int] | None) -> set[int]:
    spec = AttentionSpec(
        scale=0.1, **v.static, tune=tune, interpret=interpreter() if tune else None
    )
    q, pool = struct(4, v.tokens, v.K * v.G, v.H), struct(64, v.K, v.Z, v.H, dtype=v.dtype)
    tile = decode_tile(q, pool, spec, v.tree)
    return set(announced(decode_kernel._scratch(tile, q.dtype, v.dtype)))


def of_prefill(v: Variant, tune: dict[str, int] | None) -> set[int]:
    spec = AttentionSpec(
        scale=0.1, **v.static, tune=tune, interpret=interpreter() if tune else None
    )
    q, pool = struct(256, v.K * v.G, v.H), struct(64, v.K, v.Z, v.H, dtype=v.dtype)
    tile = prefill_tile(q, pool, 8, spec)
    return set(announced(prefill_kernel._scratch(tile, q.dtype, v.dtype)))


def test_what_is_compiled_is_announced_in_the_interpreter_too() -> None:
    """By the runs of ``test_variants``, whose blocks are smaller, and by that of many small pages."""
    more = of_prefill(CHAINS[SMALL], WHOLE)
    for of, table, tune, interpreted in (
        (of_decode, VARIANTS, decode.TUNE, set()),
        (of_prefill, CHAINS, prefill.TUNE, more),
    ):
        compiled = set().union(*(of(v, None) for v in table.values()))
        interpreted = interpreted.union(*(of(v, tune) for v in table.values()))
        assert compiled <= interpreted, (of.__name__, compiled - interpreted)


def traced(call: Any, *args: Any) -> set[tuple[str, int]]:
    """The barriers of the kernels of a call, by name, and the arrivals that they announce."""
    with launched() as launches:
        jax.eval_shape(call, *args)
    scratch = [item for one in launches for item in one.scratch.items()]
    return {(name, x.num_arrivals) for name, x in scratch if isinstance(x, plgpu.Barrier)}


def of_product(case: dict[str, Any]) -> set[tuple[str, int]]:
    """As ``test_quant_matmul`` runs it."""
    sizes = {name: value for name, value in case.items() if name != "tune"}
    how = {"tune": case.get("tune"), "interpret": interpreter()}

    def call(x: Any, w: Any, kind: str, **more: Any) -> Any:
        return traced(lambda x, w: quant_matmul(x, w, kind, **more, **how), x, w)

    found: Any = Inputs(**sizes).by(call)
    return found


def test_also_by_products_with_weights_in_groups() -> None:
    cases = [(c.ours, jax.eval_shape(lambda c=c: c.inputs(0))) for c in products(False)]
    compiled = set().union(*(traced(ours, *args) for ours, args in cases))
    interpreted = set().union(*map(of_product, PRODUCTS.values()))
    assert compiled
    assert compiled <= interpreted, compiled - interpreted


def of_latents(v: Latents, spec: LatentSpec) -> set[tuple[str, int]]:
    pages = LatentPages(struct(64, v.Z, v.C, dtype=v.dtype), ints(4, 8))

    def rows(q: Any, pages: Any, *row: Any) -> Any:
        return mla_attention(q, pages, Rows(*row), spec)

    def chunks(q: Any, pages: Any, *chunk: Any) -> Any:
        return mla_chunks(q, pages, Chunks(*chunk), spec)

    of_rows = traced(rows, struct(4, v.J, v.N, v.C), pages, ints(4), ints(4))
    return of_rows | traced(chunks, struct(64, v.N, v.C), pages, ints(4), ints(4), ints(4))


def test_also_by_latent_attention() -> None:
    compiled = set().union(*(of_latents(v, v.spec) for v in LATENTS.values()))
    how = {"tune": FEW, "interpret": interpreter()}
    interpreted = set().union(
        *(of_latents(v, dataclasses.replace(v.spec, **how)) for v in LATENTS.values())
    )
    assert compiled
    assert compiled <= interpreted, compiled - interpreted


PTX = """
mov.b32 %r5, 256;
@%p2 mbarrier.init.shared::cta.b64 [%r1], %r5;
@%p2 mbarrier.init.shared::cta.b64 [%r2], %r5;
mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r1+8], %r9;
mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1], 1;
"""


def test_the_check_of_compiled_barriers_sees_what_is_wrong() -> None:
    assert THREADS == 128
    scratch = {"here": plgpu.Barrier(num_arrivals=2, num_barriers=2)}
    check_barriers(PTX, scratch)
    wrong = (
        (PTX, {"here": plgpu.Barrier(num_arrivals=1, num_barriers=2)}),
        (PTX, {"here": plgpu.Barrier(num_arrivals=2, num_barriers=1)}),
        (PTX.replace("_, [%r1], 1;", "_, [%r1], 128;"), scratch),
        (PTX.replace("mbarrier.arrive.expect_tx", "@%p1 mbarrier.arrive.expect_tx"), scratch),
    )
    for ptx, barriers in wrong:
        with pytest.raises(AssertionError):
            check_barriers(ptx, barriers)
