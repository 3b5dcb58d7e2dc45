"""Profiles: written below the directory, one at a time, refused in words."""

from __future__ import annotations

import pytest

from jserve.errors import BadRequest
from jserve.runner.profile import JaxProfiler


def test_a_profile_is_written_and_can_be_taken_again(tmp_path):
    import jax.numpy as jnp

    profiler = JaxProfiler(str(tmp_path))
    with pytest.raises(BadRequest, match="no profile"):
        profiler.stop()
    for _ in range(2):
        profiler.start()
        with pytest.raises(BadRequest, match="already") as e:
            profiler.start()
        assert e.value.code == "profiler_active"
        jnp.ones(3).sum().block_until_ready()
        profiler.stop()
    assert [path for path in tmp_path.rglob("*") if path.suffix in (".gz", ".pb")]


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    profiler = JaxProfiler(str(tmp_path / "file" / "below"))

    def take() -> None:
        profiler.start()
        profiler.stop()

    with pytest.raises(BadRequest) as e:
        take()
    assert e.value.field == "profile_dir"
    assert str(tmp_path) not in e.value.message
