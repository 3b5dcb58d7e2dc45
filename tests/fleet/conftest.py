"""Hypothesis for the choice of a replica: a busy machine is no reason to fail."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("fleet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fleet")
