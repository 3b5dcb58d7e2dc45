"""Records for JSON skills: everyday things with typed fields, and how sentences tell them.

Owns field kinds (key names, JSON type, values) and the clause that tells each. A record may nest
objects and lists; free records have arbitrary keys, for JSON about nothing that was told.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from checkpoints.recipe import lexicon as lx
from checkpoints.recipe.lexicon import Rng, Split

Draw = Callable[[Rng, Split], Any]


@dataclass(frozen=True)
class Field:
    """`tell`: clauses with `{v}`, said of the record's subject; empty if it is never told.

    `kind` is the type as a schema names it. A bool is told by the clause at index `not value`.
    """

    keys: tuple[str, ...]
    kind: str
    draw: Draw
    tell: tuple[str, ...] = ()


@dataclass(frozen=True)
class Told:
    """A drawn field: its key, its value, and the clause that tells it (empty: untold)."""

    key: str
    kind: str
    value: Any
    clause: str = ""


def _words(text: str) -> Draw:
    items = tuple(text.split("|"))
    return lambda rng, split: lx.pick(rng, items)


def _of(items) -> Draw:
    return lambda rng, split: lx.pick(rng, items)


def _integer(low: int, high: int) -> Draw:
    return lambda rng, split: lx.between(rng, low, high)


def _price(rng: Rng, split: Split) -> float | int:
    whole = lx.between(rng, 1, lx.pick(rng, (20, 99, 999)))
    cents = lx.pick(rng, (0, 5, 0.5, 0.99, 0.95, 0.25, 0.9, 0.75, 0.49))
    return whole if cents in (0, 5) else round(whole + cents, 2)


def _decimal(low: int, high: int) -> Draw:
    return lambda rng, split: lx.between(rng, low * 10, high * 10) / 10


def _boolean(rng: Rng, split: Split) -> bool:
    return lx.chance(rng, 0.5)


def date(rng: Rng, split: Split) -> str:
    return f"{lx.between(rng, 1990, 2030)}-{lx.between(rng, 1, 12):02}-{lx.between(rng, 1, 28):02}"


def _clock(rng: Rng, split: Split) -> str:
    return f"{lx.between(rng, 0, 23):02}:{lx.pick(rng, ('00', '15', '30', '45'))}"


def email(rng: Rng, split: Split) -> str:
    name = lx.first_name(rng, split).lower()
    name += lx.pick(
        rng, ("", "", f".{lx.first_name(rng, split).lower()}", str(lx.between(rng, 1, 99)))
    )
    host = lx.pick(rng, ("example", "mail", "post", "work", lx.invented(rng, split)))
    return f"{name}@{host}.{lx.pick(rng, ('com', 'org', 'net'))}"


def _phone(rng: Rng, split: Split) -> str:
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
_ADJECTIVES = lx.words(
    "small big old new good nice red blue short long simple fresh warm cold fast"
)
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
        return f"{lx.pick(rng, _ADJECTIVES)} {noun}"
    if style == 3:
        return f"The {lx.pick(rng, _ADJECTIVES)} {noun}"
    if style == 4:
        return f"{lx.first_name(rng, split)} has {lx.a(noun)}."
    if style == 5:
        return f"{noun} {lx.pick(rng, lx.WHERE)}".capitalize()
    return f"{noun} for {lx.first_name(rng, split)}".capitalize()


def _street(rng: Rng, split: Split) -> str:
    name = lx.pick(rng, ("Main", "Park", "High", "Mill", lx.invented(rng, split).capitalize()))
    return f"{lx.between(rng, 1, 99)} {name} {lx.pick(rng, ('Street', 'Road', 'Lane'))}"


def _address(rng: Rng, split: Split) -> dict:
    parts = {
        "street": _street(rng, split),
        "city": lx.town(rng, split),
        lx.pick(rng, ("zip", "postcode", "zip_code")): str(lx.between(rng, 1000, 99999)),
        "country": lx.pick(rng, _COUNTRIES),
    }
    return _some(rng, parts, 2)


def _some(rng: Rng, parts: dict, least: int) -> dict:
    keys = lx.sample(rng, list(parts), lx.between(rng, least, len(parts)))
    return {key: value for key, value in parts.items() if key in keys}


_COUNTRIES = [
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


def _list_of(draw: Draw, most: int = 5) -> Draw:
    return lambda rng, split: lx.distinct(rng, draw, split, lx.between(rng, 1, most))


def _line(rng: Rng, split: Split) -> dict:
    named = lx.pick(rng, ("item", "name", "product", "title"))
    line = {
        named: lx.pick(rng, lx.GOODS + lx.THINGS),
        lx.pick(rng, ("quantity", "count", "qty")): 1,
    }
    line[list(line)[1]] = lx.between(rng, 1, 12)
    if lx.chance(rng, 0.5):
        line["price"] = _price(rng, split)
    return line


def _lines(rng: Rng, split: Split) -> list[dict]:
    """Objects of one shape, as an array holds them."""
    first = _line(rng, split)
    lines = [first]
    for _ in range(lx.between(rng, 0, 3)):
        values = [lx.pick(rng, lx.GOODS + lx.THINGS), lx.between(rng, 1, 12), _price(rng, split)]
        lines.append(dict(zip(first, values, strict=False)))
    return lines


def _persons(rng: Rng, split: Split) -> list[dict]:
    count, extra = lx.between(rng, 1, 3), lx.chance(rng, 0.6)
    people = lx.distinct(rng, lx.first_name, split, count)
    return [{"name": who, **({"age": lx.between(rng, 1, 90)} if extra else {})} for who in people]


def _forecast(rng: Rng, split: Split) -> list[dict]:
    days = lx.sample(rng, lx.DAYS, lx.between(rng, 1, 4))
    return [{"day": day, "temperature": lx.between(rng, -9, 35)} for day in days]


def _owner(rng: Rng, split: Split) -> dict:
    who = {"name": full_name(rng, split), "phone": _phone(rng, split), "email": email(rng, split)}
    return _some(rng, who, 1)


_SENTIMENTS = ("positive", "negative", "neutral", "mixed")

FIELDS: dict[str, tuple[Field, ...]] = {
    "person": (
        Field(
            ("age", "age", "age_years", "years"),
            "integer",
            _integer(3, 95),
            ("is {v} years old", "is {v}"),
        ),
        Field(
            ("city", "city", "town", "location", "home"),
            "string",
            lx.town,
            ("lives in {v}", "is from {v}"),
        ),
        Field(
            ("job", "occupation", "profession", "role"),
            "string",
            _of(lx.JOBS),
            ("works as a {v}", "is a {v}"),
        ),
        Field(("email", "email_address", "mail"), "string", email, ("has the email {v}",)),
        Field(("phone", "phone_number", "tel"), "string", _phone, ("has the phone number {v}",)),
        Field(("married", "is_married"), "boolean", _boolean, ("is married", "is not married")),
        Field(("student", "is_student"), "boolean", _boolean, ("is a student", "is not a student")),
        Field(
            ("hobbies", "interests", "likes"),
            "array",
            _list_of(_of(lx.HOBBIES)),
            ("likes {v}", "enjoys {v}"),
        ),
        Field(("children", "kids", "siblings"), "integer", _integer(0, 6), ("has {v} children",)),
        Field(("height", "height_m"), "number", _decimal(1, 2), ("is {v} metres tall",)),
        Field(("address", "home_address"), "object", _address),
        Field(
            ("favourite_colour", "color", "favorite_color"),
            "string",
            _of(lx.COLOURS),
            ("likes the colour {v}",),
        ),
        Field(("birthday", "date_of_birth", "born"), "string", date, ("was born on {v}",)),
        Field(("gender",), "string", _words("female|male|other")),
        Field(("country", "nationality"), "string", _of(_COUNTRIES), ("comes from {v}",)),
    ),
    "product": (
        Field(
            ("price", "price", "cost", "amount"),
            "number",
            _price,
            ("costs {v} euros", "is sold for {v} dollars"),
        ),
        Field(("currency",), "string", _words("EUR|USD|GBP")),
        Field(
            ("in_stock", "available", "stock"), "boolean", _boolean, ("is in stock", "is sold out")
        ),
        Field(("colour", "color"), "string", _of(lx.COLOURS), ("is {v}",)),
        Field(("weight", "weight_g", "grams"), "number", _integer(10, 999), ("weighs {v} grams",)),
        Field(
            ("quantity", "count", "units"), "integer", _integer(1, 99), ("comes in packs of {v}",)
        ),
        Field(
            ("category", "type"),
            "string",
            _words("kitchen|garden|toys|books|food|sport|music|office|home"),
        ),
        Field(("tags", "labels", "colours"), "array", _list_of(_of(lx.COLOURS + _ADJECTIVES))),
        Field(("rating", "stars", "score"), "number", _decimal(1, 5), ("has {v} stars",)),
        Field(("description", "summary", "text"), "string", phrase),
        Field(("brand", "maker"), "string", lx.town, ("is made by {v}",)),
        Field(("sku", "id", "code"), "string", lambda rng, split: lx.code(rng)),
    ),
    "event": (
        Field(("date", "day", "start_date"), "string", date, ("is on {v}", "takes place on {v}")),
        Field(("day", "weekday", "when"), "string", _of(lx.DAYS), ("is on {v}",)),
        Field(
            ("time", "start", "start_time"), "string", _clock, ("starts at {v}", "begins at {v}")
        ),
        Field(("location", "place", "room", "where"), "string", _of(lx.ROOMS), ("is in the {v}",)),
        Field(("city",), "string", lx.town, ("is in {v}",)),
        Field(
            ("attendees", "guests", "participants", "people"),
            "array",
            _list_of(lx.first_name),
            ("is for {v}",),
        ),
        Field(("organizer", "host"), "string", full_name, ("is led by {v}",)),
        Field(("all_day", "public", "online"), "boolean", _boolean),
        Field(
            ("duration", "duration_minutes", "minutes"),
            "integer",
            _integer(10, 180),
            ("takes {v} minutes",),
        ),
        Field(("notes", "description"), "string", phrase),
        Field(("reminder",), "boolean", _boolean),
    ),
    "order": (
        Field(("customer", "buyer", "customer_name"), "string", full_name, ("was placed by {v}",)),
        Field(("items", "lines", "products"), "array", _lines),
        Field(("total", "price", "amount", "total_price"), "number", _price, ("costs {v} euros",)),
        Field(("paid", "shipped", "express"), "boolean", _boolean, ("is paid", "is not paid")),
        Field(("date", "order_date"), "string", date, ("was placed on {v}",)),
        Field(("status",), "string", _words("open|paid|shipped|new|done|cancelled")),
        Field(("address", "shipping_address"), "object", _address),
        Field(("quantity",), "integer", _integer(1, 40), ("has {v} items",)),
        Field(("email",), "string", email),
    ),
    "review": (
        Field(
            ("rating", "stars", "score"),
            "integer",
            _integer(1, 5),
            ("gets {v} stars", "has {v} of 5 stars"),
        ),
        Field(
            ("rating", "verdict", "quality"),
            "string",
            _words("good|bad|great|poor|average|excellent"),
        ),
        Field(("sentiment",), "string", _of(_SENTIMENTS)),
        Field(("summary", "comment", "review", "text"), "string", phrase),
        Field(("reviewer", "author", "user"), "string", full_name, ("was reviewed by {v}",)),
        Field(("year", "released"), "integer", _integer(1950, 2030), ("is from {v}",)),
        Field(("recommended", "recommend", "spoilers"), "boolean", _boolean),
        Field(("pros", "cons", "keywords", "genres"), "array", _list_of(phrase, 3)),
        Field(("genre",), "string", _words("drama|comedy|action|horror|family|crime")),
    ),
    "weather": (
        Field(
            ("temperature", "temp", "degrees"),
            "number",
            _integer(-12, 38),
            ("has {v} degrees", "is at {v} degrees"),
        ),
        Field(
            ("condition", "sky", "weather", "conditions"), "string", _of(lx.WEATHER), ("is {v}",)
        ),
        Field(("humidity",), "integer", _integer(5, 99), ("has {v} percent humidity",)),
        Field(("wind", "wind_speed"), "number", _decimal(0, 30), ("has wind of {v} km/h",)),
        Field(("rain", "raining", "is_raining"), "boolean", _boolean),
        Field(("unit", "units"), "string", _words("C|F|celsius|fahrenheit")),
        Field(("date",), "string", date),
        Field(("forecast", "days"), "array", _forecast),
    ),
    "contact": (
        Field(
            ("email", "email", "mail"),
            "string",
            email,
            ("has the email {v}", "can be reached at {v}"),
        ),
        Field(("phone", "phone_number", "mobile"), "string", _phone, ("has the number {v}",)),
        Field(("company", "employer"), "string", lx.town, ("works at {v}",)),
        Field(("address",), "object", _address),
        Field(("notes", "message"), "string", phrase),
        Field(("subscribed", "vip", "active"), "boolean", _boolean),
        Field(("emails",), "array", _list_of(email, 2)),
        Field(("title",), "string", _words("Mr|Mrs|Ms|Dr")),
    ),
    "recipe": (
        Field(("ingredients", "items"), "array", _list_of(_of(lx.FOODS)), ("needs {v}",)),
        Field(
            ("minutes", "time", "cook_time"), "integer", _integer(5, 120), ("takes {v} minutes",)
        ),
        Field(("servings", "portions"), "integer", _integer(1, 8), ("serves {v}",)),
        Field(
            ("vegetarian", "vegan", "spicy"),
            "boolean",
            _boolean,
            ("is vegetarian", "is not vegetarian"),
        ),
        Field(("steps", "instructions"), "array", _list_of(phrase, 4)),
        Field(("difficulty",), "string", _words("easy|medium|hard")),
        Field(("calories",), "integer", _integer(80, 900)),
    ),
    "task": (
        Field(("done", "completed", "urgent"), "boolean", _boolean, ("is done", "is not done")),
        Field(("due", "due_date", "deadline"), "string", date, ("is due on {v}",)),
        Field(("priority", "level"), "string", _words("low|medium|high")),
        Field(("assignee", "owner", "assigned_to"), "string", lx.first_name, ("is for {v}",)),
        Field(("tags", "subtasks", "steps"), "array", _list_of(phrase, 3)),
        Field(("estimate", "hours"), "number", _decimal(1, 20), ("takes {v} hours",)),
        Field(("description",), "string", phrase),
    ),
    "book": (
        Field(("author", "writer"), "string", full_name, ("was written by {v}",)),
        Field(("year", "published"), "integer", _integer(1800, 2030), ("is from {v}",)),
        Field(("pages", "page_count"), "integer", _integer(40, 900), ("has {v} pages",)),
        Field(("genre",), "string", _words("crime|history|poetry|science|children|fantasy|novel")),
        Field(("available", "read", "borrowed"), "boolean", _boolean),
        Field(("isbn",), "string", lambda rng, split: str(lx.between(rng, 10**8, 10**9))),
        Field(("price",), "number", _price, ("costs {v} euros",)),
    ),
    "trip": (
        Field(("from", "origin", "departure"), "string", lx.town, ("starts in {v}",)),
        Field(("to", "destination", "arrival"), "string", lx.town, ("goes to {v}",)),
        Field(("date", "departure_date"), "string", date, ("is on {v}",)),
        Field(
            ("passengers", "travellers", "seats", "nights"),
            "integer",
            _integer(1, 9),
            ("has {v} passengers",),
        ),
        Field(("price", "cost"), "number", _price, ("costs {v} euros",)),
        Field(("class", "seat_class"), "string", _words("economy|business|first")),
        Field(("refundable", "return", "direct"), "boolean", _boolean),
        Field(("stops", "cities"), "array", _list_of(lx.town, 3), ("goes by {v}",)),
    ),
    "pet": (
        Field(("species", "animal", "kind", "type"), "string", _of(lx.ANIMALS), ("is a {v}",)),
        Field(("age",), "integer", _integer(1, 20), ("is {v} years old",)),
        Field(("colour", "color"), "string", _of(lx.COLOURS), ("is {v}",)),
        Field(("vaccinated", "friendly"), "boolean", _boolean),
        Field(("owner",), "object", _owner),
        Field(("food", "favourite_food"), "string", _of(lx.FOODS), ("likes {v}",)),
        Field(("weight",), "number", _decimal(1, 60), ("weighs {v} kilos",)),
    ),
    "team": (
        Field(("members", "players", "people", "students"), "array", _persons),
        Field(("city",), "string", lx.town, ("is from {v}",)),
        Field(("points", "score", "wins"), "integer", _integer(0, 99), ("has {v} points",)),
        Field(("coach", "leader"), "string", full_name, ("is led by {v}",)),
        Field(("active",), "boolean", _boolean),
        Field(
            ("location", "position"),
            "object",
            lambda rng, split: {
                "lat": lx.between(rng, -900, 900) / 10,
                "lon": lx.between(rng, -1800, 1800) / 10,
            },
        ),
    ),
}
_SUBJECTS: dict[str, tuple[tuple[str, ...], Draw]] = {
    "person": (("name", "name", "name", "full_name", "first_name", "person"), full_name),
    "product": (("name", "product", "product_name", "title", "item"), _of(lx.THINGS)),
    "event": (("title", "event", "name", "summary"), _of(lx.EVENTS)),
    "order": (("order_id", "id", "order", "number"), lambda rng, split: lx.code(rng)),
    "review": (("title", "movie", "film", "book", "product"), phrase),
    "weather": (("city", "location", "place", "town"), lx.town),
    "contact": (("name", "name", "full_name", "contact"), full_name),
    "recipe": (("name", "dish", "title", "recipe"), _of(lx.FOODS)),
    "task": (("title", "task", "name"), phrase),
    "book": (("title", "name", "book"), phrase),
    "trip": (("id", "trip", "flight", "name"), lambda rng, split: lx.code(rng)),
    "pet": (("name", "pet", "pet_name"), lx.first_name),
    "team": (("name", "team", "class"), lx.town),
}
_THE = {"product", "event", "order", "review", "recipe", "task", "book", "trip", "team"}


def record(rng: Rng, split: Split, kind: str = "") -> list[Told]:
    """A subject and some of its fields; each field is told by a clause or untold."""
    kind = kind or lx.pick(rng, tuple(FIELDS))
    names, draw = _SUBJECTS[kind]
    value = draw(rng, split)
    subject = f"The {kind} {value}" if kind in _THE else str(value)
    told = [Told(lx.pick(rng, names), "string", value, subject)]
    fields = lx.sample(rng, FIELDS[kind], lx.between(rng, 1, min(6, len(FIELDS[kind]))))
    for field in fields:
        key = lx.pick(rng, field.keys)
        if all(key != other.key for other in told):
            told.append(_tell(rng, field, key, field.draw(rng, split)))
    return told


def _tell(rng: Rng, field: Field, key: str, value: Any) -> Told:
    if not field.tell or lx.chance(rng, 0.1):
        return Told(key, field.kind, value)
    if field.kind == "boolean":
        return Told(key, field.kind, value, field.tell[not value])
    shown = lx.listing(value) if isinstance(value, list) else value
    return Told(key, field.kind, value, lx.pick(rng, field.tell).format(v=shown))


def sentences(rng: Rng, told: list[Told]) -> str:
    """The told fields in one to three sentences."""
    subject, clauses = told[0].clause, [field.clause for field in told[1:] if field.clause]
    if not clauses:
        return lx.pick(rng, (f"This is about {subject}.", f"{subject}.", f"{subject}"))
    parts = []
    while clauses:
        count = lx.between(rng, 1, 3)
        parts.append(f"{subject} {lx.listing(clauses[:count])}.")
        clauses = clauses[count:]
    text = " ".join(parts)
    return text[:-1] if lx.chance(rng, 0.15) else text


def _free_key(rng: Rng, split: Split) -> str:
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
        return lx.pick(rng, (lx.town, lx.first_name, email, date, _clock, full_name))(rng, split)
    if style <= 5:
        return lx.pick(
            rng, (lx.between(rng, 0, 9), lx.between(rng, -20, 100), lx.between(rng, 0, 9999))
        )
    if style == 6:
        return lx.pick(rng, (_price(rng, split), lx.between(rng, 0, 100) / 100))
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
    return _lines(rng, split) if style == 1 else _persons(rng, split)


def free_object(rng: Rng, split: Split, depth: int = 0) -> dict:
    return {
        _free_key(rng, split): free_value(rng, split, depth) for _ in range(lx.between(rng, 1, 4))
    }


def free_record(rng: Rng, split: Split) -> list[Told]:
    count = lx.between(rng, 1, 6)
    fields = {_free_key(rng, split): free_value(rng, split) for _ in range(count)}
    return [Told(key, "", value) for key, value in fields.items()]
