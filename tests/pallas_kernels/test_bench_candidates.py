"""The verdict of ``bench.gpu_beside_xla``, and that its comparisons see a kernel that is wrong."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from bench import gpu_candidates as g, gpu_products as p
from bench.gpu_beside_xla import Comparison, verdict
from bench.gpu_report import _beside_xla

SEED = 3


@pytest.mark.parametrize(
    ("ratios", "wanted", "says"),
    [
        ({"a": 1.2, "b": 1.05}, 2, {"verdict": "stays", "least": 1.05}),
        ({"a": 1.2, "b": 1.04}, 2, {"verdict": "goes", "least": 1.04, "lost": "b"}),
        ({"a": 0.9, "b": 0.5}, 2, {"verdict": "goes", "least": 0.5, "lost": "a; b"}),
        ({"a": 3.0}, 2, {"verdict": "open", "shapes": "1 of 2"}),
        ({}, 1, {"verdict": "open", "shapes": "0 of 1"}),
    ],
)
def test_verdict(ratios: dict[str, float], wanted: int, says: dict[str, Any]) -> None:
    """A shape that was not measured decides nothing."""
    assert verdict(ratios, wanted) == says


def test_what_the_report_shows() -> None:
    line = {"us": 10.0, "xla_us": 25.0, "ratio": 2.5, "xla": "by block", "verdict": "stays"}
    assert _beside_xla(line)[0] == "10.0 us, XLA (by block) 25.0 us: 2.50 x, stays"
    assert _beside_xla({"verdict": "goes", "least": 0.5})[0] == "goes, least 0.50"
    assert _beside_xla({"verdict": "open", "shapes": "1 of 2"})[0] == "open"


def test_every_served_model_is_in_every_comparison() -> None:
    shapes = {}
    for some in (*g.COMPARISONS, p.products):
        for c in some(False):
            shapes.setdefault(c.kernel, []).append(c.shape)
    assert {k: len(v) == len(set(v)) for k, v in shapes.items()} == dict.fromkeys(shapes, True)
    for model in ("1b", "8b", "70b"):
        assert any(model in s for s in shapes["kv_write"])
        assert any(model in s for s in shapes["quant_matmul"])
        assert any(model in s for s in shapes["add_norm"])


def first(some: Any) -> Comparison:
    return next(some(True))


@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_bound_is_seen(seed: int) -> None:
    """Where logits lie densely: between two of a peak there is room for a bound that is wrong."""
    _, c = g.sampling(True)
    assert g._kept(c, seed, True)["ok"]
    assert not g._kept(c._replace(ours=lambda *args: c.ours(*args) - 0.1), seed, True)["ok"]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_wrong_row_is_seen(which: int) -> None:
    c = first(g.writing)

    def wrong(*args: Any) -> Any:
        out = list(c.ours(*args))
        out[which] = -out[which]
        return tuple(out)

    assert g._written(c, SEED, True)["ok"]
    assert not g._written(c._replace(ours=wrong), SEED, True)["ok"]


@pytest.mark.parametrize("which", [0, 1])
def test_a_wrong_norm_is_seen(which: int) -> None:
    c = first(g.norming)

    def wrong(*args: Any) -> Any:
        out = list(c.ours(*args))
        out[which] = out[which] * 1.02
        return tuple(out)

    assert g._normed(c, SEED, True)["ok"]
    assert not g._normed(c._replace(ours=wrong), SEED, True)["ok"]


def test_a_wrong_product_is_seen() -> None:
    c = first(p.products)

    def wrong(*args: Any, **options: Any) -> Any:
        return c.ours(*args, **options) * 1.02

    assert p._multiplied(c, SEED, True)["ok"]
    assert not p._multiplied(c._replace(ours=wrong), SEED, True)["ok"]


def test_ways_of_xla_agree_with_the_kernels() -> None:
    """What a kernel is timed beside computes the same."""
    c = first(p.products)
    args = c.inputs(SEED)
    want = p.in_float32(*args)
    for call in (*c.by_xla.values(), c.ours):
        assert g.relative(jax.jit(call)(*args), want) < 1e-2
    c = first(g.sampling)
    args = c.inputs(SEED)
    want = g.threshold_ref.sample_threshold(*args)
    scaled = c.by_xla["threshold"](*args)
    kept = (args[0] - args[0].max(1, keepdims=True)) / args[1][:, None] >= scaled[:, None]
    assert (kept == (args[0] >= want[:, None])).all()
    c = first(g.writing)
    args = c.inputs(SEED)
    G = args[0].shape[3] - 2
    got = c.by_xla["scatter"](*args)
    want = g.kv_ref.kv_write(*args[:4], norms=args[4], eps=g.EPS)
    for x, y in zip((got[0][:, :, :G], *got[1:]), want, strict=True):
        assert g.relative(x, y) < 1e-2
    c = first(g.norming)
    args = c.inputs(SEED)
    want = g.norm_ref.add_norm(*args, g.EPS, jax.numpy.bfloat16)
    for x, y in zip(c.by_xla["fusions"](*args), want, strict=True):
        assert g.relative(x, y) < 1e-2
