"""``bench.forms``: what it says of layers with quantised weights, compiled for an H200 that is not there."""

from __future__ import annotations

import pytest

from bench import forms
from jserve.model.native import HOPPER
from jserve.model.quant import Form

pytestmark = [pytest.mark.usefixtures("h200"), pytest.mark.slow]
MODEL = "llama-3.2-1b"


def line(name: str, rows: int, level: str = HOPPER) -> dict:
    [found] = forms.lines(MODEL, [name], [rows], level)
    return found


@pytest.mark.parametrize("name", ["int8", "int8-weight-only", "fp8"])
def test_numbers_of_one_scale_a_row_are_read_once(name: str) -> None:
    found = line(name, 16)
    assert found["launches"] == 1
    assert found["weights_mb"] == 0
    assert 1 <= found["moved"] <= 1.06
    rounded = forms.FORMS[name].rounded
    assert (found["more"] <= 8) if rounded else (found["more"] == 0)


def test_the_figures_see_a_matrix_that_is_written_out() -> None:
    """Groups at 64 rows without the kernel: gate and up in bfloat16."""
    found = line("int4 g128", 64, "")
    assert not found["met"]
    assert found["path"] == "xla-widened"
    assert found["weights_mb"] >= 2 * 8192 * 2048 * 2 / 1e6
    assert forms.shown(found).count("!") == 1


@pytest.mark.parametrize("name", ["int4 g128", "uint4 shifts g32", "fp8 blocks"])
def test_the_kernel_reads_groups_once(name: str) -> None:
    found = line(name, 16)
    assert found["path"] == "quant_matmul"
    assert found["launches"] == 1
    assert found["weights_mb"] == 0
    assert 1 <= found["moved"] <= 1.15


def test_goals_are_those_of_their_forms() -> None:
    group = Form(kind="int4", group=64)
    assert [forms.goal(group, n) for n in (1, 64, 65)] == [1.15, 1.15, 0]
    assert [forms.goal(Form(kind="int8"), n) for n in (1, 256)] == [1.05, 1.05]
