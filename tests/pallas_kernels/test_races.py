"""The kernels under the interpreter's race detector: nobody writes what another may still load, however the
threads are timed. Values alone do not show that, since the interpreter runs them in few orders. It compares
loads, stores and copies, but does not know what the matrix unit reads: here each product loads its first operand, at
the moment when it begins. Mixtures whose blocks overlap are not among the cases: two blocks write the same numbers to
the same place of the result, which it reports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.launch import interpreter, plgpu
from tests.pallas_kernels import (
    latents,
    test_add_norm as add_norm,
    test_combine as combine,
    test_grouped_matmul as experts,
    test_kv_write as kv_write,
    test_paged_attention as decode,
    test_quant_matmul as product,
    test_ragged_prefill as prefill,
    test_sample_threshold as threshold,
)
from tests.pallas_kernels.experts import Mixture
from tests.pallas_kernels.rows import F8
from tests.pallas_kernels.variants import I8

ROWS = ((200, 1), (5, 1), (0, 0), (70, 1), (3, 1))
ALL = {"sms": 1, "stages": 2}
"""One team for all rows of a kv head, so that every ring goes round."""
NARROW = latents.Latents(N=2, A=128, Z=16)


def mixture(m: Mixture) -> None:
    experts.by_kernel(*experts.inputs(m), m.spec(experts.interpreter()))


CASES: dict[str, Callable[[], None]] = {
    "decode": lambda: decode.run(ROWS, K=2, tune=ALL),
    "decode, 8 bits": lambda: decode.run(ROWS, K=2, dtype=F8, scaled=True, tune=ALL),
    "decode, int8": lambda: decode.run(ROWS, K=2, Z=32, dtype=I8, window=90, tune=ALL),
    "prefill": lambda: prefill.run(((130, 30), (0, 40), (0, 0))),
    "prefill, 8 bits": lambda: prefill.run(((130, 30), (0, 40)), dtype=F8, scaled=True),
    "latents": lambda: latents.run_rows(NARROW, ROWS, tune=ALL),
    "latents, chunks": lambda: latents.run_chunks(NARROW, ((130, 30), (0, 20))),
    "prefill, int8": lambda: prefill.run(((130, 30), (0, 40)), Z=32, dtype=I8),
    "product": lambda: product.test_values("a ring that goes round", "hopper"),
    "kv write": lambda: kv_write.test_values_and_places("8 bits"),
    "bound": lambda: threshold.test_one_is_the_largest_alone_even_among_ties(),
    "experts": lambda: experts.test_values("a ring that goes round"),
    "experts, two warpgroups": lambda: mixture(
        Mixture(T=6, X=2, E=3, D=256, F=128, tune={"warpgroups": 2, "parts": 2, "stages": 2})
    ),
    "combine": lambda: combine.check(combine.tile(splits=12, K=2, G=3), (0, 9, 2), sinks=True),
    "norm": lambda: add_norm.test_values(4, 1024, jnp.bfloat16),
}
MODULES = (add_norm, combine, decode, experts, kv_write, latents, prefill, product, threshold)


@pytest.fixture
def seen_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The detector knows that each ``wgmma`` reads its first operand (queries, weights of values). Not the second: of
    latents one warpgroup zeroes what no row may see while the other has it as keys, whose scores it masks.

    A product reads where copies write, which a load does not: with the fence, what is copied there later has to wait
    for the same barriers as for a product."""
    wgmma = plgpu.wgmma

    def product(acc: Any, a: Any, b: Any) -> None:
        plgpu.load(a)
        plgpu.commit_smem()
        wgmma(acc, a, b)

    monkeypatch.setattr(plgpu, "wgmma", product)


@pytest.fixture
def races(seen_products: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        monkeypatch.setattr(module, "interpreter", partial(interpreter, detect_races=True))


@pytest.mark.parametrize("case", CASES)
def test_there_are_none(case: str, races: None, capsys: pytest.CaptureFixture) -> None:
    CASES[case]()
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.parametrize("n_threads", [1, 2])
def test_one_would_be_seen(n_threads: int, capsys: pytest.CaptureFixture) -> None:
    def kernel(x: Any, out: Any, room: Any) -> None:
        room[...] = x[...]

        @pl.when(lax.axis_index("wg") == 0)
        def _() -> None:
            out[...] = room[...]

    plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        num_threads=n_threads,
        thread_name="wg",
        interpret=interpreter(detect_races=True),
        scratch_types={"room": plgpu.SMEM((128,), jnp.float32)},
    )(jnp.zeros(128))
    assert ("RACE" in capsys.readouterr().out) == (n_threads > 1)


@pytest.mark.parametrize("ordered", [False, True])
def test_what_a_product_reads_would_be_seen(
    ordered: bool, seen_products: None, capsys: pytest.CaptureFixture
) -> None:
    """One warpgroup writes the operand of another's product, which waits for that or does not."""

    def kernel(x: Any, out: Any, room: Any, written: Any) -> None:
        @pl.when(lax.axis_index("wg") == 0)
        def _() -> None:
            room[...] = x[...]
            plgpu.barrier_arrive(written)

        @pl.when(lax.axis_index("wg") == 1)
        def _() -> None:
            if ordered:
                plgpu.barrier_wait(written)

            def product(acc: Any) -> Any:
                plgpu.wgmma(acc, room, room)
                return acc[...]

            out[...] = pl.run_scoped(product, plgpu.ACC((64, 64), jnp.float32))
            if not ordered:
                plgpu.barrier_wait(written)

    plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        num_threads=2,
        thread_name="wg",
        interpret=interpreter(detect_races=True),
        scratch_types={"room": plgpu.SMEM((64, 64), jnp.bfloat16), "written": plgpu.Barrier()},
    )(jnp.zeros((64, 64), jnp.bfloat16))
    assert ("RACE" in capsys.readouterr().out) != ordered
