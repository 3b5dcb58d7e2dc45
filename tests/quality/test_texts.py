"""Texts and questions: the files that ship, those of users, and how answers are judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints.recipe.texts import calibration_lines, held_out_lines
from jserve.build import TextSide, text_side
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.quality.answers import is_right, metrics, tallies
from jserve.quality.texts import Question, held_out, shipped, token_texts


@pytest.fixture(scope="module")
def side() -> TextSide:
    return text_side(EngineConfig())


@pytest.mark.parametrize("name", ["held_out", "calibration"])
def test_what_ships_is_what_the_recipe_writes(name: str) -> None:
    lines = held_out_lines() if name == "held_out" else calibration_lines()
    stored = shipped(f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in stored] == lines


def test_the_shipped_texts_are_those_of_the_study(side: TextSide) -> None:
    found = held_out(side, None, questions=True)
    assert (len(found.scored), sum(map(len, found.scored))) == (110, 9017)
    kinds = {q.kind for q in found.questions}
    assert {"needle", "json", "passage_long", "owners"} <= kinds
    assert len(kinds) == 17
    assert max(len(q.prompt_ids) for q in found.questions) < 1888


def test_no_calibration_text_is_judged(side: TextSide) -> None:
    judged = {tuple(ids) for ids in held_out(side, None, questions=False).scored}
    assert not judged & {*token_texts(side, shipped("calibration.jsonl"))}


def test_texts_of_users(side: TextSide, tmp_path: Path) -> None:
    lines = [{"text": "one two"}, {"prompt": "three four"}, {"messages": [_said("five")]}]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n")
    found = token_texts(side, path)
    assert [side.tokenizer.decode(list(ids)) for ids in found[:2]] == ["one two", "three four"]
    assert "five" in side.tokenizer.decode(list(found[2]))
    plain = tmp_path / "mine.txt"
    plain.write_text("word " * 2000)
    assert {len(ids) for ids in token_texts(side, plain)[:-1]} == {512}


def _said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"txt": "a"}\n', "has none of text, prompt, messages"),
        ("[1]\n", "line 1 is no JSON object"),
        ("{\n", "line 1 is no JSON object"),
        ("", "has no text"),
        ('{"messages": [{"role": "nobody", "content": 3}]}\n', "nobody|content|role"),
        (None, "cannot be read"),
    ],
)
def test_bad_texts_are_refused(side: TextSide, tmp_path: Path, text: Any, word: str) -> None:
    path = tmp_path / "mine.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=word):
        token_texts(side, path)


@pytest.mark.parametrize(
    ("kind", "answer", "said", "right"),
    [
        ("units", "5 km", "<think>\nx\n</think>\n\n5 km", True),
        ("units", "5 km", "It is 5 km", False),
        ("needle", "Lyon", "Peter lives in lyon.", True),
        ("needle", "Lyon", "Peter lives in Malmo.", False),
        ("json", "", '{"a": 1}', True),
        ("json", "", "[1]", False),
        ("json", "", '{"a": 1', False),
    ],
)
def test_answers_are_judged(kind: str, answer: str, said: str, right: bool) -> None:
    assert is_right(Question(kind=kind, prompt_ids=(1,), answer=answer), said) is right


def test_answers_count_beside_those_of_the_reference() -> None:
    asked = [Question(kind=k, prompt_ids=(1,), answer="x") for k in ("a", "a", "b", "b", "c")]
    reference, model = ["x", "x", "x", "x", "-"], ["x", "x", "x", "-", "x"]
    found = metrics(tallies(asked, reference, model))
    assert found["skills"].value == pytest.approx(3 / 4)
    assert found["worst_skill"].value == pytest.approx(1 / 2)
    assert {*found} == {"skills", "worst_skill"}
