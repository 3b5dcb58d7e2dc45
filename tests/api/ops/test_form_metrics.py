"""The forms of quantised weights in /metrics: bytes, and who multiplies them."""

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
    return [line for line in text.splitlines() if line.startswith("jserve:weight_form")]


def test_bytes_and_paths_of_each_form():
    lines = scraped(
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
    assert scraped() == []
