"""The texts that `jserve quality` judges by and `jserve quantize` calibrates with, as files.

Owns what is in `checkpoints/texts/`: held-out chats to score, questions with one right answer, needles
in passages, requests for JSON; and training chats. The same recipe writes the same bytes.
"""

import json
from pathlib import Path

import numpy as np

from checkpoints.recipe import skills
from checkpoints.recipe.chat import Chat, as_messages, prompt_and_answer, segments
from checkpoints.recipe.evaluate import after_thinking, held_out
from checkpoints.recipe.skills import passage

SCORED = tuple(skills.FIRST)[:11]
"""Skills of the first mixture with one right answer: ten chats each are the text that is scored."""
SKILLS = (*skills.CLOSED, "passage_long")
QUESTIONS = 40
LONG_QUESTIONS = 10
NEEDLES = tuple((n, depth) for n in (8, 24, 60) for depth in (0.0, 0.25, 0.5, 0.75, 1.0))
"""(facts of a passage, where the one that is asked for lies)."""
CALIBRATION = 16
"""Training chats of each skill."""


def text_of(chat: Chat) -> str:
    return "".join(text for text, _ in segments(chat))


def held_out_lines() -> list[dict]:
    texts = [{"text": text_of(chat)} for skill in SCORED for chat in held_out(skill, 10)]
    asked = [_asked(skill) for skill in SKILLS]
    wanted = [_messages(chat) for chat in held_out("json_request", QUESTIONS)]
    return [
        *({"kind": "text", **line} for line in texts),
        *(line for lines in asked for line in lines),
        *({"kind": "needle", **_needle(n, depth)} for n, depth in NEEDLES),
        *({"kind": "json", "messages": messages} for messages in wanted),
    ]


def calibration_lines() -> list[dict]:
    rng = np.random.default_rng(7)
    drawn = [make(rng, "train") for make in skills.SKILLS.values() for _ in range(CALIBRATION)]
    return [{"text": text_of(chat)} for chat in drawn]


def _asked(skill: str) -> list[dict]:
    chats = held_out(skill, LONG_QUESTIONS if skill == "passage_long" else QUESTIONS)
    pairs = [prompt_and_answer(chat) for chat in chats]
    return [
        {"kind": "skill", "skill": skill, "prompt": prompt, "answer": after_thinking(answer)}
        for prompt, answer in pairs
    ]


def _messages(chat: Chat) -> list[dict]:
    return as_messages(chat)[0][:-1]


def _needle(n: int, depth: float) -> dict:
    """A passage of `n` facts and the question for one of them; its value is the answer."""
    rng = np.random.default_rng([97, n, int(depth * 100)])
    facts = _facts(rng, n)
    fact = facts[round(depth * (len(facts) - 1))]
    asked = fact.kind.ask[0].format(s=fact.subject, v=fact.value)
    told = f"Answer from the text.\n\n{passage.tell(rng, facts)}\n\nQuestion: {asked}"
    return {"messages": [{"role": "user", "content": told}], "answer": fact.value}


def _facts(rng: np.random.Generator, n: int) -> list[passage.Fact]:
    """`n` facts of several worlds, no subject and no value twice across these."""
    facts: list[passage.Fact] = []
    seen: set[str] = set()
    while len(facts) < n:
        world = [
            f for f in passage.world(rng, "test", min(n, 8)) if not seen & {f.subject, f.value}
        ]
        facts += world
        seen |= {x for f in world for x in (f.subject, f.value)}
    return facts[:n]


def write(folder: Path) -> None:
    """The files of `checkpoints/texts/`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("held_out", held_out_lines()), ("calibration", calibration_lines())):
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path("checkpoints/texts"))
