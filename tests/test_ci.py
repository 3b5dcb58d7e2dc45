"""What ``.ci/run`` may cut for lack of time, and what it must run to its end."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINES = [
    line.strip()
    for line in (ROOT / ".ci" / "run").read_text().splitlines()
    if " -m pytest" in line and not line.lstrip().startswith(("#", "step"))
]
WHOLE = [line for line in LINES if not line.startswith("within ")]


def test_what_may_be_cut_comes_after_all_that_may_not() -> None:
    assert LINES[: len(WHOLE)] == WHOLE
    assert len(LINES) > len(WHOLE) > 3


def test_drills_and_compiled_kernels_are_never_cut() -> None:
    assert any("-m ray" in line for line in WHOLE)
    assert any("test_backend.py -k refused" in line for line in WHOLE)
    [kernels] = (line for line in WHOLE if "tests/pallas_kernels/test_{" in line)
    names = re.fullmatch(r".*tests/pallas_kernels/test_\{(.*)\}\.py", kernels)
    assert names is not None
    asked = names[1].split(",")
    assert {"registers", "barriers", "compile*"} <= set(asked)
    folder = ROOT / "tests" / "pallas_kernels"
    assert all(list(folder.glob(f"test_{name}.py")) for name in asked)


def test_what_is_cut_is_either_slow_or_of_the_interpreter() -> None:
    for line in LINES[len(WHOLE) :]:
        assert "slow" in line or "--ignore-glob '*/test_compile*.py'" in line, line


def test_the_slow_tests_of_the_native_kernels_have_time_of_their_own_and_a_compiler_for_other_machines() -> (
    None
):
    slow = [line for line in LINES if '"slow and not ray"' in line]
    assert [line.split("--timeout 0 ")[1] for line in slow] == [
        "tests/native",
        "--ignore tests/native",
    ]
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    [zig] = (n for n, line in enumerate(lines) if line.startswith('pip install -q "ziglang=='))
    assert zig < lines.index(slow[0])


def test_what_may_be_cut_does_not_ask_for_more_time_than_before() -> None:
    most = sum(int(line.split()[1]) for line in LINES[len(WHOLE) :])
    assert most <= 3600
