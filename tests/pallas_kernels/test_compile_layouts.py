"""Steps of layouts compiled for H200s that are not there: one graph, KV in place, the collectives of the layout."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from jserve.model.arch import resized
from jserve.model.mesh import mesh_of
from jserve.model.shard import ShardRules
from jserve.model.view import Bucket
from jserve.sharding import Sharding
from jserve.sizing.compiled import compile_step
from pallas_kernels import aot
from tests.pallas_kernels.shapes import ARCHS, step_model
from tests.pallas_kernels.test_compile import layer_bytes

pytestmark = [pytest.mark.usefixtures("h200"), pytest.mark.slow]
NAME = "llama-3.1-8b"
XY = {"x": 2, "y": 4}
FOUR = {"x": 2, "y": 2}
WIDE = {"kv_heads": "y", "ffn": "y", "embed": "x"}
REPEATED = "kv repeated"
ALL = {"kv_heads": ["x", "y"], "ffn": ["x", "y"], "vocab": ["x", "y"]}
SPECS: dict[str, dict[str, Any]] = {
    **{f"split logits, {n}": {"mesh": {"tp": n}, "logits": "split"} for n in (2, 4, 8)},
    **{f"sums of weights, {n}": {"mesh": {"tp": n}, "sums": "weights"} for n in (2, 4, 8)},
    **{f"split residual, {n}": {"mesh": {"tp": n}, "residual": "split"} for n in (2, 4, 8)},
    "one device": {"mesh": {"tp": 1}, "sums": "weights"},
    REPEATED: {"mesh": {"tp": 8}},
    "2D, 4": {"mesh": FOUR, "rules": {"kv_heads": "y", "ffn": ["x", "y"], "vocab": "x"}},
    "2D, width": {"mesh": XY, "rules": {**WIDE, "vocab": "y"}},
    "split residual, 2D": {"mesh": FOUR, "rules": ALL, "residual": "split"},
    "both, 2D": {
        "mesh": XY,
        "rules": {**ALL, "kv_heads": "y", "vocab": "x"},
        "logits": "split",
        "sums": "weights",
    },
    "auto": {"mesh": XY, "mode": "auto", "rules": ALL},
    **{
        f"auto, {n}": {"mesh": {"x": n}, "mode": "auto", "rules": dict.fromkeys(ALL, "x")}
        for n in (2, 4)
    },
    "auto, 2D": {"mesh": XY, "mode": "auto", "rules": WIDE},
    "auto, 2D, 4": {"mesh": FOUR, "mode": "auto", "rules": WIDE},
    "auto, by path": {
        "mesh": XY,
        "mode": "auto",
        "rules": {"kv_heads": "y", "vocab": "x"},
        "params": {"layers/.*/down": [None, ["x", "y"]]},
    },
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("bucket", [Bucket(D=64, P=0, F=0), Bucket(D=8, P=1024, F=4)], ids=str)
def test_a_step_is_one_graph_with_its_kv_in_place(name: str, bucket: Bucket) -> None:
    sharding = Sharding.of(SPECS[name])
    mesh = mesh_of(sharding, aot.h200(sharding.n_devices))
    rules = ShardRules.of_sharding(sharding, mesh.shape)
    K = 2 if name == REPEATED else 8
    arch, n_pages = resized(ARCHS[NAME], L=2, K=K), 1024 * sharding.n_devices
    model = dataclasses.replace(step_model(arch, n_pages=n_pages), mesh=mesh, rules=rules)
    report = compile_step(model, bucket)
    assert report.launches() == ["kCommandBuffer"], "a step is not one CUDA graph"
    assert report.temp_bytes < layer_bytes(model), "scratch is as large as a layer's KV"
    assert report.alias_bytes >= arch.L * layer_bytes(model), "KV is not updated in place"
    if sharding.sums == "weights" and sharding.n_devices > 1:
        assert not re.search(r"f32\[\d+,4096\]\S* all-reduce", report.hlo)
        assert len(re.findall(r"bf16\[\S* all-to-all(?:-start)?\(", report.hlo)) > 0
    if rules.auto:
        assert any("mosaic" in kernel.name for kernel in report.kernels), "attention is XLA's"
        assert not re.search(r"\[(?:2,)?\d+,4096\]\S* all-gather", report.hlo), (
            "a matrix is gathered"
        )
    if sharding.residual == "split" and bucket.F:
        assert len(re.findall(r" reduce-scatter(?:-start)?\(", report.hlo)) > 0
    if sharding.logits == "split":
        assert not re.search(rf"\[\d+,{arch.V}\]\S* all-gather", report.hlo)
