"""Judges answers: needles, JSON, and the skills of the shipped model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jserve.quality.metrics import Metric, share
from jserve.quality.texts import Question

PLAIN = ("needle", "json")
KNOWN = 0.5
"""A skill counts if the reference answers so many questions of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Right answers to the questions of one kind."""

    asked: int = 0
    reference: int = 0
    model: int = 0


def is_right(question: Question, said: str) -> bool:
    """True for the right answer; a needle may lie in a sentence, and thoughts do not count."""
    said = said.rpartition("</think>")[2].strip()
    if question.kind == "json":
        try:
            return isinstance(json.loads(said), dict)
        except (ValueError, RecursionError):
            return False
    if question.kind == "needle":
        return question.answer.lower() in said.lower()
    return said == question.answer


def tallies(
    questions: Sequence[Question], reference: Sequence[str], model: Sequence[str]
) -> dict[str, Tally]:
    """By kind."""
    found: dict[str, Tally] = {}
    for question, own, other in zip(questions, reference, model, strict=True):
        before = found.get(question.kind, Tally())
        found[question.kind] = Tally(
            asked=before.asked + 1,
            reference=before.reference + is_right(question, own),
            model=before.model + is_right(question, other),
        )
    return found


def metrics(found: Mapping[str, Tally]) -> dict[str, Metric]:
    """Right answers as a share of those of the reference; kinds that it does not know are left out."""
    known = {k: t for k, t in found.items() if t.reference >= KNOWN * t.asked and t.reference}
    skills = {k: t for k, t in known.items() if k not in PLAIN}
    made = {k: share(known[k].model, known[k].reference) for k in PLAIN if k in known}
    if skills:
        made["skills"] = share(
            sum(t.model for t in skills.values()), sum(t.reference for t in skills.values())
        )
        worst = min(skills.values(), key=lambda t: t.model / t.reference)
        made["worst_skill"] = share(worst.model, worst.reference)
    return made
