"""A warm start of a model whose programs call native kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from jserve.runner.program_files import ProgramFiles
from tests.native import rig
from tests.native.test_steps import requests
from tests.runner.test_program_files import WORK, fresh_cache
from tests.whole import equal

__all__ = ["fresh_cache"]


BUCKETS = (rig.BUCKETS[0], rig.BUCKETS[-1])


@pytest.mark.slow
def test_it_loads_the_programs_and_traces_nothing(level: str, tmp_path: Path) -> None:
    models = [rig.model() for _ in range(2)]

    def start() -> Any:
        directory = ProgramFiles(tmp_path)
        try:
            return rig.made("native", models.pop(), BUCKETS, directory)
        finally:
            directory.close()

    cold, compiled = WORK.of(start)
    assert compiled["jaxpr_trace_duration"] >= len(BUCKETS)
    warm, loaded = WORK.of(start)
    assert not loaded, "a warm start traces, lowers or compiles"
    assert warm.report()["programs_loaded"] == len(warm.programs) > len(BUCKETS)
    for bucket in BUCKETS:
        assert "jserve.product.v1" in warm.programs.hlo(bucket)
        state = sum(x.nbytes for x in jax.tree.leaves(warm.state))
        assert warm.programs.memory(bucket).alias_size_in_bytes == state
    some = requests(30)
    assert equal.alone(warm, some) == equal.alone(cold, some)
    assert warm.programs.late_compiles == cold.programs.late_compiles == 0
