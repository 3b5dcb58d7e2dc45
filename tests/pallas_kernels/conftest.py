"""What the kernel tests need: the Mosaic interpreter, or the CUDA plugin that compiles without a
device. Both are looked for once; a test that lacks its own is skipped with the reason."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import pytest

OLD = jax.__version_info__ < (0, 11)
collect_ignore_glob = ["test_*.py"] if OLD else []
if not OLD:
    # The code of an H200 is judged, so it is compiled here, and at the level of a server.
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(
        "optimization_level=0", "optimization_level=3"
    )


@pytest.fixture(scope="session")
def h200() -> None:
    """Skip without a plugin that compiles for an H200 (the reason says what is missing)."""
    from pallas_kernels import aot

    reason = aot.available()
    if reason is not None:
        pytest.skip(reason)
