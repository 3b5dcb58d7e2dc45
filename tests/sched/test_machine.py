"""The stateful property test: invariants I1-I17 after every rule, an oracle on every token."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.sched.sched_machine import SchedulerMachine

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


def test_random_operations_keep_every_invariant():
    fast = settings(max_examples=60, stateful_step_count=50, derandomize=True, **COMMON)
    run_state_machine_as_test(SchedulerMachine, settings=fast)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_operations_keep_every_invariant_nightly():
    nightly = settings(max_examples=1_500, stateful_step_count=60, derandomize=True, **COMMON)
    run_state_machine_as_test(SchedulerMachine, settings=nightly)
