"""Faults planted in the kernels' sources turn the tests of those kernels red."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from jserve.native.compile import FOLDER, SOURCES
from jserve.native.library import LEVELS, LEVELS_OF, Library
from tests.native import emulated
from tests.native.conftest import built

ROOT = FOLDER.parent.parent
RUN = """
import sys
from pathlib import Path
import jserve.native.compile as build
from jserve.native import library
build.FOLDER = Path(sys.argv[1])
library._checked = lambda found, handle: found
import pytest
sys.exit(pytest.main(["-n0", "-x", "-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""
"""The tests of a copy of the sources, whose library lies beside them. It is trusted without a look, so that the tests
have to notice."""
HANGS_S = 120
"""Of one test: what takes longer counts as a hang."""


class Plant(NamedTuple):
    """``was`` becomes ``now`` in a source; the test file ``tests`` notices it."""

    was: str
    now: str
    tests: str
    only: str = ""
    """The level whose code has it, so that tests of other levels do not count, or names of tests, as of option -k;
    empty: all tests of the file, of code that the levels share."""
    source: str = "kernels.c"
    ends: str = "FAILURES"
    """What the output of the tests has."""
    slow: bool = False
    """Slow tests notice it."""


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
        "avx2",
    ),
    "the tail of K of many rows": Plant(
        "NAME##_tail(w0 + k, K - k)", "NAME##_tail(w0 + k, K - k - 1)", "test_products.py", "avx2"
    ),
    "the last of four rows": Plant(
        "j < min64(4, p->L - i); j++) at(",
        "j < min64(3, p->L - i); j++) at(",
        "test_products.py",
        "avx2",
    ),
    "a dead row among live ones": Plant(
        "? --dead : live++] = (int32_t)m;", "? live++ : live++] = (int32_t)m;", "test_products.py"
    ),
    "the last column of gate and up": Plant(
        "up + i * n, at(t, first + i), n)",
        "up + i * n, at(t, first + i), n - 1)",
        "test_products.py",
    ),
    "an expert's last row": Plant("p[n].L = L;", "p[n].L = max64(1, L - 1);", "test_experts.py"),
    "the rows of another expert": Plant(
        "rows_of_y[n++] = to + begin;", "rows_of_y[n++] = to;", "test_experts.py"
    ),
    "the page after a border": Plant(
        "(i64)pages[pos / a->Z] * a->K",
        "(i64)pages[max64(pos - 16, 0) / a->Z] * a->K",
        "test_native_attention.py",
    ),
    "a row that sees one position too many": Plant(
        "const int32_t count = a->count[r], first = a->first[r];",
        "const int32_t count = a->count[r] - 1, first = a->first[r];",
        "test_native_attention.py",
    ),
    "writes to the page of nobody": Plant(
        "if (w->page[t] <= 0 ||", "if (w->page[t] < 0 ||", "test_native_attention.py"
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
        "avx2",
        "grouped.h",
    ),
    "the scale of the other half of a block": Plant(
        "_mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0)",
        "_mm256_set_epi32(0, 0, 0, 0, 1, 1, 1, 1)",
        "test_quantised.py",
        "avx2",
        "grouped.h",
    ),
    "the last weight row of a tile": Plant(
        "r < rows ? _mm512_maskz_loadu_epi8",
        "r + 1 < rows ? _mm512_maskz_loadu_epi8",
        "test_products.py",
        "amx",
        "amx.h",
    ),
    "the tail of K by tiles": Plant(
        "n_tiles = (n_bytes + TILE_BYTES - 1) / TILE_BYTES",
        "n_tiles = max64(n_bytes / TILE_BYTES, 1)",
        "test_products.py",
        "amx",
        "amx.h",
    ),
    "sums of an earlier part of K": Plant(
        "next, k0 == 0, 1, int8);", "next, 1, 1, int8);", "test_products.py", "amx", "amx.h"
    ),
    "the scale of another row of x": Plant(
        "scales[j] = p->rounded[i + j].scale;\n  const __m512 of_x",
        "scales[j] = p->rounded[i].scale;\n  const __m512 of_x",
        "test_quantised.py",
        "amx",
        "amx.h",
    ),
    "rows of x beyond those of the first tiles": Plant(
        "if (two) _tile_stored(7, sums[1][1], 64);",
        "if (two) _tile_stored(5, sums[1][1], 64);",
        "test_products.py",
        "amx",
        "amx.h",
    ),
    "the second block of keys": Plant(
        "_tile_loadd(1, k[1] + h, ld);",
        "_tile_loadd(1, k[0] + h, ld);",
        "test_native_attention.py",
        "amx",
        "amx_attention.h",
    ),
    "values of the other rows of a pair": Plant(
        "_mm512_or_si512(one, _mm512_slli_epi32(two, 16))",
        "_mm512_or_si512(two, _mm512_slli_epi32(one, 16))",
        "test_native_attention.py",
        "amx",
        "amx_attention.h",
    ),
    "a head's sums beyond half of them": Plant(
        "if (!half) _tile_stored(7, s->o[0] + h + 48, ld_o);",
        "",
        "test_native_attention.py",
        "amx",
        "amx_attention.h",
    ),
    "the scales of the first expert": Plant(
        "  part.scale += n * p->groups;", "", "test_quantised_experts.py"
    ),
    "the tail of K, one row, streams of eight weight rows": Plant(
        "#define LAST(i) s##i = dp(s##i, v, weights_n(w##i, k, K - k, kind));",
        "#define LAST(i) s##i = dp(s##i, v, weights_n(w##i, k, K - k - 1, kind));",
        "test_products.py",
        "avx512_bf16",
    ),
    "the tail of K, one row, weight rows in one stream": Plant(
        "load_n(w + k, K - k));\n  return",
        "load_n(w + k, K - k - 1));\n  return",
        "test_products.py",
        "avx512_bf16",
    ),
    "the tail of K, four rows by four": Plant(
        "#define PART(row) weights_n(row, k, K - k, kind)",
        "#define PART(row) weights_n(row, k, K - k - 1, kind)",
        "test_products.py",
        "avx512_bf16",
    ),
    "the last of an odd K in lanes": Plant(
        "  v = _mm512_set1_epi32(w##r[k]);",
        "  v = _mm512_setzero_si512();",
        "test_products.py",
        "avx512_bf16",
    ),
    "the last row of the second sixteen lanes": Plant(
        "put(s, t, i + 16, min64(16, p->L - i - 16),",
        "put(s, t, i + 16, min64(15, p->L - i - 16),",
        "test_products.py",
        "avx512_bf16",
    ),
    "rounded x, one row: the tail of K": Plant(
        "first_bytes(K - k), w##i + k)), v);",
        "first_bytes(K - k - 1), w##i + k)), v);",
        "test_quantised.py",
        "avx512_bf16",
        "quantised.h",
    ),
    "rounded x, four rows: the sum of another row": Plant(
        "128 * p->rounded[i + j].sum);",
        "128 * p->rounded[i].sum);",
        "test_quantised.py",
        "avx512_bf16",
        "quantised.h",
    ),
    "rounded x in lanes: the tail of K": Plant(
        "four_bytes(w##r + k, K - k);",
        "four_bytes(w##r + k, K - k - 1);",
        "test_quantised.py",
        "avx512_bf16",
        "quantised.h",
    ),
    "four bits, one row: the end of K": Plant(
        "t = dp_block(t, four_bit_numbers(w##i + k / 2, K - k, table), v);",
        "t = dp_block(t, four_bit_numbers(w##i + k / 2, K - k - 32, table), v);",
        "test_quantised.py",
        "avx512_bf16",
        "quantised.h",
    ),
    "four bits, four rows: sums in another order": Plant(
        "at(t, i + j)[n - n0 + c] = y[4 * c + j];",
        "at(t, i + j)[n - n0 + c] = y[4 * j + c];",
        "test_quantised.py",
        "avx512_bf16",
        "quantised.h",
    ),
    "one token: what lies before the window": Plant(
        "(0xffffu >> (BLOCK - high)) & (0xffffu << low);\n      if",
        "(0xffffu >> (BLOCK - high));\n      if",
        "test_native_attention.py",
        "avx512_bf16",
    ),
    "one token: the weights so far under a new top": Plant(
        "    s->total[g] *= _mm512_cvtss_f32(keep);\n",
        "",
        "test_native_attention.py",
        "avx512_bf16",
    ),
    "one token: what rounding leaves of a weight": Plant(
        "lo[j] = dp(dp(lo[j], w, both.lo), rest, both.lo);",
        "lo[j] = dp(lo[j], w, both.lo);",
        "test_native_attention.py",
        "avx512_bf16",
    ),
    "a tile: the second half of a block": Plant(
        "tile_scores(s, a->k + here + 8 * H, at + 8, H, two);",
        "tile_scores(s, a->k + here, at + 8, H, two);",
        "test_native_attention.py",
        "avx512_bf16",
    ),
    "a tile: a position beyond the first token": Plant(
        "const int whole = first >= most && first + n <= least;\n    for",
        "const int whole = first >= most && first + n <= least + 1;\n    for",
        "test_native_attention.py",
        "avx512_bf16",
    ),
    "AVX2: what lies before the window": Plant(
        "seen = (pos > s->low[r] - 1) & (pos < s->high[r]);",
        "seen = pos < s->high[r];",
        "test_native_attention.py",
        "avx2",
    ),
    "AVX2: the second row's queries": Plant(
        "*t = s->q[two ? r + 1 : r];\n  for (i64 i = 0; i < n; i += 4)",
        "*t = s->q[r];\n  for (i64 i = 0; i < n; i += 4)",
        "test_native_attention.py",
        "avx2",
    ),
    "the last 32 values of a head of 96": Plant(
        "    if (h < H) amx_token_values(",
        "    if (h + 32 < H) amx_token_values(",
        "test_native_attention.py",
        "amx",
        "amx_attention.h",
    ),
    "gate and up by tiles: silu of the last weight row": Plant(
        "if (gated)\n          avx512f_silu(s[0][b][0], s[1][b][0], s[0][b][0], TILE_ROWS * 16);",
        "if (gated)\n          avx512f_silu(s[0][b][0], s[1][b][0], s[0][b][0], TILE_ROWS * 15);",
        "test_products.py",
        "amx",
        "amx.h",
    ),
    "NEON: four bits, the other half of a byte": Plant(
        "k & 16 ? vshrq_n_u8(both, 4)",
        "k & 32 ? vshrq_n_u8(both, 4)",
        "test_quantised.py",
        "neon",
        "neon.h",
    ),
    "NEON: rounding of what is halfway": Plant(
        "vaddq_u32(odd, vdupq_n_u32(0x7fff))",
        "vdupq_n_u32(0x8000)",
        "test_native_attention.py",
        "neon",
        "neon.h",
    ),
    "NEON: rounded x, the upper eight bytes": Plant(
        "return vpadalq_s16(sum, vmull_high_s8(a, b));",
        "return vpadalq_s16(sum, vmull_s8(vget_low_s8(a), vget_low_s8(b)));",
        "test_quantised.py",
        "neon",
        "neon.h",
    ),
    "BFDOT: the tail of K of one row": Plant(
        "bytes16(x + k, 16), bytes16(w + k, n - k));",
        "bytes16(x + k, 16), bytes16(w + k, n - k - 2));",
        "test_products.py",
        "neon_bf16",
        "neon.h",
    ),
    "BFDOT: the fourth row of x": Plant(
        "u = bytes16(x + 3 * width + k, 16);",
        "u = bytes16(x + 2 * width + k, 16);",
        "test_products.py",
        "neon_bf16",
        "neon.h",
    ),
    "another major version of the interface": Plant(
        "api->version.major == FFI_MAJOR &&", "1 &&", "test_ffi_abi.py", "refuses"
    ),
    "a caller that waits for helpers that have not begun": Plant(
        "  claim_chunks(job);\n  await(job",
        "  claim_chunks(job);\n  while (atomic_load(&job->seats) <= helpers) sched_yield();\n  await(job",
        "test_steps.py",
        "threads_as_devices",
        ends="Timeout",
        slow=True,
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_noticed(name: str, kernels: Library, tmp_path: Path) -> None:
    plant = PLANTS[name]
    in_emulator = plant.only in LEVELS_OF["aarch64"] and plant.only not in LEVELS
    if in_emulator and emulated.missing():
        pytest.skip(emulated.missing())
    if plant.only in LEVELS and plant.only not in kernels.levels():
        pytest.skip(f"this processor has no {plant.only}")
    for source in SOURCES:
        shutil.copy(FOLDER / source, tmp_path)
    at = tmp_path / plant.source
    text = at.read_text()
    assert text.count(plant.was) == 1
    at.write_text(text.replace(plant.was, plant.now))
    command = [sys.executable, "-c", RUN, str(tmp_path), f"tests/native/{plant.tests}"]
    if in_emulator:
        command += ["-p", "tests.native.emulated"]
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jserve.native.compile.FOLDER", tmp_path)
            built(tmp_path, "-O1")  # compiles in two thirds of the time
    command += ["-m", "slow"] if plant.slow else []
    command += ["-k", plant.only, f"--timeout={HANGS_S}", "--timeout-method=thread"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert plant.ends in done.stdout + done.stderr
