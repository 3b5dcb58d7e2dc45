"""The parts that an instruction of a step counts to."""

from __future__ import annotations

import pytest

from bench.step_parts import NAMED, part_of


@pytest.mark.parametrize(
    ("op", "target", "part"),
    [
        ("jit(step_D2)/layer0/jserve_product", "jserve.product.v1", "products"),
        ("jit(step_D2)/layer0/dot_general", "", "products"),
        ("jit(step_D2)/layer3/attend", "jserve.attention.v2", "attention"),
        ("jit(step_D2)/layer3/write", "jserve.write_kv.v1", "kv"),
        ("jit(step_D2)/logits/dot_general", "jserve.product.v1", "head"),
        ("jit(step_D2)/sample/while", "", "sampling"),
        ("jit(step_D2)/layer3/mul", "", "rest"),
    ],
)
def test_an_instruction_counts_to_one_part(op: str, target: str, part: str) -> None:
    assert part_of(op, target) == part


def test_names_are_read_from_compiled_text() -> None:
    text = (
        '  ROOT %dot.3 = f32[2]{0} dot(%a), metadata={op_type="dot" op_name="jit(s)/logits/dot"}\n'
    )
    assert NAMED.findall(text) == [("dot.3", "jit(s)/logits/dot")]
