"""``pallas_kernels`` holds the kernels that a step calls, and no other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {p.parent.name for p in (ROOT / "pallas_kernels").glob("*/__init__.py")}


def imported(path: Path) -> Iterator[str]:
    """Packages of kernels that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "pallas_kernels" and len(parts) > 1 and parts[1] in PACKAGES:
                yield parts[1]


def test_jserve_calls_every_kernel_that_it_ships() -> None:
    """One that nothing calls belongs in ``bench.candidates`` until it is measured."""
    called = {name for p in (ROOT / "jserve").rglob("*.py") for name in imported(p)}
    assert called == PACKAGES
