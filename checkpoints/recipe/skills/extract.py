"""JSON extraction: one or two sentences about a record, and the keys to pull out of them.

Owns record kinds, their sentences and the ways to ask. The keys asked for are a shuffled subset of
the record, sometimes with one the text does not mention, which must come back as null.
"""

import json

from checkpoints.recipe import lexicon as lx
from checkpoints.recipe.chat import Chat, ask
from checkpoints.recipe.lexicon import Rng, Split

_TEMPLATES = {
    "person": (
        "{name} is a {age} year old {job} from {city}.",
        "My name is {name}, I am {age} and I work as a {job} in {city}.",
        "In {city} lives {name}, a {job}, aged {age}.",
        "{name}, {age}, works as a {job} and lives in {city}.",
    ),
    "order": (
        "{customer} ordered {quantity} {item} for {price} euros.",
        "Please send {quantity} {item} to {customer}. The price is {price} euros.",
        "An order came in from {customer}: {quantity} {item}, {price} euros.",
        "For {price} euros {customer} bought {quantity} {item}.",
    ),
    "event": (
        "The {title} is on {day} at {time} in {place}.",
        "Join us for the {title} in {place} on {day}, starting at {time}.",
        "On {day} at {time} there will be a {title} in {place}.",
        "{place} hosts a {title} on {day}. It begins at {time}.",
    ),
    "trip": (
        "{name} travels from {origin} to {destination} on {date}.",
        "On {date} {name} takes the train from {origin} to {destination}.",
        "{name} booked a flight from {origin} to {destination} for {date}.",
    ),
    "contact": (
        "You can reach {name} at {email} or call {phone}.",
        "{name} has the email {email} and the phone number {phone}.",
        "Write to {email} or ring {phone} to talk to {name}.",
    ),
    "product": (
        "The {colour} {product} weighs {weight} grams and costs {price} euros.",
        "We sell a {colour} {product} for {price} euros. It weighs {weight} grams.",
        "This {product} is {colour}, costs {price} euros and weighs {weight} grams.",
    ),
}
_ASK = (
    "Extract {keys} as JSON: {text}",
    "Extract {keys} as JSON.\n\n{text}",
    "{text}\n\nGive me {keys} as JSON.",
    "Turn this into JSON with the keys {keys}: {text}",
    "Return JSON with {keys}.\nText: {text}",
    "{text} Write {keys} as JSON.",
)


def _email(rng: Rng, split: Split, name: str) -> str:
    return f"{name.lower()}@{lx.invented(rng, split)}.{lx.pick(rng, ('com', 'org', 'net'))}"


def _record(rng: Rng, split: Split, kind: str) -> dict:
    name = lx.person(rng, split)
    if kind == "person":
        job, city = lx.pick(rng, lx.JOBS), lx.town(rng, split)
        return {"name": name, "age": lx.between(rng, 5, 95), "job": job, "city": city}
    if kind == "order":
        count, price = lx.between(rng, 2, 99), lx.between(rng, 2, 999)
        item = lx.pick(rng, lx.GOODS)
        return {"customer": name, "item": item, "quantity": count, "price": price}
    if kind == "event":
        day, time = lx.pick(rng, lx.DAYS), lx.clock(rng)
        place = lx.town(rng, split)
        return {"title": lx.pick(rng, lx.EVENTS), "day": day, "time": time, "place": place}
    if kind == "trip":
        origin, destination = lx.distinct(rng, lx.town, split, 2)
        date = f"{lx.between(rng, 1, 28)} {lx.pick(rng, lx.MONTHS)}"
        return {"name": name, "origin": origin, "destination": destination, "date": date}
    if kind == "contact":
        phone = str(lx.between(rng, 10000, 999999))
        return {"name": name, "email": _email(rng, split, name), "phone": phone}
    weight, price = lx.between(rng, 10, 999), lx.between(rng, 2, 999)
    product, colour = lx.pick(rng, lx.OBJECTS), lx.pick(rng, lx.COLOURS)
    return {"product": product, "colour": colour, "weight": weight, "price": price}


def _keys(rng: Rng, record: dict) -> list[str]:
    keys = lx.sample(rng, list(record), lx.between(rng, 1, len(record)))
    if lx.chance(rng, 0.12):
        absent = [k for k in ("email", "age", "price", "day", "city") if k not in record]
        keys.insert(lx.between(rng, 0, len(keys)), lx.pick(rng, absent))
    return keys


def _name_keys(rng: Rng, keys: list[str]) -> str:
    style = lx.between(rng, 0, 2)
    if style == 0:
        return ", ".join(f'"{key}"' for key in keys)
    return lx.listing(keys) if style == 1 else ", ".join(keys)


def generate(rng: Rng, split: Split) -> Chat:
    kind = lx.pick(rng, tuple(_TEMPLATES))
    record = _record(rng, split, kind)
    text = lx.pick(rng, _TEMPLATES[kind]).format(**record)
    keys = _keys(rng, record)
    question = lx.pick(rng, _ASK).format(keys=_name_keys(rng, keys), text=text)
    answer = json.dumps({key: record.get(key) for key in keys}, ensure_ascii=False)
    chat = ask("extract", question, answer)
    return Chat(chat.skill, chat.turns, thinking=lx.chance(rng, 0.6))
