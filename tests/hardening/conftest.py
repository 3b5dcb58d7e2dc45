"""A model directory for the tests that start a whole server."""

from tests.whole.conftest import tiny_dir

__all__ = ["tiny_dir"]
