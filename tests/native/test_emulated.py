"""The kernels of 64-bit Arm, in an emulator, by the tests of the kernels of this machine (``emulated.py``)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jserve.native import compile as build
from tests.native import emulated, test_ffi_abi

ROOT = build.FOLDER.parent.parent
GCC = "aarch64-linux-gnu-gcc"
TIMEOUT_S = 1800
"""Of a file of tests, which takes one to five minutes where nothing else runs."""
FILES = {
    "test_products.py": 100,
    "test_quantised.py": 200,
    "test_native_attention.py": 80,
    "test_experts.py": 4,
    "test_quantised_experts.py": 10,
}
"""Files of tests, and how many there are in each at least."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]


@pytest.fixture(scope="module", params=["zig", "gcc"])
def program(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """``emulated.c`` by each compiler; skips where there is none, or no emulator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JSERVE_CC_AARCH64", raising=False)
        if request.param == "gcc":
            if not shutil.which(GCC):
                pytest.skip(f"there is no {GCC}")
            patch.setenv("JSERVE_CC_AARCH64", GCC)
        if emulated.missing():
            pytest.skip(emulated.missing())
        yield emulated.built(tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    ("processor", "level"),
    [("cortex-a57", "neon"), ("neoverse-n1", "neon"), ("max", "neon_bf16")],
    ids=["Armv8.0", "dot products of int8 alone", "all that qemu knows"],
)
def test_the_level_is_that_of_the_processor_and_all_up_to_it_pass_their_self_check(
    program: Path, processor: str, level: str
) -> None:
    made = emulated.Emulated(program, processor)
    made.end()
    assert made.level == level
    assert made.checked == (1,) * (emulated.LEVELS.index(level) + 1)


def test_structures_of_the_interface_are_laid_out_as_xlas(program: Path) -> None:
    source = program.parent / "abi.c"
    source.write_text(test_ffi_abi.assertions(test_ffi_abi.STRUCTS))
    command = [*emulated.compiler(), "-std=gnu11", f"-I{build.FOLDER}"]
    command += [f"-I{test_ffi_abi.INCLUDE}", "-c", "-o", f"{source}.o", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", FILES)
def test_the_tests_of_kernels_pass(program: Path, file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-n0", "-m", "", f"--timeout={TIMEOUT_S}"]
    command += ["-p", "tests.native.emulated", "-p", "no:cacheprovider", f"tests/native/{file}"]
    command += ["-k", "not chosen"]  # these look at programs, not at results
    with_program = os.environ | {"JSERVE_EMULATED": str(program)}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=with_program,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-4000:]
    assert int(passed[1]) >= FILES[file]


FAULTS = {
    "the second four sums": (
        "neon.h",
        "a = ADD((a + b) + (c + d), a);",
        "a = ADD((a + c) + (c + d), a);",
    ),
    "attention": (
        "kernels.c",
        "by = 1.0f / s->total[r] + s->odd[r];",
        "by = 1.1f / s->total[r] + s->odd[r];",
    ),
    "four bits": ("neon.h", "k & 16 ? vshrq_n_u8(both, 4)", "k & 32 ? vshrq_n_u8(both, 4)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_self_check_notices_a_fault(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if emulated.missing():
        pytest.skip(emulated.missing())
    for name in build.SOURCES:
        shutil.copy(build.FOLDER / name, tmp_path)
    source, was, now = FAULTS[fault]
    text = (tmp_path / source).read_text()
    assert text.count(was) == 1
    (tmp_path / source).write_text(text.replace(was, now))
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    made = emulated.Emulated(emulated.built(tmp_path))
    made.end()
    assert made.checked[0] == 1
    assert 0 in made.checked[1:]
