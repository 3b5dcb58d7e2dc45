"""Faults planted in the kernels' sources turn the tests of those kernels red."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from jserve.native.compile import FOLDER, SOURCES
from jserve.native.library import LEVELS, Library
from tests.native.conftest import built

ROOT = FOLDER.parent.parent
RUN = """
import sys
from pathlib import Path
import jserve.native.compile as build
build.FOLDER = Path(sys.argv[1])
import pytest
sys.exit(pytest.main(["-n0", "-x", "-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""
"""The tests of a copy of the sources, whose library lies beside them."""


class Plant(NamedTuple):
    """``was`` becomes ``now`` in a source; the test file ``tests`` notices it at levels from ``level`` on."""

    was: str
    now: str
    tests: str
    level: int = 0
    source: str = "kernels.c"


PLANTS = {
    "the last row of the last chunk": Plant(
        "  i64 n0 = number * work->rows_per_chunk, n1 = min64(work->N, n0 + work->rows_per_chunk);",
        "  i64 n0 = number * work->rows_per_chunk, n1 = min64(work->N - 1, n0 + work->rows_per_chunk);",
        "test_products.py",
    ),
    "the tail of K of one row": Plant(
        "NAME##_tail(w + k, min64(K - k, 2 * LANES))",
        "NAME##_tail(w + k, min64(K - k - 1, 2 * LANES))",
        "test_products.py",
        1,
    ),
    "the tail of K of many rows": Plant(
        "NAME##_tail(w0 + k, K - k)", "NAME##_tail(w0 + k, K - k - 1)", "test_products.py", 1
    ),
    "the last of four rows": Plant(
        "j < min64(4, p->L - i)", "j < min64(3, p->L - i)", "test_products.py", 1
    ),
    "a dead row among live ones": Plant(
        "? --dead : live++] = (int32_t)m;", "? live++ : live++] = (int32_t)m;", "test_products.py"
    ),
    "the last column of gate and up": Plant(
        "up + i * n, at(t, first + i), n)",
        "up + i * n, at(t, first + i), n - 1)",
        "test_products.py",
    ),
    "an expert's last row": Plant("p[n].L = L;", "p[n].L = max64(1, L - 1);", "test_experts.py", 1),
    "the rows of another expert": Plant(
        "rows_of_y[n++] = to + begin;", "rows_of_y[n++] = to;", "test_experts.py", 1
    ),
    "the page after a border": Plant(
        "(i64)pages[pos / a->Z] * a->K",
        "(i64)pages[max64(pos - 16, 0) / a->Z] * a->K",
        "test_native_attention.py",
        1,
    ),
    "a row that sees one position too many": Plant(
        "const int32_t count = a->count[r], first = a->first[r];",
        "const int32_t count = a->count[r] - 1, first = a->first[r];",
        "test_native_attention.py",
        1,
    ),
    "writes to the page of nobody": Plant(
        "if (w->page[t] <= 0 ||", "if (w->page[t] < 0 ||", "test_native_attention.py", 1
    ),
    "the next group's scale": Plant(
        "1 : p->scale[n * p->groups + g];",
        "1 : p->scale[n * p->groups + (g + 1) % p->groups];",
        "test_quantised.py",
        source="quantised.h",
    ),
    "zeros that are not taken off": Plant(
        "(float)p->zero[n * p->groups + g] : 0;",
        "0.0f : 0;",
        "test_quantised.py",
        source="quantised.h",
    ),
    "the order of four bits": Plant(
        "(k & 16 ? 4 : 0) & 15]",
        "(k & 16 ? 0 : 4) & 15]",
        "test_quantised.py",
        source="quantised.h",
    ),
    "shifts that few rows do not take off": Plant(
        "each = _mm256_maskload_ps(p->shift + n * groups + g, there);",
        "each = _mm256_setzero_ps();",
        "test_quantised.py",
        1,
        "grouped.h",
    ),
    "the scale of the other half of a block": Plant(
        "_mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0)",
        "_mm256_set_epi32(0, 0, 0, 0, 1, 1, 1, 1)",
        "test_quantised.py",
        1,
        "grouped.h",
    ),
    "the last weight row of a tile": Plant(
        "r < rows ? _mm512_maskz_loadu_epi8",
        "r + 1 < rows ? _mm512_maskz_loadu_epi8",
        "test_products.py",
        4,
        "amx.h",
    ),
    "the tail of K by tiles": Plant(
        "n_tiles = (n_bytes + TILE_BYTES - 1) / TILE_BYTES",
        "n_tiles = max64(n_bytes / TILE_BYTES, 1)",
        "test_products.py",
        4,
        "amx.h",
    ),
    "sums of an earlier part of K": Plant(
        "next, k0 == 0, 1, int8);", "next, 1, 1, int8);", "test_products.py", 4, "amx.h"
    ),
    "the scale of another row of x": Plant(
        "scales[j] = p->rounded[i + j].scale;\n  const __m512 of_x",
        "scales[j] = p->rounded[i].scale;\n  const __m512 of_x",
        "test_quantised.py",
        4,
        "amx.h",
    ),
    "rows of x beyond those of the first tiles": Plant(
        "if (two) _tile_stored(7, sums[1][1], 64);",
        "if (two) _tile_stored(5, sums[1][1], 64);",
        "test_products.py",
        4,
        "amx.h",
    ),
    "the second block of keys": Plant(
        "_tile_loadd(1, k[1] + h, ld);",
        "_tile_loadd(1, k[0] + h, ld);",
        "test_native_attention.py",
        4,
        "amx_attention.h",
    ),
    "values of the other rows of a pair": Plant(
        "_mm512_or_si512(one, _mm512_slli_epi32(two, 16))",
        "_mm512_or_si512(two, _mm512_slli_epi32(one, 16))",
        "test_native_attention.py",
        4,
        "amx_attention.h",
    ),
    "a head's sums beyond half of them": Plant(
        "if (!half) _tile_stored(7, s->o[0] + h + 48, ld_o);",
        "",
        "test_native_attention.py",
        4,
        "amx_attention.h",
    ),
    "the scales of the first expert": Plant(
        "  part.scale += n * p->groups;", "", "test_quantised_experts.py", 1
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_noticed(name: str, kernels: Library, tmp_path: Path) -> None:
    plant = PLANTS[name]
    if kernels.handle.jserve_level() < plant.level:
        pytest.skip(f"this processor has no {LEVELS[plant.level]}")
    for source in SOURCES:
        shutil.copy(FOLDER / source, tmp_path)
    at = tmp_path / plant.source
    text = at.read_text()
    assert plant.was in text
    at.write_text(text.replace(plant.was, plant.now))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jserve.native.compile.FOLDER", tmp_path)
        built(tmp_path)
    command = [sys.executable, "-c", RUN, str(tmp_path), f"tests/native/{plant.tests}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert "FAILURES" in done.stdout or "give wrong results" in done.stdout
