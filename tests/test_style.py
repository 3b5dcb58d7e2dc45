"""Docstrings name a thing or say what it does, without opening with a question, and describe arguments that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
QUESTIONS = {"What", "How", "Whether", "Where", "Who", "When", "Which", "Why"}


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, those behind attributes and constants included."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()


def _questions(source: str) -> list[tuple[int, str]]:
    found = ((line, text.split(maxsplit=1)[0]) for line, text in _docstrings(source) if text)
    return [(line, word) for line, word in found if word.rstrip(".,:") in QUESTIONS]


@pytest.mark.parametrize("tree", ["jserve", "pallas_kernels"])
def test_no_docstring_opens_with_a_question(tree: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {word}"
        for path in sorted((ROOT / tree).rglob("*.py"))
        for line, word in _questions(path.read_text())
    ]
    assert not wrong, wrong


def test_a_question_is_found_wherever_it_is() -> None:
    source = '"""What it is."""\nA = 1\n"""How many."""\ndef f():\n    """Whether."""\n'
    assert [line for line, _ in _questions(source)] == [1, 3, 5]
    assert not _questions('def f():\n    """Returns what it is."""\n')


def _described(node: ast.AST) -> set[str]:
    """Names of the section ``Args`` of a function's or class's docstring."""
    if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    section = (ast.get_docstring(node) or "").partition("Args:\n")[2].partition("\n\n")[0]
    lists = re.findall(r"^    ([*\w]+(?:, [*\w]+)*): ", section, re.MULTILINE)
    return {name.lstrip("*") for names in lists for name in names.split(", ")}


def _taken(node: ast.AST) -> set[str]:
    """Parameters of a function; of a class its fields and the parameters of ``__init__``."""
    found = set()
    if isinstance(node, ast.ClassDef):
        fields = [s.target for s in node.body if isinstance(s, ast.AnnAssign)]
        found = {target.id for target in fields if isinstance(target, ast.Name)}
        inits = [s for s in node.body if getattr(s, "name", "") == "__init__"]
        return found.union(*map(_taken, inits))
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    args = node.args
    both = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return {arg.arg for arg in both if arg is not None}


@pytest.mark.parametrize("tree", ["jserve", "pallas_kernels"])
def test_docstrings_describe_arguments_that_exist(tree: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} {name}"
        for path in sorted((ROOT / tree).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if (names := _described(node))
        for name in names - _taken(node)
    ]
    assert not wrong, wrong


def test_an_argument_that_is_gone_is_found() -> None:
    source = 'def f(a):\n    """F.\n\n    Args:\n        a, b: two.\n        c: one.\n    """\n'
    [function] = ast.parse(source).body
    assert _described(function) - _taken(function) == {"b", "c"}
