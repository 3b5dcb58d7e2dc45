"""docs/reliability.md and docs/fleet.md name tests; each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TABLE = (ROOT / "docs" / "reliability.md").read_text()
FLEET = (ROOT / "docs" / "fleet.md").read_text()


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`([a-z_/]+\.py)::(\w+)`", TABLE + FLEET)
    assert len(named) > 70
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / "tests" / file).is_file() or name not in functions(ROOT / "tests" / file)
    ]
    assert not missing


def test_every_file_that_is_named_exists() -> None:
    for name in re.findall(r"`((?:jserve|bench)/[a-z_/]+\.py)`", TABLE):
        assert (ROOT / name).is_file(), name


def test_every_row_names_what_shows_it() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ") and "---" not in line]
    for row in rows:
        shown = row.split("|")[-2]
        assert "`" in shown or shown.strip() == "shown by", row
