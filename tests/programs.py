"""Compiled programs that runners of tests have for one another, in serialised form: one whose model, options and source
are those of another traces and compiles nothing.

Not in a test that may change code (``monkeypatch``): what it compiles has the name of what the source says.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jserve.runner.program_files import ProgramFiles

CHANGES_CODE = "monkeypatch"
"""The fixture that a test has which changes code."""
_changed = [False]
_files: list[ProgramFiles] = []


def begin(fixtures: list[str]) -> None:
    """A test with these fixtures begins."""
    _changed[0] = CHANGES_CODE in fixtures


def kept() -> ProgramFiles | None:
    """Beside jax's cache of this session; None: there is none, or this test may change code."""
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    if not directory or _changed[0]:
        return None
    if not _files:
        from jserve.runner.program_files import ProgramFiles

        Path(directory).mkdir(parents=True, exist_ok=True)
        _files.append(ProgramFiles(Path(directory)))
    return _files[0]
