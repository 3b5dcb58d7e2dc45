"""The kernels that multiply, in /metrics: their level, or the reason why there are none."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from jserve.api.ops.engine_metrics import EngineCollector
from tests.api.fake import FakeEngine


def scraped(**info: object) -> list[str]:
    engine = FakeEngine()
    engine.info |= info
    registry = CollectorRegistry()
    registry.register(EngineCollector("m", engine))  # type: ignore[arg-type]
    text = generate_latest(registry).decode()
    return [line for line in text.splitlines() if line.startswith("jserve:kernels_info")]


def test_the_level_is_a_label_without_a_reason():
    assert scraped(kernels="avx512_bf16", no_kernels="") == [
        'jserve:kernels_info{level="avx512_bf16",model_name="m",reason=""} 1.0'
    ]


def test_without_kernels_the_reason_is_a_label():
    assert scraped(kernels="xla", no_kernels="no library was built") == [
        'jserve:kernels_info{level="xla",model_name="m",reason="no library was built"} 1.0'
    ]
