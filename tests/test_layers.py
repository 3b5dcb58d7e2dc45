"""The import rules: which package may import which, and which never load jax."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jserve"
PACKAGING = PACKAGE / "native/packaging"
"""Run by pip before jserve is installed, with hatchling at hand and nothing else."""
UNPICKLES = PACKAGE / "runner/program_files.py"
"""What it reads only this user, or root, can have written (tests/runner/test_program_files.py)."""

ON_RAY = PACKAGE / "fleet/on_ray.py"
"""Needs an extra, which the development environment lacks."""

LEAVES = {
    "types",
    "request_options",
    "sampling",
    "ports",
    "config",
    "option_names",
    "options",
    "errors",
    "faults",
    "window",
    "kv_layout",
    "sharding",
    "cores",
    "working",
    "addresses",
    "heap",
    "model.arch",
}
# Package -> packages it may import, besides the leaves and itself. `build` wires everything together.
# The packages of `speculation` count one by one: two are policy of the host, two run on the device.
ALLOWED: dict[str, set[str]] = {
    "sampling": set(),
    "request_options": set(),
    "types": {"kv"},
    "ports": set(),
    "config": set(),
    "option_names": set(),
    "options": set(),
    "errors": set(),
    "faults": set(),
    "window": set(),
    "kv_layout": set(),
    "sharding": set(),
    "cores": set(),
    "working": set(),
    "addresses": set(),
    "heap": set(),
    "model.arch": set(),
    "testing": {"kv", "sched"},
    "kv": set(),
    "timing": set(),
    "fleet": {"kv", "sched", "engine"},
    "speculation": set(),
    "speculation.host": set(),
    "speculation.policy": {"kv", "timing"},
    "sched": {"kv", "timing", "speculation.policy"},
    "sim": {"engine", "sched", "kv", "fleet", "speculation.policy", "shapes"},
    "shapes": set(),
    "xla": set(),
    "grammar": set(),
    "gguf": set(),
    "text": {"grammar", "gguf"},
    "engine": {"sched", "kv"},
    "api": {"text", "engine", "grammar"},
    "native": set(),
    "model": {"pallas_kernels", "native"},
    "weights": {"model", "gguf"},
    "speculation.drafters": {"model", "weights"},
    "speculation.device": {"model", "speculation.drafters"},
    "model.step": {"model", "speculation.device", "speculation.drafters"},
    "runner": {
        "model",
        "model.step",
        "weights",
        "speculation.drafters",
        "speculation.policy",
        "xla",
    },
    "sizing": {
        "gguf",
        "model",
        "model.step",
        "weights",
        "runner",
        "sim",
        "speculation.host",
        "speculation.policy",
        "speculation.drafters",
        "shapes",
        "pallas_kernels",
    },
    "quality": {"build", "feed", "model", "outputs", "prompts", "text", "weights"},
    "progress": set(),
    "plugins": set(),
    "serve_commands": {"build", "progress", "api", "engine", "quality"},
    "commands": {"build", "plugins", "progress", "weights", "sim", "sizing", "native"},
    "quant_commands": {"build", "progress", "quality", "weights"},
    "shard_commands": {"build", "shard_live", "progress", "sim", "sizing", "xla"},
    "shard_live": {"build", "serve_commands", "progress", "sim", "sizing", "xla"},
    "replay_commands": {"build", "plugins", "progress", "sched", "model.step"},
    "outputs": {"text"},
    "feed": {"engine"},
    "prompts": {"outputs", "text"},
    "operations": {"engine"},
    "functional": {"model", "weights"},
    "llm": {"build", "prompts", "outputs", "operations", "progress", "feed", "engine", "text"},
    "foreign": set(),
    "cli_options": {"foreign"},
    "cli": {
        "cli_options",
        "build",
        "serve_commands",
        "commands",
        "quant_commands",
        "shard_commands",
        "replay_commands",
        "fleet",
        "llm",
        "engine",
        "quality",
        "weights",
    },
    "build_runner": {
        "model",
        "runner",
        "weights",
        "speculation.drafters",
        "speculation.host",
        "pallas_kernels",
    },
    "build": set(),
    "__init__": set(),
}
ANYTHING = {"build", "__init__"}
STEP = ("model/step.py", "model/hand.py", "model/features/")
"""Files of `model` above the rest: a step calls drafters, which call layers."""
HOST = [
    *sorted(LEAVES),
    "api",
    "text",
    "engine",
    "sched",
    "kv",
    "timing",
    "fleet",
    "sim",
    "shapes",
    "xla",
    "native",
    "gguf",
    "speculation.host",
    "speculation.policy",
    "grammar",
    "testing",
    "outputs",
    "prompts",
    "operations",
    "feed",
    "foreign",
]


def _modules() -> list[Path]:
    """Those that are installed."""
    return sorted(path for path in PACKAGE.rglob("*.py") if PACKAGING not in path.parents)


def _package(path: Path) -> str:
    """The name that ``ALLOWED`` has for the package of a file."""
    relative = path.relative_to(PACKAGE)
    if relative.as_posix().startswith(STEP):
        return "model.step"
    if relative.as_posix() == "model/arch.py":  # dimensions as values, which host packages may read
        return "model.arch"
    parts = relative.with_suffix("").parts
    return ".".join(parts[:2]) if parts[0] == "speculation" and len(parts) > 2 else parts[0]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _target(name: str) -> str | None:
    """The package of an imported module, or of a name in one; None where it is not ours."""
    parts = name.split(".")
    if parts[0] in {"pallas_kernels", "checkpoints"}:
        return parts[0]
    if parts[0] != "jserve" or len(parts) == 1:
        return None
    for end in range(len(parts), 1, -1):
        path = PACKAGE.joinpath(*parts[1:end])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return _package(file)
    return None


@cache
def _imports(path: Path, *, typing_only: bool) -> set[str]:
    """Dotted names imported anywhere in the file, without those under ``if TYPE_CHECKING``."""
    tree = _tree(path)
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
        names = _imports(path, typing_only=typing_only)
        edges[_package(path)] |= {found for name in names if (found := _target(name)) is not None}
    return {package: targets - {package} for package, targets in edges.items()}


def test_every_package_has_a_rule() -> None:
    assert {_package(p) for p in _modules()} <= set(ALLOWED)


def test_packages_import_only_what_the_rules_allow() -> None:
    wrong = {
        package: targets - LEAVES - ALLOWED[package]
        for package, targets in _edges().items()
        if package not in ANYTHING and targets - LEAVES - ALLOWED[package]
    }
    assert not wrong, f"edges against the import rules: {wrong}"


def test_no_class_name_exists_twice() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in _modules():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path.relative_to(PACKAGE).as_posix())
    twice = {name: files for name, files in homes.items() if len(files) > 1}
    assert not twice, f"one name for several classes: {twice}"


def test_what_runs_a_plan_never_sees_a_sequence() -> None:
    """A plan is self-contained: runners, real and made up, know nothing that the scheduler changes."""
    others = ("testing/runner.py", "testing/plans.py", "sim/device.py", "sim/measure.py")
    for path in (*(PACKAGE / "runner").glob("*.py"), *(PACKAGE / name for name in others)):
        assert "jserve.types.Sequence" not in _imports(path, typing_only=True), path


def test_no_cycles_between_packages() -> None:
    edges = _edges()
    done: set[str] = set()

    def visit(package: str, path: tuple[str, ...]) -> None:
        assert package not in path, f"import cycle: {' -> '.join((*path, package))}"
        if package not in done:
            for target in sorted(edges.get(package, ())):
                visit(target, (*path, package))
            done.add(package)

    for package in sorted(edges):
        visit(package, ())


def test_only_the_commands_that_serve_import_the_http_packages() -> None:
    """Packages that may import anything, and imports for types alone, included."""
    users = {package for package, targets in _edges(typing_only=True).items() if "api" in targets}
    assert users == {"serve_commands"}


def test_the_offline_door_never_loads_the_http_packages() -> None:
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
        if path == UNPICKLES and banned == "pickle":
            continue
        assert banned not in {n.split(".")[0] for n in _imports(path, typing_only=True)}, path


def test_only_the_cli_reads_the_environment() -> None:
    for path in _modules():
        # The last sets what Ray reads.
        if path.name not in ("cli.py", "xla.py", "heap.py", "on_ray.py"):
            source = path.read_text()
            assert "os.environ" not in source, path
            assert "os.getenv" not in source, path
            assert "sys.argv" not in source, path


def test_host_packages_never_load_jax() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in _modules()
        if _package(path) in HOST and path.stem != "__init__" and path != ON_RAY
    ]
    assert {_package(PACKAGE.parent / (n.replace(".", "/") + ".py")) for n in names} == set(HOST)
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
    _check_not_loaded("jserve.cli", "jax", "transformers")


def test_one_file_imports_ray() -> None:
    found = [
        path
        for path in _modules()
        if "ray" in {n.split(".")[0] for n in _imports(path, typing_only=True)}
    ]
    assert found == [ON_RAY]


def test_the_runner_loads_neither_flax_nor_orbax() -> None:
    """They cost a start half a second, and only some sources of weights need them."""
    _check_not_loaded("jserve.runner.runner", "flax", "orbax", "transformers")


def _check_not_loaded(module: str, *others: str) -> None:
    code = f"import {module}, sys; print([m for m in {others!r} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "[]"
