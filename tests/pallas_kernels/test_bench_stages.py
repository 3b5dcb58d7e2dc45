"""Every stage of ``bench.gpu`` that runs kernels, with tiny shapes on a CPU: the script that will
have minutes on a GPU must not fail for its own sake."""

from __future__ import annotations

import importlib

import pytest

from bench.gpu import STAGES
from bench.gpu_record import Record, read

ELSEWHERE = ("facts", "peers", "serving", "serving_speculative")
NAMES = [n for n in STAGES if n not in ELSEWHERE]
SECONDS = 7200
"""Half of what is left of these may pass until a measurement ends the process, and the tests with it."""
pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize("name", NAMES)
def test_stage(name: str, tmp_path) -> None:
    stage = STAGES[name]
    record = Record(tmp_path, name, tiny=True, seconds=SECONDS)
    getattr(importlib.import_module(stage.module), stage.function)(record)
    found = read(tmp_path / "gpu.jsonl")
    assert found
    for line in found:
        assert "error" not in line, line
        assert line.get("ok", True), line


@pytest.mark.parametrize(
    ("attn", "name"),
    [
        *(("dense", name) for name in ("graphs", "step_numerics", "steps_1b", "steps_v2_lite")),
        *(("none", name) for name in ("graphs", "steps_1b")),
        ("hopper_fused", "steps_1b"),
    ],
)
def test_stage_with_other_attention(attn: str, name: str, tmp_path) -> None:
    stage = STAGES[name]
    record = Record(tmp_path, name, tiny=True, seconds=SECONDS, attn=attn)
    getattr(importlib.import_module(stage.module), stage.function)(record)
    found = read(tmp_path / "gpu.jsonl")
    assert len(found) > 1
    assert all("error" not in line and line.get("ok", True) for line in found), found


def test_the_comparison_sees_a_wrong_answer() -> None:
    from bench import gpu_kernels as k

    p = k.pools([(70, 1)], k.Shape(1, 2, 64), 0, poison=True)
    q = k.queries(0, 1, 1, 2, 64)
    call = k._decode_call(1, {"register_p": False, "teams": 1, "sms": 4}, True)
    want = call(q, p)
    good = k.compare(lambda: call(q, p), want, slice(None), tiny=True)
    assert good["ok"]
    short = p._replace(length=p.length - 30, start=p.start - 30)
    bad = k.compare(lambda: call(q, short), want, slice(None), tiny=True)
    assert not bad["ok"]
    assert bad["rel"] > 0.05
