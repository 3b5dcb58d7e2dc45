"""Values of JSON fields: names, prices, dates, addresses, lists and objects, drawn for a split."""

from collections.abc import Callable
from typing import Any

from checkpoints.recipe import lexicon as lx
from checkpoints.recipe.lexicon import Rng, Split

Draw = Callable[[Rng, Split], Any]


def words(text: str) -> Draw:
    items = tuple(text.split("|"))
    return lambda rng, split: lx.pick(rng, items)


def of(items) -> Draw:
    return lambda rng, split: lx.pick(rng, items)


def integer(low: int, high: int) -> Draw:
    return lambda rng, split: lx.between(rng, low, high)


def price(rng: Rng, split: Split) -> float | int:
    whole = lx.between(rng, 1, lx.pick(rng, (20, 99, 999)))
    cents = lx.pick(rng, (0, 5, 0.5, 0.99, 0.95, 0.25, 0.9, 0.75, 0.49))
    return whole if cents in (0, 5) else round(whole + cents, 2)


def decimal(low: int, high: int) -> Draw:
    return lambda rng, split: lx.between(rng, low * 10, high * 10) / 10


def boolean(rng: Rng, split: Split) -> bool:
    return lx.chance(rng, 0.5)


def date(rng: Rng, split: Split) -> str:
    return f"{lx.between(rng, 1990, 2030)}-{lx.between(rng, 1, 12):02}-{lx.between(rng, 1, 28):02}"


def clock(rng: Rng, split: Split) -> str:
    return f"{lx.between(rng, 0, 23):02}:{lx.pick(rng, ('00', '15', '30', '45'))}"


def email(rng: Rng, split: Split) -> str:
    name = lx.first_name(rng, split).lower()
    name += lx.pick(
        rng, ("", "", f".{lx.first_name(rng, split).lower()}", str(lx.between(rng, 1, 99)))
    )
    host = lx.pick(rng, ("example", "mail", "post", "work", lx.invented(rng, split)))
    return f"{name}@{host}.{lx.pick(rng, ('com', 'org', 'net'))}"


def phone(rng: Rng, split: Split) -> str:
    digits = str(lx.between(rng, 10000, 9999999))
    style = lx.between(rng, 0, 3)
    if style == 0:
        return f"555-{digits[:4]}"
    return f"+{lx.between(rng, 1, 99)} {digits}" if style == 1 else digits


def full_name(rng: Rng, split: Split) -> str:
    first = lx.first_name(rng, split)
    if lx.chance(rng, 0.6):
        return first
    return (
        f"{first} {lx.pick(rng, _LAST) if lx.chance(rng, 0.6) else lx.invented(rng, split).title()}"
    )


_LAST = lx.words(
    "Smith Jones Brown Miller Taylor Wilson Clark Hill Green Baker White King Young Lee "
    "Adams Novak Meyer Garcia Silva Rossi Berg Hansen Kim Chen Khan"
)


ADJECTIVES = lx.words("small big old new good nice red blue short long simple fresh warm cold fast")


_SHORT = lx.split_bars(
    "I liked it|Very good|Not bad|Too long|A great story|Good value|It broke soon|Works well|"
    "Nothing special|Would buy again|Great|Boring|Easy to use|Fun for all|Bad sound|All went "
    "well|Call back later|Bring a coat|See you soon|Please reply|A nice day|No problem|On "
    "time|Done"
)


def phrase(rng: Rng, split: Split) -> str:
    """One to six words, as a title, a note or a description."""
    style = lx.between(rng, 0, 6)
    noun = lx.pick(rng, lx.THINGS + lx.EVENTS + lx.FOODS)
    if style == 0:
        return lx.pick(rng, _SHORT) + lx.pick(rng, ("", "", "."))
    if style == 1:
        return noun
    if style == 2:
        return f"{lx.pick(rng, ADJECTIVES)} {noun}"
    if style == 3:
        return f"The {lx.pick(rng, ADJECTIVES)} {noun}"
    if style == 4:
        return f"{lx.first_name(rng, split)} has {lx.a(noun)}."
    if style == 5:
        return f"{noun} {lx.pick(rng, lx.WHERE)}".capitalize()
    return f"{noun} for {lx.first_name(rng, split)}".capitalize()


def _street(rng: Rng, split: Split) -> str:
    name = lx.pick(rng, ("Main", "Park", "High", "Mill", lx.invented(rng, split).capitalize()))
    return f"{lx.between(rng, 1, 99)} {name} {lx.pick(rng, ('Street', 'Road', 'Lane'))}"


def address(rng: Rng, split: Split) -> dict:
    parts = {
        "street": _street(rng, split),
        "city": lx.town(rng, split),
        lx.pick(rng, ("zip", "postcode", "zip_code")): str(lx.between(rng, 1000, 99999)),
        "country": lx.pick(rng, COUNTRIES),
    }
    return _some(rng, parts, 2)


def _some(rng: Rng, parts: dict, least: int) -> dict:
    keys = lx.sample(rng, list(parts), lx.between(rng, least, len(parts)))
    return {key: value for key, value in parts.items() if key in keys}


COUNTRIES = [
    "Norway",
    "France",
    "Spain",
    "Italy",
    "Germany",
    "Japan",
    "Canada",
    "Kenya",
    "Peru",
    "India",
    "Ireland",
]


def list_of(draw: Draw, most: int = 5) -> Draw:
    return lambda rng, split: lx.distinct(rng, draw, split, lx.between(rng, 1, most))


def _line(rng: Rng, split: Split) -> dict:
    named = lx.pick(rng, ("item", "name", "product", "title"))
    line = {
        named: lx.pick(rng, lx.GOODS + lx.THINGS),
        lx.pick(rng, ("quantity", "count", "qty")): 1,
    }
    line[list(line)[1]] = lx.between(rng, 1, 12)
    if lx.chance(rng, 0.5):
        line["price"] = price(rng, split)
    return line


def lines(rng: Rng, split: Split) -> list[dict]:
    """Objects of one shape, as an array holds them."""
    first = _line(rng, split)
    lines = [first]
    for _ in range(lx.between(rng, 0, 3)):
        values = [lx.pick(rng, lx.GOODS + lx.THINGS), lx.between(rng, 1, 12), price(rng, split)]
        lines.append(dict(zip(first, values, strict=False)))
    return lines


def persons(rng: Rng, split: Split) -> list[dict]:
    count, extra = lx.between(rng, 1, 3), lx.chance(rng, 0.6)
    people = lx.distinct(rng, lx.first_name, split, count)
    return [{"name": who, **({"age": lx.between(rng, 1, 90)} if extra else {})} for who in people]


def forecast(rng: Rng, split: Split) -> list[dict]:
    days = lx.sample(rng, lx.DAYS, lx.between(rng, 1, 4))
    return [{"day": day, "temperature": lx.between(rng, -9, 35)} for day in days]


def owner(rng: Rng, split: Split) -> dict:
    who = {"name": full_name(rng, split), "phone": phone(rng, split), "email": email(rng, split)}
    return _some(rng, who, 1)


def free_key(rng: Rng, split: Split) -> str:
    nouns = lx.THINGS + lx.PLACES + _GENERIC
    word = lx.pick(rng, (lx.pick(rng, nouns), lx.pick(rng, _GENERIC), lx.invented(rng, split)))
    style = lx.between(rng, 0, 5)
    if style == 0:
        return f"{word}_{lx.pick(rng, _GENERIC)}"
    if style == 1:
        return f"{word}{lx.pick(rng, _GENERIC).capitalize()}"
    return f"is_{word}" if style == 2 and lx.chance(rng, 0.5) else word


_GENERIC = lx.words(
    "id name value status message answer result score reason title type kind label count "
    "total list items data text note level date time url code key user owner size unit "
    "confidence language theme volume enabled active version mode category summary question "
    "topic x y"
)


def free_value(rng: Rng, split: Split, depth: int = 0) -> Any:
    """A short JSON value of any type."""
    style = lx.between(rng, 0, 11 if depth < 2 else 8)
    if style <= 2:
        return phrase(rng, split)
    if style == 3:
        return lx.pick(rng, (lx.town, lx.first_name, email, date, clock, full_name))(rng, split)
    if style <= 5:
        return lx.pick(
            rng, (lx.between(rng, 0, 9), lx.between(rng, -20, 100), lx.between(rng, 0, 9999))
        )
    if style == 6:
        return lx.pick(rng, (price(rng, split), lx.between(rng, 0, 100) / 100))
    if style == 7:
        return lx.chance(rng, 0.5)
    if style == 8:
        return lx.pick(rng, (None, "", lx.pick(rng, lx.COLOURS)))
    if style == 9:
        return [phrase(rng, split) for _ in range(lx.between(rng, 0, 4))]
    if style == 10:
        return free_object(rng, split, depth + 1)
    return _rows(rng, split)


def _rows(rng: Rng, split: Split) -> list:
    style = lx.between(rng, 0, 2)
    if style == 0:
        return [lx.between(rng, 0, 99) for _ in range(lx.between(rng, 0, 5))]
    return lines(rng, split) if style == 1 else persons(rng, split)


def free_object(rng: Rng, split: Split, depth: int = 0) -> dict:
    return {
        free_key(rng, split): free_value(rng, split, depth) for _ in range(lx.between(rng, 1, 4))
    }
