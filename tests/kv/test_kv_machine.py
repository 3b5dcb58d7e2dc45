"""The stateful property test of everything that outlives a request: audits after every rule."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.kv.cache_machine import CacheMachine

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


def test_random_operations_keep_every_invariant():
    fast = settings(max_examples=60, stateful_step_count=50, derandomize=True, **COMMON)
    run_state_machine_as_test(CacheMachine, settings=fast)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_operations_keep_every_invariant_nightly():
    nightly = settings(max_examples=1_200, stateful_step_count=60, derandomize=True, **COMMON)
    run_state_machine_as_test(CacheMachine, settings=nightly)
