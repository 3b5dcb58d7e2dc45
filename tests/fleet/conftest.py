"""Hypothesis for the choice of a replica: a busy machine is no reason to fail. One Ray for all drills."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("fleet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fleet")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray of this session, whose replicas find the tests; its applications are the drills'."""
    from jserve.config import EngineConfig
    from jserve.fleet.on_ray import RayReplicas

    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    cluster = RayReplicas(EngineConfig.of(replicas=1), "nobody:builds")
    cluster._connect(cluster._config.fleet)
    yield
    cluster._end()
