"""The README tells the truth: its tree names every file with one line, and its commands exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
TREES = ("jserve", "pallas_kernels", "checkpoints", "bench")


def _tree_lines() -> dict[str, str]:
    """Path -> description, read from the indented tree between the README's markers."""
    text = (ROOT / "README.md").read_text()
    block = text.split("<!-- tree -->")[1].split("<!-- /tree -->")[0]
    found: dict[str, str] = {}
    folders: list[str] = []
    for line in block.strip().strip("`").splitlines():
        match = re.match(r"^( *)(\S+)(?:\s\s+(.*))?$", line)
        if not match:
            continue
        depth = len(match[1]) // 2
        name, note = match[2], match[3] or ""
        folders[depth:] = [name.rstrip("/")] if name.endswith("/") else []
        path = "/".join(folders) if name.endswith("/") else "/".join([*folders, name])
        found[path] = note
    return found


def _tracked() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *TREES],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    files = {Path(f) for f in listed.stdout.split("\n") if f and (ROOT / f).exists()}
    return {f.as_posix() for f in files if f.suffix == ".py" and f.name != "__init__.py"}


def test_the_tree_has_one_line_for_every_file() -> None:
    lines = _tree_lines()
    missing = sorted(_tracked() - set(lines))
    gone = sorted(p for p in lines if p.endswith(".py") and not (ROOT / p).exists())
    bare = sorted(p for p in _tracked() & set(lines) if len(lines[p]) < 10)
    assert not missing, f"files without a line in the README tree: {missing}"
    assert not gone, f"README tree names files that do not exist: {gone}"
    assert not bare, f"README tree lines that say nothing: {bare}"


def test_the_step_by_hand_runs_as_printed(capsys) -> None:
    text = (ROOT / "README.md").read_text()
    code = text.split("## The step by hand")[1].split("```python")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert len(capsys.readouterr().out.split()) == 5
