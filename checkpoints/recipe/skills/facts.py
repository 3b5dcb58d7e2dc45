"""A closed list of everyday facts: opposites, days and months, capitals, animal sounds, colours.

Owns the tables. They are meant to be learnt by heart; held-out text only differs in phrasing.
"""

from checkpoints.recipe import lexicon as lx
from checkpoints.recipe.chat import Chat, reply, user
from checkpoints.recipe.lexicon import Rng, Split

_OPPOSITES = (
    "hot cold|big small|fast slow|up down|day night|open closed|happy sad|old young|light dark|"
    "wet dry|full empty|early late|hard soft|near far|left right|long short|loud quiet|rich poor|"
    "strong weak|high low|thick thin|clean dirty|first last|true false|good bad|in out|over under"
)
_CAPITALS = (
    "France Paris|England London|Germany Berlin|Spain Madrid|Italy Rome|Austria Vienna|"
    "Norway Oslo|Ireland Dublin|Portugal Lisbon|Poland Warsaw|Greece Athens|Finland Helsinki|"
    "Japan Tokyo|Egypt Cairo|Kenya Nairobi|Peru Lima|Sweden Stockholm|Denmark Copenhagen|"
    "Hungary Budapest|Russia Moscow|China Beijing|Cuba Havana|Canada Ottawa|Belgium Brussels"
)
_SOUNDS = (
    "cat meow|dog woof|cow moo|sheep baa|duck quack|frog ribbit|hen cluck|pig oink|horse neigh"
)
_COLOURS = (
    "grass green|snow white|the sky blue|blood red|coal black|a lemon yellow|chocolate brown|"
    "the sun yellow|milk white|a carrot orange"
)
_CASES = (
    (
        _OPPOSITES,
        ("What is the opposite of {a}?", "Opposite of {a}?", "Name the opposite of {a}."),
        "The opposite of {a} is {b}.",
    ),
    (
        _CAPITALS,
        ("What is the capital of {a}?", "What's the capital of {a}?", "Name the capital of {a}."),
        "The capital of {a} is {b}.",
    ),
    (
        _SOUNDS,
        ("What sound does a {a} make?", "What does a {a} say?", "Which sound does a {a} make?"),
        "A {a} says {b}.",
    ),
    (
        _COLOURS,
        ("What colour is {a}?", "Which colour is {a}?", "What color is {a}?"),
        "The colour of {a} is {b}.",
    ),
)


def _calendar(rng: Rng) -> tuple[str, str]:
    names, word = lx.pick(rng, ((lx.DAYS, "day"), (lx.MONTHS, "month")))
    i = lx.between(rng, 0, len(names) - 1)
    after = lx.chance(rng, 0.5)
    other = names[(i + (1 if after else -1)) % len(names)]
    where = "after" if after else "before"
    return f"Which {word} comes {where} {names[i]}?", f"The {word} {where} {names[i]} is {other}."


def _one(rng: Rng):
    if lx.chance(rng, 0.2):
        asked, said = _calendar(rng)
    else:
        table, asks, answer = lx.pick(rng, _CASES)
        a, b = lx.pick(rng, table.split("|")).rsplit(" ", 1)
        if table is _OPPOSITES and lx.chance(rng, 0.5):
            a, b = b, a
        asked, said = lx.pick(rng, asks).format(a=a), answer.format(a=a, b=b)
    return user(lx.casual(rng, asked)), reply(said)


def generate(rng: Rng, split: Split) -> Chat:
    turns = [turn for _ in range(lx.between(rng, 1, 3)) for turn in _one(rng)]
    return Chat("facts", tuple(turns), thinking=lx.chance(rng, 0.7))
