"""The build backend of pyproject.toml: hatchling, with a C compiler from PyPI where the machine has none."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from hatchling import build as hatchling  # pyright: ignore[reportMissingImports]
from hatchling.build import *  # noqa: F403  # pyright: ignore[reportMissingImports]


def compiling() -> Any:
    """The module ``jserve.native.compile``, while nothing of jserve is installed."""
    path = Path(__file__).parent.parent / "compile.py"
    spec = importlib.util.spec_from_file_location("jserve_native_compile", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiler_package() -> list[str]:
    """The package to install beside hatchling: a compiler, where one is needed and made for this machine."""
    found, environ = compiling(), os.environ
    if environ.get("JSERVE_NO_NATIVE") or not found.zig_platform():
        return []
    here = found.find_compiler(environ.get("CC", ""))
    needed = environ.get("JSERVE_WHEEL_PLATFORM") or here is None
    return [f"ziglang=={found.ZIG}"] if needed else []


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*hatchling.get_requires_for_build_wheel(config_settings), *compiler_package()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*hatchling.get_requires_for_build_editable(config_settings), *compiler_package()]
