"""Runs the operator's own Python before an engine is built, to register model families and step features."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from jserve.errors import ConfigError


def load_plugins(names: Iterable[str]) -> None:
    """Import each module, or run each file that ends in .py as a module of its stem; once in a process.

    Raises:
        ConfigError: there is no such file or module, or it raises; ``field`` is plugins.
    """
    for name in names:
        try:
            _load(name)
        except ConfigError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"plugins: {name}: {reason}", field="plugins") from error


def _load(name: str) -> None:
    if not name.endswith(".py"):
        importlib.import_module(name)
        return
    path = Path(name).resolve()
    module = f"jserve_plugin_{path.stem}"
    known = sys.modules.get(module)
    if known is not None and known.__file__ == str(path):
        return
    if not path.is_file():
        raise ConfigError(f"plugins: there is no file {path}", field="plugins")
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    made = sys.modules[module] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(made)
    except BaseException:
        del sys.modules[module]
        raise
