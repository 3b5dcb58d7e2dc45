"""Drafts of a chain are an argmax of logits, with noise where a row is random: in the compiled programs."""

from __future__ import annotations

import re

import pytest

from jserve.model.draft_tree import TreeShape
from tests.speculation.device.test_draft_loop import TREE, bucket, drafting

SORTS = re.compile(r" (?:sort|topk)\(|custom_call_target=\"[^\"]*(?:[Tt]op_?[Kk]|[Ss]ort)[^\"]*\"")
NOISE = re.compile(r" (?:xor|log|log-plus-one)\(")
RANDOM = "/cond/branch_1_fun"
"""In the name of all that only steps with a random row run."""


def drawing(kind: str, parents: TreeShape) -> list[str]:
    """The instructions of the draft loop in the compiled step, but for those of the drafter's layers."""
    text = drafting(kind, parents).programs.hlo(bucket(parents))
    found = [line for line in text.splitlines() if 'op_name="' in line and "/draft/" in line]
    assert len(found) > 100
    return [line for line in found if "decoder_layer" not in line]


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["same", pytest.param("medusa", marks=pytest.mark.slow)])
def test_a_chain_needs_no_sort_and_greedy_rows_no_noise(kind: str) -> None:
    lines = drawing(kind, ())
    assert not [line for line in lines if SORTS.search(line)]
    noise = [line for line in lines if NOISE.search(line)]
    assert noise, "random rows have some"
    assert all(RANDOM in line for line in noise)


@pytest.mark.slow
def test_a_tree_needs_the_likeliest_few() -> None:
    """So the search finds what it looks for."""
    assert [line for line in drawing("medusa", TREE) if SORTS.search(line)]
