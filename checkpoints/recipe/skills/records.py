"""Records for JSON skills: everyday things with typed fields, and how sentences tell them.

Each field has key names, a JSON type, values and the clause that tells it. A record may nest
objects and lists; free records have arbitrary keys, for JSON about nothing that was told.
"""

from dataclasses import dataclass
from typing import Any

from checkpoints.recipe import lexicon as lx
from checkpoints.recipe.lexicon import Rng, Split
from checkpoints.recipe.skills.values import (
    ADJECTIVES,
    COUNTRIES,
    Draw,
    address,
    boolean,
    clock,
    date,
    decimal,
    email,
    forecast,
    free_key,
    free_value,
    full_name,
    integer,
    lines,
    list_of,
    of,
    owner,
    persons,
    phone,
    phrase,
    price,
    words,
)


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


_SENTIMENTS = ("positive", "negative", "neutral", "mixed")

FIELDS: dict[str, tuple[Field, ...]] = {
    "person": (
        Field(
            ("age", "age", "age_years", "years"),
            "integer",
            integer(3, 95),
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
            of(lx.JOBS),
            ("works as a {v}", "is a {v}"),
        ),
        Field(("email", "email_address", "mail"), "string", email, ("has the email {v}",)),
        Field(("phone", "phone_number", "tel"), "string", phone, ("has the phone number {v}",)),
        Field(("married", "is_married"), "boolean", boolean, ("is married", "is not married")),
        Field(("student", "is_student"), "boolean", boolean, ("is a student", "is not a student")),
        Field(
            ("hobbies", "interests", "likes"),
            "array",
            list_of(of(lx.HOBBIES)),
            ("likes {v}", "enjoys {v}"),
        ),
        Field(("children", "kids", "siblings"), "integer", integer(0, 6), ("has {v} children",)),
        Field(("height", "height_m"), "number", decimal(1, 2), ("is {v} metres tall",)),
        Field(("address", "home_address"), "object", address),
        Field(
            ("favourite_colour", "color", "favorite_color"),
            "string",
            of(lx.COLOURS),
            ("likes the colour {v}",),
        ),
        Field(("birthday", "date_of_birth", "born"), "string", date, ("was born on {v}",)),
        Field(("gender",), "string", words("female|male|other")),
        Field(("country", "nationality"), "string", of(COUNTRIES), ("comes from {v}",)),
    ),
    "product": (
        Field(
            ("price", "price", "cost", "amount"),
            "number",
            price,
            ("costs {v} euros", "is sold for {v} dollars"),
        ),
        Field(("currency",), "string", words("EUR|USD|GBP")),
        Field(
            ("in_stock", "available", "stock"), "boolean", boolean, ("is in stock", "is sold out")
        ),
        Field(("colour", "color"), "string", of(lx.COLOURS), ("is {v}",)),
        Field(("weight", "weight_g", "grams"), "number", integer(10, 999), ("weighs {v} grams",)),
        Field(
            ("quantity", "count", "units"), "integer", integer(1, 99), ("comes in packs of {v}",)
        ),
        Field(
            ("category", "type"),
            "string",
            words("kitchen|garden|toys|books|food|sport|music|office|home"),
        ),
        Field(("tags", "labels", "colours"), "array", list_of(of(lx.COLOURS + ADJECTIVES))),
        Field(("rating", "stars", "score"), "number", decimal(1, 5), ("has {v} stars",)),
        Field(("description", "summary", "text"), "string", phrase),
        Field(("brand", "maker"), "string", lx.town, ("is made by {v}",)),
        Field(("sku", "id", "code"), "string", lambda rng, split: lx.code(rng)),
    ),
    "event": (
        Field(("date", "day", "start_date"), "string", date, ("is on {v}", "takes place on {v}")),
        Field(("day", "weekday", "when"), "string", of(lx.DAYS), ("is on {v}",)),
        Field(("time", "start", "start_time"), "string", clock, ("starts at {v}", "begins at {v}")),
        Field(("location", "place", "room", "where"), "string", of(lx.ROOMS), ("is in the {v}",)),
        Field(("city",), "string", lx.town, ("is in {v}",)),
        Field(
            ("attendees", "guests", "participants", "people"),
            "array",
            list_of(lx.first_name),
            ("is for {v}",),
        ),
        Field(("organizer", "host"), "string", full_name, ("is led by {v}",)),
        Field(("all_day", "public", "online"), "boolean", boolean),
        Field(
            ("duration", "duration_minutes", "minutes"),
            "integer",
            integer(10, 180),
            ("takes {v} minutes",),
        ),
        Field(("notes", "description"), "string", phrase),
        Field(("reminder",), "boolean", boolean),
    ),
    "order": (
        Field(("customer", "buyer", "customer_name"), "string", full_name, ("was placed by {v}",)),
        Field(("items", "lines", "products"), "array", lines),
        Field(("total", "price", "amount", "total_price"), "number", price, ("costs {v} euros",)),
        Field(("paid", "shipped", "express"), "boolean", boolean, ("is paid", "is not paid")),
        Field(("date", "order_date"), "string", date, ("was placed on {v}",)),
        Field(("status",), "string", words("open|paid|shipped|new|done|cancelled")),
        Field(("address", "shipping_address"), "object", address),
        Field(("quantity",), "integer", integer(1, 40), ("has {v} items",)),
        Field(("email",), "string", email),
    ),
    "review": (
        Field(
            ("rating", "stars", "score"),
            "integer",
            integer(1, 5),
            ("gets {v} stars", "has {v} of 5 stars"),
        ),
        Field(
            ("rating", "verdict", "quality"),
            "string",
            words("good|bad|great|poor|average|excellent"),
        ),
        Field(("sentiment",), "string", of(_SENTIMENTS)),
        Field(("summary", "comment", "review", "text"), "string", phrase),
        Field(("reviewer", "author", "user"), "string", full_name, ("was reviewed by {v}",)),
        Field(("year", "released"), "integer", integer(1950, 2030), ("is from {v}",)),
        Field(("recommended", "recommend", "spoilers"), "boolean", boolean),
        Field(("pros", "cons", "keywords", "genres"), "array", list_of(phrase, 3)),
        Field(("genre",), "string", words("drama|comedy|action|horror|family|crime")),
    ),
    "weather": (
        Field(
            ("temperature", "temp", "degrees"),
            "number",
            integer(-12, 38),
            ("has {v} degrees", "is at {v} degrees"),
        ),
        Field(("condition", "sky", "weather", "conditions"), "string", of(lx.WEATHER), ("is {v}",)),
        Field(("humidity",), "integer", integer(5, 99), ("has {v} percent humidity",)),
        Field(("wind", "wind_speed"), "number", decimal(0, 30), ("has wind of {v} km/h",)),
        Field(("rain", "raining", "is_raining"), "boolean", boolean),
        Field(("unit", "units"), "string", words("C|F|celsius|fahrenheit")),
        Field(("date",), "string", date),
        Field(("forecast", "days"), "array", forecast),
    ),
    "contact": (
        Field(
            ("email", "email", "mail"),
            "string",
            email,
            ("has the email {v}", "can be reached at {v}"),
        ),
        Field(("phone", "phone_number", "mobile"), "string", phone, ("has the number {v}",)),
        Field(("company", "employer"), "string", lx.town, ("works at {v}",)),
        Field(("address",), "object", address),
        Field(("notes", "message"), "string", phrase),
        Field(("subscribed", "vip", "active"), "boolean", boolean),
        Field(("emails",), "array", list_of(email, 2)),
        Field(("title",), "string", words("Mr|Mrs|Ms|Dr")),
    ),
    "recipe": (
        Field(("ingredients", "items"), "array", list_of(of(lx.FOODS)), ("needs {v}",)),
        Field(("minutes", "time", "cook_time"), "integer", integer(5, 120), ("takes {v} minutes",)),
        Field(("servings", "portions"), "integer", integer(1, 8), ("serves {v}",)),
        Field(
            ("vegetarian", "vegan", "spicy"),
            "boolean",
            boolean,
            ("is vegetarian", "is not vegetarian"),
        ),
        Field(("steps", "instructions"), "array", list_of(phrase, 4)),
        Field(("difficulty",), "string", words("easy|medium|hard")),
        Field(("calories",), "integer", integer(80, 900)),
    ),
    "task": (
        Field(("done", "completed", "urgent"), "boolean", boolean, ("is done", "is not done")),
        Field(("due", "due_date", "deadline"), "string", date, ("is due on {v}",)),
        Field(("priority", "level"), "string", words("low|medium|high")),
        Field(("assignee", "owner", "assigned_to"), "string", lx.first_name, ("is for {v}",)),
        Field(("tags", "subtasks", "steps"), "array", list_of(phrase, 3)),
        Field(("estimate", "hours"), "number", decimal(1, 20), ("takes {v} hours",)),
        Field(("description",), "string", phrase),
    ),
    "book": (
        Field(("author", "writer"), "string", full_name, ("was written by {v}",)),
        Field(("year", "published"), "integer", integer(1800, 2030), ("is from {v}",)),
        Field(("pages", "page_count"), "integer", integer(40, 900), ("has {v} pages",)),
        Field(("genre",), "string", words("crime|history|poetry|science|children|fantasy|novel")),
        Field(("available", "read", "borrowed"), "boolean", boolean),
        Field(("isbn",), "string", lambda rng, split: str(lx.between(rng, 10**8, 10**9))),
        Field(("price",), "number", price, ("costs {v} euros",)),
    ),
    "trip": (
        Field(("from", "origin", "departure"), "string", lx.town, ("starts in {v}",)),
        Field(("to", "destination", "arrival"), "string", lx.town, ("goes to {v}",)),
        Field(("date", "departure_date"), "string", date, ("is on {v}",)),
        Field(
            ("passengers", "travellers", "seats", "nights"),
            "integer",
            integer(1, 9),
            ("has {v} passengers",),
        ),
        Field(("price", "cost"), "number", price, ("costs {v} euros",)),
        Field(("class", "seat_class"), "string", words("economy|business|first")),
        Field(("refundable", "return", "direct"), "boolean", boolean),
        Field(("stops", "cities"), "array", list_of(lx.town, 3), ("goes by {v}",)),
    ),
    "pet": (
        Field(("species", "animal", "kind", "type"), "string", of(lx.ANIMALS), ("is a {v}",)),
        Field(("age",), "integer", integer(1, 20), ("is {v} years old",)),
        Field(("colour", "color"), "string", of(lx.COLOURS), ("is {v}",)),
        Field(("vaccinated", "friendly"), "boolean", boolean),
        Field(("owner",), "object", owner),
        Field(("food", "favourite_food"), "string", of(lx.FOODS), ("likes {v}",)),
        Field(("weight",), "number", decimal(1, 60), ("weighs {v} kilos",)),
    ),
    "team": (
        Field(("members", "players", "people", "students"), "array", persons),
        Field(("city",), "string", lx.town, ("is from {v}",)),
        Field(("points", "score", "wins"), "integer", integer(0, 99), ("has {v} points",)),
        Field(("coach", "leader"), "string", full_name, ("is led by {v}",)),
        Field(("active",), "boolean", boolean),
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
    "product": (("name", "product", "product_name", "title", "item"), of(lx.THINGS)),
    "event": (("title", "event", "name", "summary"), of(lx.EVENTS)),
    "order": (("order_id", "id", "order", "number"), lambda rng, split: lx.code(rng)),
    "review": (("title", "movie", "film", "book", "product"), phrase),
    "weather": (("city", "location", "place", "town"), lx.town),
    "contact": (("name", "name", "full_name", "contact"), full_name),
    "recipe": (("name", "dish", "title", "recipe"), of(lx.FOODS)),
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


def free_record(rng: Rng, split: Split) -> list[Told]:
    count = lx.between(rng, 1, 6)
    fields = {free_key(rng, split): free_value(rng, split) for _ in range(count)}
    return [Told(key, "", value) for key, value in fields.items()]
