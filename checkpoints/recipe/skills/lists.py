"""Handling short lists and key-value notes: the densest practice in copying the recipe has.

Owns list questions (repeat, reverse, sort, first, last, count, largest) and look-ups in notes of
random keys and values, which is where the copying circuits form early in training.
"""

from checkpoints.recipe import lexicon as lx
from checkpoints.recipe.chat import Chat, ask, reply, user
from checkpoints.recipe.lexicon import Rng, Split


def _words(rng: Rng, split: Split, count: int) -> list[str]:
    pools = (lx.OBJECTS, lx.FOODS, lx.ANIMALS, lx.COLOURS)
    if lx.chance(rng, 0.4):
        return lx.distinct(rng, lx.invented, split, count)
    return lx.sample(rng, lx.pick(rng, pools), count)


def _numbers(rng: Rng, count: int) -> list[int]:
    return [int(x) for x in rng.choice(99, count, replace=False) + 1]


def _repeat(rng: Rng, split: Split) -> tuple[str, str]:
    text = " ".join(_words(rng, split, lx.between(rng, 2, 8)))
    if lx.chance(rng, 0.3):
        text = " ".join(lx.code(rng) for _ in range(lx.between(rng, 1, 4)))
    forms = ("Repeat after me: {x}", "Repeat: {x}", "Say this: {x}", "Copy this text: {x}")
    return lx.pick(rng, forms).format(x=text), text


def _reverse(rng: Rng, split: Split) -> tuple[str, str]:
    items = _words(rng, split, lx.between(rng, 3, 6))
    forms = ("Reverse this list: {x}", "Write this list backwards: {x}", "{x} in reverse order?")
    return lx.pick(rng, forms).format(x=", ".join(items)), ", ".join(items[::-1])


def _sort(rng: Rng, split: Split) -> tuple[str, str]:
    items = _numbers(rng, lx.between(rng, 3, 6))
    forms = ("Sort these numbers: {x}", "Put these numbers in order: {x}", "Sort {x}.")
    shown = ", ".join(map(str, items))
    return lx.pick(rng, forms).format(x=shown), ", ".join(map(str, sorted(items)))


def _extreme(rng: Rng, split: Split) -> tuple[str, str]:
    items = _numbers(rng, lx.between(rng, 2, 6))
    name, best = lx.pick(rng, (("largest", max), ("smallest", min)))
    forms = ("What is the {n} number: {x}?", "Which is the {n} of {x}?", "{n} number of {x}?")
    text = lx.pick(rng, forms).format(n=name, x=", ".join(map(str, items)))
    return text[0].upper() + text[1:], f"The {name} number is {best(items)}."


def _place(rng: Rng, split: Split) -> tuple[str, str]:
    items = _words(rng, split, lx.between(rng, 3, 6))
    name, index = lx.pick(rng, (("first", 0), ("second", 1), ("third", 2), ("last", -1)))
    forms = (
        "What is the {n} word of this list: {x}?",
        "Which is the {n} item: {x}?",
        "Name the {n} word of {x}.",
    )
    asked = lx.pick(rng, forms).format(n=name, x=", ".join(items))
    return asked, f"The {name} word is {items[index]}."


def _count(rng: Rng, split: Split) -> tuple[str, str]:
    items = _words(rng, split, lx.between(rng, 2, 9))
    forms = ("How many words are in this list: {x}?", "Count these words: {x}", "Count: {x}")
    asked = lx.pick(rng, forms).format(x=", ".join(items))
    return asked, f"There are {len(items)} words."


_KINDS = (_repeat, _repeat, _reverse, _sort, _extreme, _place, _count)


def generate(rng: Rng, split: Split) -> Chat:
    chat = ask("lists", *lx.pick(rng, _KINDS)(rng, split))
    return Chat(chat.skill, chat.turns, thinking=lx.chance(rng, 0.7))


def _value(rng: Rng, split: Split) -> str:
    style = lx.between(rng, 0, 3)
    if style == 0:
        return lx.code(rng)
    return str(lx.between(rng, 0, 999)) if style == 1 else lx.invented(rng, split)


def generate_notes(rng: Rng, split: Split) -> Chat:
    """A handful of `key: value` notes, asked back several times."""
    keys = lx.distinct(rng, lx.invented, split, lx.between(rng, 3, 9))
    if lx.chance(rng, 0.4):
        keys = lx.sample(rng, lx.OBJECTS + lx.PLACES, len(keys))
    notes = {key: _value(rng, split) for key in keys}
    join, mark = lx.pick(rng, (("\n", ": "), (", ", " is "), (", ", " = "), ("\n", " -> ")))
    shown = join.join(f"{key}{mark}{value}" for key, value in notes.items())
    forms = ("What is {k}?", "{k}?", "Value of {k}?", "Look up {k}.")
    asked = lx.sample(rng, keys, min(len(keys), lx.between(rng, 1, 5)))
    turns = []
    for i, key in enumerate(asked):
        text = lx.pick(rng, forms).format(k=key)
        turns += [user(text if i else f"{shown}\n\n{text}"), reply(f"{key} is {notes[key]}.")]
    return Chat("notes", tuple(turns), thinking=lx.chance(rng, 0.7))
