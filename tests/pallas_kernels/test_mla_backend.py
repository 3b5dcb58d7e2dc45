"""Latent attention of the ``hopper`` backend in the interpreter against ``ref``: mixed steps over poisoned pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import ConfigError
from jserve.model import latent_pool
from jserve.model.arch import resized
from jserve.model.attention import LatentArgs, backend, check_layers
from jserve.model.attn_mesh import over_heads
from jserve.model.draft_tree import TreeShape
from jserve.model.hand import Row, pack
from jserve.model.kv_quant import E4M3
from jserve.model.mesh import make_mesh
from jserve.model.view import Bucket, StepDims, layout, unpack
from jserve.runner import selftest
from jserve.sizing.models import find
from tests.model.driver import NoSlots

N, A, Y, H, V, Z, M = 4, 128, 64, 16, 24, 16, 10
DIMS = StepDims(C=4, M=M, Z=Z, V=32)
N_PAGES, SCALE = 40, 0.1
CASES: dict[str, tuple[Bucket, Any, Any]] = {
    "decode, verify and chunks": (
        Bucket(D=4, P=32, F=3, J=2),
        [(70, 1), (62, 2), (5, 2)],
        [(64, 12), (0, 9)],
    ),
    "decode": (Bucket(D=4, P=0, F=0), [(70, 1), (0, 1)], []),
    "chunks": (Bucket(D=0, P=24, F=2), [], [(15, 20)]),
    "empty": (Bucket(D=2, P=16, F=1), [], []),
}


def arrays(bucket: Bucket, rng: Any) -> dict[str, Any]:
    """Those of ``LatentArgs``."""
    q_TNX = rng.standard_normal((bucket.T, N, H + Y)).astype(np.float32)
    k_up, v_up = (jnp.asarray(rng.standard_normal((N, n, A)) * 0.2, jnp.bfloat16) for n in (H, V))
    own, shared = (jnp.asarray(x) for x in (q_TNX[..., :H], q_TNX[..., H:]))
    return {"q_TNH": own, "q_TNY": shared, "k_up_NHA": k_up, "v_up_NVA": v_up}


def step(name: str, case: str, *, tp: int = 0) -> np.ndarray:
    """float32[real tokens, N, V] of a step. ``tp``: devices that share the heads of a program which XLA cuts; 0: none
    does."""
    bucket, decode, prefill = CASES[case]
    attn, rng = backend(name, "cpu"), np.random.default_rng(3)
    pages = iter(rng.permutation(N_PAGES - 1) + 1)
    spans = [*decode, *prefill]
    rows = [Row([next(pages) for _ in range(-(-(s + c) // Z))], s, [1] * c) for s, c in spans]
    pool = np.full((N_PAGES, Z, A + Y), np.nan, np.float32)
    for row in rows:
        for i in range(row.start):
            pool[row.pages[i // Z], i % Z] = rng.standard_normal(A + Y)
    x_TC = jnp.asarray(rng.standard_normal((bucket.T, A + Y)), jnp.bfloat16)
    given = arrays(bucket, rng)
    buf = pack(bucket, DIMS, attn, rows[: len(decode)], rows[len(decode) :])
    zeros, fields = jnp.zeros(DIMS.C, jnp.int32), layout(bucket, DIMS, {})
    if tp:
        attn = over_heads(dataclasses.replace(attn, name="hopper"), make_mesh(tp), "tp")

    @jax.jit
    def run(buf: Any, pool: Any, queries: Any) -> Any:
        given = LatentArgs(**queries, scale=SCALE)
        view = unpack(buf, fields, bucket, DIMS, NoSlots(zeros, zeros))
        kept = latent_pool.write(pool, x_TC.astype(jnp.float32), view)
        assert attn.attend_latent is not None
        return attn.attend_latent(given, kept, view), view.pos_T

    arguments = (jnp.asarray(buf), jnp.asarray(pool, jnp.bfloat16), given)
    assert ("shard_map" in str(jax.make_jaxpr(run)(*arguments))) == (tp > 0)
    found = run(*arguments)
    out, pos_T = (np.asarray(x) for x in found)
    assert out.dtype == np.float32
    assert np.isfinite(out).all()
    assert name != "hopper" or not out[pos_T < 0].any()
    return out[pos_T >= 0]


@pytest.mark.parametrize(
    "case",
    [c if c.startswith("decode,") else pytest.param(c, marks=pytest.mark.slow) for c in CASES],
)
def test_steps_agree_with_ref(case: str) -> None:
    want = step("ref", case)
    np.testing.assert_allclose(step("hopper", case), want, atol=2e-2 * np.abs(want).max(initial=1))


def test_heads_of_two_devices_in_a_step_that_xla_cuts() -> None:
    """As kernels over the heads of each, with XLA's attention in their place: the interpreter runs one device's kernel
    at a time."""
    case = "decode, verify and chunks"
    want = step("xla", case)
    np.testing.assert_allclose(step("xla", case, tp=2), want, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "dtype", "tree", "field"),
    [
        ({}, E4M3, (), "kv_cache_dtype"),
        ({}, jnp.bfloat16, (0, 0, 1), "speculative.tree"),
        ({"rank": 192}, jnp.bfloat16, (), "attention_backend"),
        ({"turned": 32}, jnp.bfloat16, (), "attention_backend"),
    ],
)
def test_what_is_not_served_is_refused_by_option(
    changes: dict[str, int], dtype: Any, tree: TreeShape, field: str
) -> None:
    """Published sizes are served; dense serves all."""
    attn, arch = backend("hopper", "cuda"), find("deepseek-v2-lite").arch
    latent = arch.layers[0].attn.latent
    assert latent is not None
    changed = resized(arch, latent=dataclasses.replace(latent, **changes))
    with pytest.raises(ConfigError, match="dense") as e:
        check_layers(attn, changed, attn.kv_dtype(dtype), tree, 64)
    assert e.value.field == field
    check_layers(backend("dense", "cuda"), changed, jnp.dtype(dtype), tree, 64)
    for served in (arch, find("deepseek-v3").arch):
        check_layers(attn, served, jnp.dtype(jnp.bfloat16), (), 64)


SIZES = (16, 64, 128, 24)


def test_the_trial_of_latents_sees_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU's backend in place of the kernels."""
    from jserve.model.attn_xla import XLA

    assert selftest.differs("xla", 192, 4, 64, "bfloat16", None, SIZES) == ""

    def wrong(*given: Any) -> Any:
        assert XLA.attend_latent is not None
        return 1.1 * XLA.attend_latent(*given)

    changed = dataclasses.replace(XLA, attend_latent=wrong)
    monkeypatch.setattr("jserve.model.attn_xla.XLA", changed)
    found = selftest.differs("xla", 192, 4, 64, "bfloat16", None, SIZES)
    assert "decode differs" in found
    assert "prefill differs" in found


@pytest.mark.slow
def test_the_trial_of_latents_runs_the_kernels() -> None:
    assert selftest.differs("hopper", 192, 4, 64, "bfloat16", None, SIZES) == ""
