"""The table of formats in docs/quantisation.md: what it says is read, and what becomes of activations, row by row.

That a checkpoint is read, and its activations rounded so, is shown by ``test_weights_quant.py``, its logits and
``test_weights_gguf.py``, which go through all of ``FORMATS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jserve.model.quant import Form
from jserve.weights.quant.gguf import FORMS as GGUF
from tests.weights.quant_files import Format
from tests.weights.test_weights_quant import FORMATS

PAGE = Path(__file__).parents[2] / "docs/quantisation.md"
Claim = Callable[[Format], bool]


def weights(fmt: Format) -> dict:
    """Of the first group of compressed-tensors."""
    return fmt.config.get("config_groups", {"group_0": {}})["group_0"].get("weights", {})


def given(**wanted: object) -> Claim:
    """True of a format whose config, or whose weights of compressed-tensors, has these values."""
    return lambda fmt: all((fmt.config | weights(fmt)).get(k) == x for k, x in wanted.items())


def bits(*wanted: int) -> tuple[Claim, ...]:
    return tuple(lambda fmt, n=n: of_bits(fmt) == n for n in wanted)


def of_bits(fmt: Format) -> int:
    return weights(fmt).get("num_bits") or fmt.config.get("bits") or 0


def blocks(fmt: Format) -> bool:
    return bool(fmt.config.get("weight_block_size")) or weights(fmt).get("strategy") == "block"


def has(part: str) -> Claim:
    """True of a format whose name in ``FORMATS`` has this part."""
    return lambda fmt: any(part in name for name, x in FORMATS.items() if x is fmt)


TENSOR, ROWS = given(strategy="tensor"), given(strategy="channel")
CLAIMS: dict[str, tuple[Claim, ...]] = {
    "2, 3 and 4 bits, loose and dense words": (*bits(2, 3, 4), has("dense")),
    "5 to 8 bits": bits(5, 6, 7, 8),
    "zeros; `actorder` group": (given(symmetric=False), given(actorder="group")),
    "a matrix, rows, zeros": (TENSOR, ROWS, given(symmetric=False)),
    "static": (TENSOR,),
    "a matrix, rows, blocks": (TENSOR, ROWS, blocks),
    "rows": (lambda fmt: ROWS(fmt) or fmt.config["quant_method"] == "fbgemm_fp8",),
    "groups of 16 in e4m3, and a scale of all": (given(group_size=16),),
    "groups of 32": (given(group_size=32),),
    "a matrix; blocks of any size, cut ones at the edges; powers of two (`ue8m0`)": (
        lambda fmt: not blocks(fmt),
        blocks,
        given(weight_block_size=[40, 40]),
        given(scale_fmt="ue8m0"),
    ),
    "`activation_scheme` static": (given(activation_scheme="static"),),
    "a matrix": (given(quant_algo="FP8"),),
    "groups of 16 and a scale of all": (given(quant_algo="NVFP4"),),
    "`gemm`": (given(version="gemm", zero_point=True),),
    "without zeros": (given(zero_point=False),),
    "versions 1 and 2, 2, 3 and 4 bits; `dynamic` rules": (
        *bits(2, 3, 4),
        given(checkpoint_format="gptq"),
        given(checkpoint_format="gptq_v2"),
    ),
    "8 bits": bits(8),
    "`desc_act` with groups": (given(desc_act=True),),
    "GPTQ packing with `extra_config` by module": (given(packing_format="auto_round:auto_gptq"),),
    "AWQ packing": (given(packing_format="auto_round:auto_awq"),),
    "`auto_round:fp8`": (given(packing_format="auto_round:fp8"),),
    "`auto_round:llm_compressor` as compressed-tensors": (
        given(packing_format="auto_round:llm_compressor"),
    ),
    "NF4, FP4, with scales that are quantised, too": (
        given(bnb_4bit_quant_type="nf4"),
        given(bnb_4bit_quant_type="fp4"),
        has("nested"),
    ),
    "int8": (given(load_in_8bit=True),),
}
"""What a row says is read -> what of ``FORMATS`` shows it; each needs one of those with the forms of that row."""
ELSEWHERE = ("mxfp4", "GGUF")
"""The experts of GPT-OSS, and files of their own."""


def rows() -> Iterator[tuple[str, str, list[str], str]]:
    """(format, what is read, forms, activations)."""
    name = ""
    lines = [line for line in PAGE.read_text().splitlines() if line.count("|") == 5]
    for first, read, forms, activations in (line.split("|")[1:-1] for line in lines[2:]):
        name = (re.findall("`(.+?)`", first) or [first.strip() or name])[-1]
        yield name, read.strip(), re.findall("`(.+?)`", forms), activations.strip()


def method(fmt: Format) -> str:
    """The name that the table has for a format."""
    keys = ("format", "quant_algo", "quant_method")
    key = next(key for key in keys if key in fmt.config)
    return "auto-round" if "packing_format" in fmt.config else fmt.config[key]


def plain(form: str) -> str:
    return re.sub(r" g\d+", "", form)


def shown(name: str, read: str, forms: list[str]) -> list[Format]:
    """Those of ``FORMATS`` that a row is about."""
    wanted = [
        x for x in FORMATS.values() if method(x) == name and (plain(x.form) in forms or not forms)
    ]
    return [x for x in wanted if any(claim(x) for claim in CLAIMS[read])]


ROWS_OF = [row for row in rows() if row[0] not in ELSEWHERE]
IDS = {"ids": lambda row: f"{row[0]}, {row[1]}"}


@pytest.mark.parametrize("row", ROWS_OF, **IDS)
def test_each_thing_that_is_read_is_read_by_a_test(row: tuple[str, str, list[str], str]) -> None:
    name, read, forms, _ = row
    found = shown(name, read, forms)
    unshown = [i for i, claim in enumerate(CLAIMS[read]) if not any(map(claim, found))]
    assert not unshown, f"{name}: no test reads part {unshown} of {read!r}"
    assert {plain(x.form) for x in found} >= set(forms)


def test_all_formats_of_the_tests_are_in_it() -> None:
    told = [x for name, read, forms, _ in ROWS_OF for x in shown(name, read, forms)]
    missing = [name for name, x in FORMATS.items() if not any(x is y for y in told)]
    assert not missing


def said_of(forms: set[str]) -> str:
    """What becomes of activations in these forms; a group of them may have scales of their own."""
    found, names = [], {plain(form) for form in forms}
    for kind in ("int8", "e4m3"):
        grouped = {" g" in form for form in forms if form.startswith(kind) and "rounded" in form}
        if grouped:
            both = " and group" if grouped == {True} else ", with blocks and group"
            found.append(f"{kind} per token" + both * (True in grouped))
        if f"{kind} static" in names:
            found.append(f"{kind} by the file's scale")
    if "e4m3 bounded" in names:
        found.append("e4m3 per token, at most `activation_scale_ub`")
    if plains := [n for n in names if n.split()[-1] not in ("rounded", "static", "bounded")]:
        found.append("as they are" + " where none are stated" * (len(plains) < len(names)))
    return "; ".join(found)


@pytest.mark.parametrize("row", ROWS_OF, **IDS)
def test_activations_become_what_it_says(row: tuple[str, str, list[str], str]) -> None:
    name, read, forms, activations = row
    found = said_of({x.form for x in shown(name, read, forms)})
    assert activations == (found if forms else "as there")


def test_the_types_of_gguf_are_those_that_are_read() -> None:
    told = {}
    for name, read, forms, activations in rows():
        if name == "GGUF":
            assert activations == "as they are"
            told |= dict.fromkeys(re.split(", ", read), forms)
    made = {kind: Form(**form) for kind, form in GGUF.items()}
    assert told == {k: [f.kind + " shifts" * f.shifts] for k, f in made.items()}
    assert not any(form.rounded for form in made.values())
