"""``routes`` is complete, and jserve calls only what it says is served."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from pallas_kernels.routes import ROUTES

ROOT = Path(__file__).parents[2]


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
            if parts[0] == "pallas_kernels" and len(parts) > 1 and parts[1] in ROUTES:
                yield parts[1]


def test_every_package_of_kernels_has_a_route() -> None:
    packages = {p.parent.name for p in (ROOT / "pallas_kernels").glob("*/__init__.py")}
    assert packages == set(ROUTES)


def test_jserve_calls_what_is_served() -> None:
    files = list((ROOT / "jserve").rglob("*.py"))
    called = {name for p in files for name in imported(p)}
    assert called == {name for name, route in ROUTES.items() if route.served}
