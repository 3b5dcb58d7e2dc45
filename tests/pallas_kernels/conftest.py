"""What the kernel tests need: the Mosaic interpreter, or the CUDA plugin that compiles without a
device. Both are looked for once; a test that lacks its own is skipped with the reason."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import pytest

OLD = jax.__version_info__ < (0, 11)
collect_ignore_glob = ["test_*.py"] if OLD else []


@pytest.fixture(scope="session")
def h200() -> None:
    """Skip without a plugin that compiles for an H200 (the reason says what is missing)."""
    from pallas_kernels import aot

    reason = aot.available()
    if reason is not None:
        pytest.skip(reason)
