"""First tokens and ends by the version of the weights, of the latest versions."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from jserve.api.ops.version_metrics import KEPT, VersionMetrics


def lines(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def test_two_weights_can_be_compared():
    registry = CollectorRegistry()
    metrics = VersionMetrics("m", registry, (0.1, 1.0))
    for version, seconds in (("0", 0.05), ("try", 0.5), ("try", 0.6)):
        metrics.first(version, seconds)
    metrics.ended("try", "stop")
    found = lines(registry)
    assert 'weights_time_to_first_token_seconds_count{model_name="m",version="try"} 2.0' in found
    assert 'seconds_bucket{le="0.1",model_name="m",version="0"} 1.0' in found
    assert 'finished_reason="stop",model_name="m",version="try"} 1.0' in found


def test_of_many_versions_the_latest_are_kept():
    registry = CollectorRegistry()
    metrics = VersionMetrics("m", registry, (0.1, 1.0))
    for i in range(10):
        metrics.ended(f"v{i}", "stop")
        metrics.first("steady", 0.1)
        if i % 2:
            metrics.first(f"v{i}", 0.1)
    found = lines(registry)
    kept = ["steady", *(f"v{i}" for i in range(10 - KEPT + 1, 10))]
    for version in ("steady", *(f"v{i}" for i in range(10))):
        assert (f'version="{version}"' in found) == (version in kept), version
