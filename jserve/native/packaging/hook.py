"""The build hook of pyproject.toml: compiles the native kernels into the package.

An editable install gets the library beside its sources; a wheel has it inside, and in its name the platform. Whatever
fails is a warning: without the library everything runs on XLA.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import (  # pyright: ignore[reportMissingImports]
    BuildHookInterface,
)

sys.path.insert(0, str(Path(__file__).parent))
from backend import compiling  # pyright: ignore[reportMissingImports]


class NativeKernels(BuildHookInterface):
    """The hook that hatchling calls before and after the build of a wheel."""

    folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """``version`` is ``standard`` or ``editable``; ``build_data`` takes the library and the platform."""
        if os.environ.get("JSERVE_NO_NATIVE"):
            return
        try:
            self._compile(version == "editable", build_data)
        except Exception as error:
            self.app.display_warning(f"jserve is installed without native kernels: {error}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.folder is not None:
            self.folder.cleanup()

    def _compile(self, editable: bool, build_data: dict[str, Any]) -> None:
        found, wanted = compiling(), os.environ.get("JSERVE_WHEEL_PLATFORM", "")
        here = found.find_compiler(os.environ.get("CC", ""))
        command = found.zig(wanted) if wanted and not editable else here
        if command is None:
            raise found.NativeBuildError("there is no C compiler")
        if editable:
            found.compile_library(found.library_path(), command)
            return
        self.folder = tempfile.TemporaryDirectory()
        platform = found.platform_of(command)
        made = Path(self.folder.name) / found.library_name(platform)
        found.compile_library(made, command)
        build_data["force_include"][str(made)] = f"jserve/native/{made.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
