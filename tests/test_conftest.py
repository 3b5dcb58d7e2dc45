"""What all tests share: programs that one process compiled are read by another, and do not pile up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest, programs

COMPILE = """
import jax
import jax.monitoring
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
jax.jit(lambda x: jax.numpy.sort(x * 3.25) @ x)(jax.numpy.ones((7, 7))).block_until_ready()
print(sum(name.endswith("cache_hits") for name in hits) > 0)
"""


def test_another_process_reads_what_one_compiled(tmp_path: Path) -> None:
    """As workers and engines of this session do: by the environment that they inherit."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        pytest.skip("this session has no cache (-p no:cacheprovider)")
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    for hit in ("False", "True"):
        told = subprocess.run(
            [sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=True
        )
        assert told.stdout.strip() == hit, told.stderr


def test_the_session_has_a_directory_of_this_jaxlib_and_processor() -> None:
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        pytest.skip("this session has no cache (-p no:cacheprovider)")
    if conftest.PROGRAMS not in os.environ["JAX_COMPILATION_CACHE_DIR"]:
        pytest.skip("the environment names a directory of its own")
    assert Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).name.endswith(conftest._processor())


def test_programs_of_other_versions_and_too_many_of_this_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0.1.2-abc").mkdir()
    own = conftest.programs_directory(tmp_path)
    assert [d.name for d in tmp_path.iterdir()] == [own.name]
    (own / "a-cache").write_bytes(bytes(2**20))
    assert (conftest.programs_directory(tmp_path) / "a-cache").exists()
    monkeypatch.setattr(conftest, "MOST_PROGRAMS_MIB", 0.5)
    assert list(conftest.programs_directory(tmp_path).iterdir()) == []


def test_runners_of_tests_keep_programs_for_one_another() -> None:
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        pytest.skip("this session has no cache (-p no:cacheprovider)")
    assert programs.kept() is programs.kept() is not None


def test_a_test_that_may_change_code_compiles_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert programs.kept() is None


def test_flags_of_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=3")
    conftest._set_xla_flags()
    flags = os.environ["XLA_FLAGS"].split()
    assert len(flags) == len(conftest.XLA_FLAGS)
    assert flags[:2] == [
        "--xla_backend_optimization_level=3",
        "--xla_force_host_platform_device_count=8",
    ]
