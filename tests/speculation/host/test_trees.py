"""Trees of drafts as users write them: every notation gives the same parents, every mistake is named."""

from __future__ import annotations

from itertools import product

import pytest

from jserve.config import EngineConfig, SpeculativeOptions
from jserve.errors import ConfigError
from jserve.model import draft_tree as model_tree
from jserve.speculation.host import trees
from jserve.speculation.host.methods import check, shape


def options(**given: object) -> SpeculativeOptions:
    made = EngineConfig.of(speculative={"method": "eagle3", "model": "dir", **given}).speculative
    check(made)
    return made


@pytest.mark.parametrize(
    ("given", "parents"),
    [
        ([[0], [1], [0, 0]], (0, 0, 1)),
        ("[[1], [0, 0], [0]]", (0, 0, 1)),
        ("[(0,), (1,), (0, 0)]", (0, 0, 1)),
        ([[0], [1], [1, 0], [0, 0], [0, 1], [1, 0, 0]], (0, 0, 1, 1, 2, 5)),
        ([2, 1], (0, 0, 1, 2)),
        ("[3]", (0, 0, 0)),
        ([[0], [0, 0]], ()),
        ([1, 1], ()),
    ],
)
def test_a_tree_is_given_by_paths_or_branches(given, parents) -> None:
    n, got = shape(options(tree=given), 15)
    assert got == parents
    assert n == (len(parents) or 2)


def test_vllms_name_is_understood() -> None:
    made = options(speculative_token_tree="[(0,), (1,)]")
    assert shape(made, 15) == (2, (0, 0))
    assert EngineConfig.of(**EngineConfig.of(speculative={"tree": [[0]]}).flat()).flat() == (
        EngineConfig.of(speculative={"tree": [[0]]}).flat()
    )


@pytest.mark.parametrize("n", [2, 5, 9, 15])
@pytest.mark.parametrize("deepest", [1, 2, 4])
def test_auto_takes_the_drafts_most_likely_to_stand(n: int, deepest: int) -> None:
    ranks = (0.5, 0.3, 0.11)
    every = [p for d in range(1, deepest + 1) for p in product(range(len(ranks)), repeat=d)]
    worth = {p: _product(ranks[r] for r in p) for p in every}
    got = trees.likeliest(n, deepest, ranks)
    best = sorted(worth.values(), reverse=True)[:n]
    assert sum(worth[p] for p in got) == pytest.approx(sum(best))
    assert len(set(got)) == min(n, len(every))
    parents = trees.parents_of(got)
    model_tree.check(parents)
    depth = model_tree.depths(parents)
    assert list(depth) == sorted(depth)
    assert max(depth) <= deepest


def _product(values) -> float:
    found = 1.0
    for value in values:
        found *= value
    return found


def test_measured_chances_shape_the_tree() -> None:
    """Where the second and third draft stand nearly as often as the first, the tree is wide; where
    only the first ever does, it is a chain."""
    wide = options(tree="auto", num_tokens=6, tree_chances=[0.35, 0.33, 0.31])
    assert shape(wide, 15) == (6, (0, 0, 0, 1, 1, 2))  # 0.35 0.33 0.31 0.1225 0.1155 0.1155
    assert shape(options(tree="auto", num_tokens=4, tree_chances="[1]"), 15) == (4, ())
    usual = options(tree="auto", num_tokens=6)
    same = options(tree="auto", num_tokens=6, tree_chances=list(trees.RANKS))
    assert shape(usual, 15) == shape(same, 15) != shape(wide, 15)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "list 1 to 15 chances"),
        ("0.5", "list 1 to 15 chances"),
        ([True], "list 1 to 15 chances"),
        ([0.01] * 16, "list 1 to 15 chances"),
        ([0.3, 0.5], "must fall"),
        ([0.7, 0.4], "make at most 1 together"),
        ([0.5, 0.0], "be above 0"),
        ("[NaN]", "must fall"),
        ("[0.5, NaN]", "must fall"),
    ],
)
def test_what_are_no_chances_is_refused_by_name(given, words) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        options(tree="auto", tree_chances=given)
    assert caught.value.field == "speculative.tree_chances"


def test_chances_without_a_tree_of_their_making_are_refused() -> None:
    for tree in ({}, {"tree": [2, 1]}):
        with pytest.raises(ConfigError, match=r"means nothing without speculative\.tree 'auto'"):
            options(tree_chances=[0.6], **tree)


def test_auto_has_as_many_drafts_as_asked_for_and_no_more_depth_than_there_is() -> None:
    n, parents = shape(options(tree="auto", num_tokens=10), 3)
    assert n == len(parents) == 10
    assert max(model_tree.depths(parents)) == 3
    assert 0 < sum(p == 0 for p in parents) < 10


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"tree": "x"},
            "must be 'auto', branches per depth or a list of paths, not 'x'",
        ),
        ({"tree": "[]"}, "must be 'auto'"),
        ({"tree": [[1]]}, r"path \[1\] but not \[0\]"),
        ({"tree": [[0], [1, 0]]}, r"path \[1, 0\] but not \[1\]"),
        ({"tree": [[0], [0]]}, r"path \[0\] twice"),
        ({"tree": [[0], [-1]]}, r"\[-1\] for a path"),
        ({"tree": [[0], "a"]}, "'a' for a path"),
        ({"tree": [[]]}, r"\[\] for a path"),
        ({"tree": [4, 4]}, "a depth of 16 drafts"),
        ({"tree": [3, 0]}, "a depth of 0 drafts"),
        ({"tree": [4, 3]}, "has 16 drafts, 1 to 15"),
        ({"tree": [2, 1], "num_tokens": 5}, "has 4 drafts, num_tokens is 5"),
        ({"tree": {"a": 1}}, "must be str"),
        ({"tree": "auto", "method": "ngram", "model": ""}, "tree means nothing to method 'ngram'"),
    ],
)
def test_what_is_no_tree_is_refused_by_name(given, words) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        options(**given)
    assert caught.value.field == "speculative.tree"
