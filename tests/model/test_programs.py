"""What the compiler made of a step: no copy of KV or of weights, no time spent on lengths that
nobody has."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

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


def compiled(bucket: Bucket, dtype: Any) -> Any:
    """A donated two-layer step, compiled but not run."""
    attn = backend("xla")
    fields = layout(bucket, DIMS, attn.plan_shapes(bucket, DIMS))

    def step(params: Any, kv: Any, buf: Any) -> Any:
        zeros = jnp.zeros(DIMS.C, jnp.int32)
        view = unpack(buf, fields, bucket, DIMS, NoSlots(zeros, zeros))
        x_TD, kv = FAMILY.forward(Ctx.of(ARCH, view, attn, Axes()), params, kv)
        return FAMILY.logits(ARCH, params, x_TD[:2], Axes()), kv

    shape = jax.ShapeDtypeStruct
    params = jax.tree.map(lambda s: shape(s.shape, dtype), FAMILY.specs(ARCH, 1), is_leaf=is_spec)
    pool = shape(attn.kv_shape(ARCH.K, ARCH.H, N_PAGES, DIMS.Z), attn.kv_dtype(dtype))
    buf = shape((buffer_size(fields),), jnp.int32)
    return jax.jit(step, donate_argnums=1).lower(params, [(pool, pool)] * ARCH.L, buf).compile()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("bucket", [Bucket(D=6, P=0, F=0), Bucket(D=4, P=32, F=2)])
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
