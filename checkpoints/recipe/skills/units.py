"""Unit conversion over a fixed list of units and small whole numbers.

Owns the conversion table and its phrasings. Held-out items are (number, from, to) triples that no
training text contains.
"""

from checkpoints.recipe import lexicon as lx
from checkpoints.recipe.chat import Chat, reply, user
from checkpoints.recipe.lexicon import Rng, Split

# large unit, small unit, how many small ones make a large one, abbreviations
TABLE = (
    ("metre", "centimetre", 100, "m", "cm"),
    ("kilometre", "metre", 1000, "km", "m"),
    ("centimetre", "millimetre", 10, "cm", "mm"),
    ("metre", "millimetre", 1000, "m", "mm"),
    ("kilogram", "gram", 1000, "kg", "g"),
    ("ton", "kilogram", 1000, "t", "kg"),
    ("gram", "milligram", 1000, "g", "mg"),
    ("litre", "millilitre", 1000, "l", "ml"),
    ("euro", "cent", 100, "euro", "cent"),
    ("hour", "minute", 60, "h", "min"),
    ("minute", "second", 60, "min", "s"),
    ("day", "hour", 24, "d", "h"),
    ("week", "day", 7, None, None),
    ("year", "month", 12, None, None),
    ("dozen", "piece", 12, None, None),
)
_ASK = (
    "How many {t} are {n} {f}?",
    "How many {t} are in {n} {f}?",
    "Convert {n} {f} to {t}.",
    "What is {n} {f} in {t}?",
    "What's {n} {f} in {t}?",
    "{n} {f} in {t}?",
    "Change {n} {f} into {t}.",
    "{n} {f} is how many {t}?",
    "Can you convert {n} {f} to {t}?",
)


def _many(unit: str, count: int) -> str:
    return unit if count == 1 or unit == "dozen" else unit + "s"


def _draw(rng: Rng, split: Split):
    while True:
        row = lx.pick(rng, TABLE)
        power_of_ten = row[2] in (10, 100, 1000)
        count = lx.between(rng, 1, 99 if power_of_ten else 12)
        down = lx.chance(rng, 0.6)
        if lx.held_out((row[0], row[1], count, down)) == (split == "test"):
            return row, count, down


def _one(rng: Rng, split: Split):
    (large, small, factor, large_short, small_short), count, down = _draw(rng, split)
    start, end = (count, count * factor) if down else (count * factor, count)
    f, t = (large, small) if down else (small, large)
    said = f"{start} {_many(f, start)} {'is' if start == 1 else 'are'} {end} {_many(t, end)}."
    facts = f"1 {large} is {factor} {_many(small, factor)}"
    sum_ = f"{start} {'x' if down else '/'} {factor} = {end}"
    if large_short and lx.chance(rng, 0.3):
        f, t = (large_short, small_short) if down else (small_short, large_short)
    else:
        f, t = _many(f, start), _many(t, 2)
    text = lx.pick(rng, _ASK).format(n=start, f=f, t=t)
    return user(lx.casual(rng, text)), reply(said, f"{facts}\n{sum_}")


def generate(rng: Rng, split: Split) -> Chat:
    turns = [*_one(rng, split)]
    if lx.chance(rng, 0.15):
        turns = [*_one(rng, split), *turns]
    return Chat("units", tuple(turns), thinking=lx.chance(rng, 0.7))
