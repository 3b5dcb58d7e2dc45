"""What the compiler made of a step: no copy of KV or of weights, no time spent on lengths that
nobody has."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jserve.model.arch import Arch, Rope, RopeScaling
from jserve.model.attention import backend
from jserve.model.ctx import Ctx
from jserve.model.families import family_for
from jserve.model.param_spec import is_spec
from jserve.model.shard import Axes
from jserve.model.view import Bucket, StepDims, buffer_size, layout, unpack
from tests.model.driver import NoSlots
from tests.model.test_shard import CONFIG

FAMILY = family_for(CONFIG)
ARCH = FAMILY.arch({**CONFIG, "num_hidden_layers": 2})
DIMS = StepDims(C=8, M=64, Z=16, V=ARCH.V)
N_PAGES = 3001


def lowered(bucket: Bucket, dtype: Any, arch: Arch = ARCH) -> Any:
    """A donated two-layer step."""
    attn = backend("xla")
    fields = layout(bucket, DIMS, attn.plan_shapes(bucket, DIMS))

    def step(params: Any, kv: Any, buf: Any) -> Any:
        zeros = jnp.zeros(DIMS.C, jnp.int32)
        view = unpack(buf, fields, bucket, DIMS, NoSlots(zeros, zeros))
        x_TD, kv = FAMILY.forward(Ctx.of(arch, view, attn, Axes()), params, kv)
        return FAMILY.logits(arch, params, x_TD[:2], Axes()), kv

    shape = jax.ShapeDtypeStruct
    params = jax.tree.map(lambda s: shape(s.shape, dtype), FAMILY.specs(ARCH, 1), is_leaf=is_spec)
    pool = shape(attn.kv_shape(ARCH.K, ARCH.H, N_PAGES, DIMS.Z), attn.kv_dtype(dtype))
    buf = shape((buffer_size(fields),), jnp.int32)
    return jax.jit(step, donate_argnums=1).lower(params, [(pool, pool)] * ARCH.L, buf)


def compiled(bucket: Bucket, dtype: Any) -> Any:
    """``lowered``, not run."""
    return lowered(bucket, dtype).compile()


def with_rope(scaling: RopeScaling | None) -> Arch:
    rope = Rope(theta=1e4, scaling=scaling)
    layers = [replace(x, attn=replace(x.attn, rope=rope)) for x in ARCH.layers]
    return replace(ARCH, layers=tuple(layers))


def test_only_models_with_two_kinds_of_factors_choose_between_them() -> None:
    """A plain rope and factors of one kind make the same program, which reads no row's kind."""
    ones, threes = (1.0,) * (ARCH.H // 2), (3.0,) * (ARCH.H // 2)
    short = RopeScaling(
        kind="longrope", original_max_position=64, factors=ones, long_factors=threes, longest=256
    )
    both = replace(short, by_row=True)
    plain, one_kind, two_kinds = (
        lowered(Bucket(D=2, P=0, F=0), jnp.float32, with_rope(s)).as_text()
        for s in (None, short, both)
    )
    assert plain == one_kind
    assert len(two_kinds) > len(plain)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "bucket",
    [Bucket(D=4, P=32, F=2), pytest.param(Bucket(D=6, P=0, F=0), marks=pytest.mark.slow)],
)
def test_kv_is_updated_in_place(bucket: Bucket, dtype: Any) -> None:
    program = compiled(bucket, dtype)
    memory = program.memory_analysis()
    pool_bytes = N_PAGES * ARCH.K * DIMS.Z * ARCH.H * jnp.dtype(dtype).itemsize
    assert memory.temp_size_in_bytes < pool_bytes / 2
    assert memory.alias_size_in_bytes == 2 * ARCH.L * pool_bytes
    text = program.as_text()
    for line in text.splitlines():
        if re.search(rf"= \w+\[{N_PAGES},[^=]*\b(copy|convert|transpose)\(", line):
            pytest.fail(f"copies the pool: {line[:200]}")


def test_bfloat16_products_have_float32_results_and_two_rows() -> None:
    text = compiled(Bucket(D=1, P=0, F=0), jnp.bfloat16).as_text()
    products = re.findall(r"= (\w+)\[(\d+),\d+\]\S* dot\(", text)
    assert len(products) == 4 * ARCH.L + 1
    assert set(products) == {("f32", "2")}
