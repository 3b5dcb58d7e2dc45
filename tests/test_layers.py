"""The import rules of the house: who may import whom, and which rooms never see jax."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jserve"

LEAVES = {
    "types",
    "request_options",
    "sampling",
    "ports",
    "config",
    "options",
    "errors",
    "faults",
    "window",
    "cores",
    "working",
}
# Room -> rooms it may import, besides the leaves and itself. `build` wires everything together.
ALLOWED: dict[str, set[str]] = {
    "sampling": set(),
    "request_options": set(),
    "types": {"kv"},
    "ports": set(),
    "config": set(),
    "options": set(),
    "errors": set(),
    "faults": set(),
    "window": set(),
    "cores": set(),
    "working": set(),
    "testing": {"kv", "sched"},
    "kv": set(),
    "sched": {"kv", "spec"},
    "sim": {"engine", "sched", "kv", "spec", "shapes"},
    "shapes": set(),
    "xla": set(),
    "sizing": {"model", "weights", "runner", "sim", "spec", "shapes", "pallas_kernels"},
    "spec": set(),
    "grammar": set(),
    "text": {"grammar"},
    "engine": {"sched", "kv"},
    "api": {"text", "engine", "grammar"},
    "model": {"pallas_kernels"},
    "weights": {"model"},
    "runner": {"model", "weights", "spec", "xla"},
    "progress": set(),
    "commands": {"build", "progress", "api", "engine", "weights", "sim", "sizing"},
    "outputs": {"text"},
    "feed": {"engine"},
    "prompts": {"outputs", "text"},
    "llm": {"build", "prompts", "outputs", "progress", "feed", "engine", "text"},
    "foreign": set(),
    "cli_options": {"foreign"},
    "cli": {"cli_options", "build", "commands", "llm", "engine"},
    "build": set(),
    "__init__": set(),
}
ANYTHING = {"build", "__init__"}
HOST = [
    *sorted(LEAVES),
    "api",
    "text",
    "engine",
    "sched",
    "kv",
    "sim",
    "shapes",
    "xla",
    "spec",
    "grammar",
    "testing",
    "outputs",
    "prompts",
    "feed",
    "foreign",
]


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path, *, typing_only: bool) -> set[str]:
    """Dotted names imported anywhere in the file, without those under ``if TYPE_CHECKING``."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not typing_only:
            skipped.update(ast.walk(node))
    names = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{a.name}" for a in node.names)
    return names


def _edges(*, typing_only: bool = False) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = defaultdict(set)
    for path in _modules():
        for name in _imports(path, typing_only=typing_only):
            parts = name.split(".")
            if parts[0] == "jserve" and len(parts) > 1:
                edges[_room(path)].add(parts[1])
            elif parts[0] in {"pallas_kernels", "checkpoints"}:
                edges[_room(path)].add(parts[0])
    rooms = {_room(p) for p in _modules()} | {"pallas_kernels", "checkpoints"}
    return {
        room: {t for t in targets if t in rooms and t != room} for room, targets in edges.items()
    }


def test_every_room_has_a_rule() -> None:
    assert {_room(p) for p in _modules()} <= set(ALLOWED)


def test_rooms_import_only_what_the_rules_allow() -> None:
    wrong = {
        room: targets - LEAVES - ALLOWED[room]
        for room, targets in _edges().items()
        if room not in ANYTHING and targets - LEAVES - ALLOWED[room]
    }
    assert not wrong, f"edges against the import rules: {wrong}"


def test_what_runs_a_plan_never_sees_a_sequence() -> None:
    """A plan is self-contained: runners, real and made up, know nothing that the scheduler changes."""
    others = ("testing/runner.py", "testing/plans.py", "sim/device.py", "sim/measure.py")
    for path in (*(PACKAGE / "runner").glob("*.py"), *(PACKAGE / name for name in others)):
        assert "jserve.types.Sequence" not in _imports(path, typing_only=True), path


def test_no_cycles_between_rooms() -> None:
    edges = _edges()
    done: set[str] = set()

    def visit(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, f"import cycle: {' -> '.join((*path, room))}"
        if room not in done:
            for target in sorted(edges.get(room, ())):
                visit(target, (*path, room))
            done.add(room)

    for room in sorted(edges):
        visit(room, ())


def test_only_the_commands_that_serve_import_the_http_room() -> None:
    """Rooms that may import anything, and imports for types alone, included."""
    users = {room for room, targets in _edges(typing_only=True).items() if "api" in targets}
    assert users == {"commands"}


def test_the_offline_door_never_loads_the_http_room() -> None:
    code = (
        "import sys, jserve.llm, jserve.build as b; b.text_side(b.EngineConfig())\n"
        "print([m for m in sys.modules if m == 'aiohttp' or m.startswith('jserve.api')])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("tree", ["pallas_kernels", "checkpoints"])
def test_standalone_trees_do_not_import_jserve(tree: str) -> None:
    for path in (ROOT / tree).rglob("*.py"):
        roots = {name.split(".")[0] for name in _imports(path, typing_only=True)}
        assert "jserve" not in roots, f"{path} imports jserve"


@pytest.mark.parametrize("banned", ["pickle", "cloudpickle", "torch"])
def test_banned_imports(banned: str) -> None:
    trees = [PACKAGE, ROOT / "pallas_kernels", ROOT / "checkpoints"]
    for path in (p for tree in trees for p in tree.rglob("*.py")):
        assert banned not in {n.split(".")[0] for n in _imports(path, typing_only=True)}, path


def test_only_the_cli_reads_the_environment() -> None:
    for path in _modules():
        if path.name not in ("cli.py", "xla.py"):
            source = path.read_text()
            assert "os.environ" not in source, path
            assert "os.getenv" not in source, path
            assert "sys.argv" not in source, path


def test_host_packages_never_load_jax() -> None:
    names = [
        f"jserve.{room}"
        for room in HOST
        if (PACKAGE / room).exists() or (PACKAGE / f"{room}.py").exists()
    ]
    for room in HOST:
        if (PACKAGE / room).is_dir():
            names += [
                ".".join(p.relative_to(ROOT).with_suffix("").parts)
                for p in (PACKAGE / room).rglob("*.py")
                if p.stem != "__init__"
            ]
    code = (
        f"import importlib, sys\nfor n in {names!r}: importlib.import_module(n)\n"
        "print([m for m in ('jax', 'jaxlib', 'flax', 'torch', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "[]"


def test_the_cli_loads_neither_jax_nor_transformers() -> None:
    code = "import jserve.cli, sys; print([m for m in ('jax', 'transformers') if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "[]"
