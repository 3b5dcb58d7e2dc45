"""The skills and their mixture: which kinds of chats the model sees, and how often.

Owns the table of generators. A skill is a function `(rng, split) -> Chat`; everything random comes
from the numpy generator it is given, so a seed names its text for ever.
"""

from collections.abc import Callable

from checkpoints.recipe import lexicon as lx
from checkpoints.recipe.chat import Chat
from checkpoints.recipe.lexicon import Rng, Split
from checkpoints.recipe.skills import (
    arithmetic,
    dialogue,
    everyday,
    extract,
    facts,
    lists,
    passage,
    story,
    structured,
    tools,
    units,
)

Generator = Callable[[Rng, Split], Chat]

SKILLS: dict[str, Generator] = {
    "passage": passage.generate,
    "arithmetic": arithmetic.generate,
    "arithmetic_thinking": arithmetic.generate_thinking,
    "units": units.generate,
    "extract": extract.generate,
    "tools": tools.generate,
    "tool_unneeded": tools.generate_unneeded,
    "dialogue": dialogue.generate,
    "lists": lists.generate,
    "notes": lists.generate_notes,
    "facts": facts.generate,
    "story": story.generate,
    "everyday": everyday.generate,
    "owners": everyday.generate_owners,
    "json_request": structured.generate,
    "json_forced": structured.generate_forced,
}
# Skills with one right answer; the others are judged by bits per byte.
CLOSED = tuple(name for name in SKILLS if name not in ("story", "json_forced"))
FIRST = {
    "passage": 0.22,
    "arithmetic": 0.09,
    "arithmetic_thinking": 0.11,
    "units": 0.08,
    "extract": 0.10,
    "tools": 0.10,
    "tool_unneeded": 0.03,
    "dialogue": 0.06,
    "lists": 0.08,
    "notes": 0.07,
    "facts": 0.03,
    "story": 0.03,
}
# The second stage practises everything: the new skills and what was weakest most. Which of two like
# things belongs to whom is the hardest to learn and comes most often.
SECOND = {
    "passage": 0.11,
    "arithmetic": 0.05,
    "arithmetic_thinking": 0.07,
    "units": 0.08,
    "extract": 0.02,
    "tools": 0.05,
    "tool_unneeded": 0.03,
    "dialogue": 0.03,
    "lists": 0.09,
    "notes": 0.02,
    "facts": 0.01,
    "story": 0.02,
    "everyday": 0.09,
    "owners": 0.18,
    "json_request": 0.08,
    "json_forced": 0.07,
}
MIXTURES = {"first": FIRST, "second": SECOND}
_PLAIN = 0.02


def draw(rng: Rng, split: Split, dense_copying: bool = False, mixture: str = "first") -> Chat:
    """One chat from the mixture. `dense_copying` is the curriculum for the first steps."""
    if dense_copying and lx.chance(rng, 0.5):
        return lx.pick(rng, (lists.generate_notes, lists.generate))(rng, split)
    if lx.chance(rng, _PLAIN):
        teller = passage.plain if lx.chance(rng, 0.5) else _tell_story
        return Chat("plain", plain=teller(rng, split))
    names, weights = tuple(MIXTURES[mixture]), tuple(MIXTURES[mixture].values())
    name = names[int(rng.choice(len(names), p=weights))]
    return SKILLS[name](rng, split)


def _tell_story(rng: Rng, split: Split) -> str:
    return story.story(rng, split)[1]


def draw_long(rng: Rng, split: Split, sentences: int, mixture: str = "first") -> Chat:
    """A chat that fills a long row: one long passage, or many unrelated exchanges in one chat."""
    if lx.chance(rng, 0.5):
        return passage.generate_long(rng, split, sentences)
    turns = []
    for _ in range(sentences // 3):
        chat = draw(rng, split, mixture=mixture)
        if chat.turns and not chat.tools and chat.turns[0].role == "user":
            turns += chat.turns
    return Chat("chat_long", tuple(turns)) if turns else draw_long(rng, split, sentences, mixture)
