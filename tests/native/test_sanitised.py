"""The kernels under the compiler's sanitisers: no access beyond an array, no undefined operation, no race."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from jserve.native.compile import FOLDER, find_compiler

SOURCE = Path(__file__).parent / "sanitised.c"
TIMEOUT_S = 900
"""Of a compile, which takes two minutes of a core, and of a run."""
OPTIONS = ("-std=gnu11", "-O1", "-g", "-fno-sanitize-recover=all", "-pthread")


def built(folder: Path, sanitiser: str) -> Path:
    """The program of ``sanitised.c``; skips where no compiler has the sanitiser."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    program, checks = folder / "sanitised", f"-fsanitize={sanitiser}"
    empty = folder / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    has_it = [*compiler, checks, "-o", str(program), str(empty)]
    if subprocess.run(has_it, capture_output=True, timeout=60, check=False).returncode:
        pytest.skip(f"the compiler lacks {checks}")
    command = [*compiler, *OPTIONS, checks, f"-I{FOLDER}", "-o", str(program), str(SOURCE), "-lm"]
    subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=True)
    return program


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("sanitiser", ["address,undefined", "thread"])
def test_all_kernels_on_arrays_of_exactly_their_size(tmp_path, sanitiser):
    program = built(tmp_path, sanitiser)
    done = subprocess.run([program], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
