"""Products in /metrics: the level of the kernels or the reason why there are none, and of quantised weights their
bytes and who multiplies them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from jserve.api.ops.engine_metrics import EngineCollector
from tests.api.fake import FakeEngine


def scraped(metric: str, **info: object) -> list[str]:
    engine = FakeEngine()
    engine.info |= info
    registry = CollectorRegistry()
    registry.register(EngineCollector("m", engine))  # type: ignore[arg-type]
    text = generate_latest(registry).decode()
    return [line for line in text.splitlines() if line.startswith(metric)]


def test_bytes_and_paths_of_each_form():
    lines = scraped(
        "jserve:weight_form",
        form_bytes={"bfloat16": 100, "int4": 250},
        paths={"int4": {"native": [1, 64], "xla-widened": [128, 512]}, "int8": {"xla": [1, 512]}},
    )
    assert lines == [
        'jserve:weight_form_bytes{form="bfloat16",model_name="m"} 100.0',
        'jserve:weight_form_bytes{form="int4",model_name="m"} 250.0',
        'jserve:weight_form_path{form="int4",model_name="m",path="native"} 64.0',
        'jserve:weight_form_path{form="int4",model_name="m",path="xla-widened"} 512.0',
        'jserve:weight_form_path{form="int8",model_name="m",path="xla"} 512.0',
    ]


def test_an_engine_that_says_nothing_has_none():
    assert scraped("jserve:weight_form") == []


def test_the_level_is_a_label_without_a_reason():
    assert scraped("jserve:kernels_info", kernels="avx512_bf16", no_kernels="") == [
        'jserve:kernels_info{level="avx512_bf16",model_name="m",reason=""} 1.0'
    ]


def test_without_kernels_the_reason_is_a_label():
    assert scraped("jserve:kernels_info", kernels="xla", no_kernels="no library was built") == [
        'jserve:kernels_info{level="xla",model_name="m",reason="no library was built"} 1.0'
    ]
