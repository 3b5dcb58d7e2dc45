"""Tool calls: declared tools, a request, the call, the tool's answer, the final sentence.

Owns the tool concepts. Names of tools and of their parameters are drawn from synonyms and invented
suffixes, so the call must be copied from the declaration in the prompt, not remembered.
"""

import json
from dataclasses import dataclass

from checkpoints.recipe import lexicon as lx
from checkpoints.recipe.chat import Call, Chat, Tool, Turn, reply, user
from checkpoints.recipe.lexicon import Rng, Split
from checkpoints.recipe.skills import dialogue

NO_TOOL = "I have no tool for that."


@dataclass(frozen=True)
class Concept:
    """`slots` maps a value kind to its parameter names; `result` draws the tool's JSON answer."""

    names: tuple[str, ...]
    description: tuple[str, ...]
    slots: tuple[tuple[str, tuple[str, ...]], ...]
    asks: tuple[str, ...]
    result: tuple[tuple[str, str], ...]
    said: str


CONCEPTS = (
    Concept(
        ("get_weather", "weather", "lookup_weather", "current_weather"),
        ("Get the weather in a city.", "Current weather for a place."),
        (("city", ("city", "location", "town", "place")),),
        (
            "What is the weather in {city}?",
            "What's the weather like in {city}?",
            "How is the weather in {city} today?",
            "Tell me the weather in {city}.",
            "Is it warm in {city}?",
        ),
        (("temperature", "degrees"), ("sky", "weather")),
        "It is {temperature} degrees and {sky} in {city}.",
    ),
    Concept(
        ("set_timer", "start_timer", "timer"),
        ("Start a timer.", "Set a timer for some minutes."),
        (("minutes", ("minutes", "duration", "length")),),
        (
            "Set a timer for {minutes} minutes.",
            "Start a {minutes} minute timer.",
            "Please set a timer for {minutes} minutes.",
            "Wake me in {minutes} minutes.",
        ),
        (("status", "ok"),),
        "The timer is set for {minutes} minutes.",
    ),
    Concept(
        ("send_message", "send_text", "message"),
        ("Send a message to a person.", "Send a text message."),
        (("person", ("to", "recipient", "person")), ("words", ("text", "body", "content"))),
        (
            "Send a message to {person}: {words}",
            "Tell {person} this: {words}",
            "Write to {person}: {words}",
            "Text {person}: {words}",
        ),
        (("status", "ok"),),
        "I sent your message to {person}.",
    ),
    Concept(
        ("get_stock", "check_stock", "inventory"),
        ("Look up how many items are in stock.", "Number of items in the store."),
        (("item", ("item", "product", "article")),),
        (
            "How many {item} are in stock?",
            "Do we have {item} in stock?",
            "Check the stock of {item}.",
            "How many {item} are left in the store?",
        ),
        (("count", "number"),),
        "There are {count} {item} in stock.",
    ),
    Concept(
        ("find_phone", "phone_lookup", "get_phone_number"),
        ("Find the phone number of a person.", "Look up a phone number."),
        (("person", ("name", "person", "who")),),
        (
            "What is the phone number of {person}?",
            "Find the phone number of {person}.",
            "Look up {person}'s phone number.",
            "I need to call {person}, what is the number?",
        ),
        (("phone", "digits"),),
        "The phone number of {person} is {phone}.",
    ),
    Concept(
        ("play_music", "play", "play_song"),
        ("Play music by an artist.", "Play a song of an artist."),
        (("person", ("artist", "singer", "name")),),
        (
            "Play music by {person}.",
            "Play something by {person}.",
            "I want to hear {person}.",
            "Put on a song by {person}.",
        ),
        (("status", "ok"),),
        "Now playing {person}.",
    ),
    Concept(
        ("book_table", "reserve_table", "reservation"),
        ("Book a table at a restaurant.", "Reserve a table."),
        (("place", ("restaurant", "place", "name")), ("people", ("people", "guests", "seats"))),
        (
            "Book a table at {place} for {people} people.",
            "Reserve a table for {people} people at {place}.",
            "I need a table for {people} at {place}.",
            "Get us a table at {place}, we are {people} people.",
        ),
        (("time", "clock"),),
        "Your table at {place} for {people} people is booked for {time}.",
    ),
    Concept(
        ("turn_on", "switch_on", "device_on"),
        ("Turn on a device in a room.", "Switch a device on."),
        (("device", ("device", "thing", "appliance")), ("room", ("room", "where", "area"))),
        (
            "Turn on the {device} in the {room}.",
            "Switch on the {device} in the {room}.",
            "Please turn the {device} in the {room} on.",
        ),
        (("status", "ok"),),
        "The {device} in the {room} is on now.",
    ),
    Concept(
        ("next_train", "find_train", "train_times"),
        ("Find the next train between two cities.", "Next train from one city to another."),
        (("city", ("from", "origin", "start")), ("goal", ("to", "destination", "goal"))),
        (
            "When is the next train from {city} to {goal}?",
            "Find a train from {city} to {goal}.",
            "I want to go from {city} to {goal} by train.",
        ),
        (("time", "clock"), ("platform", "number")),
        "The next train from {city} to {goal} leaves at {time} from platform {platform}.",
    ),
    Concept(
        ("add_to_list", "shopping_list_add", "add_item"),
        ("Add something to the shopping list.", "Put an item on the shopping list."),
        (("food", ("item", "what", "product")), ("people", ("count", "amount", "quantity"))),
        (
            "Add {people} {food} to the shopping list.",
            "Put {people} {food} on my shopping list.",
            "I need to buy {people} {food}, put it on the list.",
        ),
        (("status", "ok"),),
        "I added {people} {food} to the shopping list.",
    ),
    Concept(
        ("get_price", "price_of", "lookup_price"),
        ("Get the price of a product.", "Look up a price in euros."),
        (("device", ("product", "item", "name")),),
        (
            "How much is the {device}?",
            "What does the {device} cost?",
            "Find the price of the {device}.",
        ),
        (("price", "number"),),
        "The {device} costs {price} euros.",
    ),
)
_INTEGERS = ("minutes", "people")


def _value(rng: Rng, split: Split, kind: str):
    if kind in ("city", "goal", "place"):
        return lx.town(rng, split)
    if kind == "person":
        return lx.person(rng, split)
    if kind == "words":
        return _message(rng, split)
    if kind in _INTEGERS:
        return lx.between(rng, 2, 60)
    pools = {"item": lx.GOODS, "device": lx.OBJECTS, "room": lx.PLACES, "food": lx.FOODS}
    return lx.pick(rng, pools[kind])


def _message(rng: Rng, split: Split) -> str:
    forms = (
        "the {e} is on {d}",
        "I am in {t} now",
        "please bring the {o}",
        "the code is {c}",
        "see you at {k}",
        "thank you for the {o}",
    )
    return lx.pick(rng, forms).format(
        e=lx.pick(rng, lx.EVENTS),
        d=lx.pick(rng, lx.DAYS),
        t=lx.town(rng, split),
        o=lx.pick(rng, lx.OBJECTS),
        c=lx.code(rng),
        k=lx.clock(rng),
    )


def _outcome(rng: Rng, kind: str):
    if kind == "degrees":
        return lx.between(rng, -9, 38)
    if kind == "number":
        return lx.between(rng, 1, 99)
    if kind == "digits":
        return str(lx.between(rng, 1000, 99999))
    if kind == "clock":
        return lx.clock(rng)
    return "ok" if kind == "ok" else lx.pick(rng, lx.WEATHER)


@dataclass(frozen=True)
class Declared:
    """A concept as declared in one chat: the tool, and which parameter carries which slot."""

    concept: Concept
    tool: Tool
    parameter_of: dict[str, str]


def _declare(rng: Rng, split: Split, concept: Concept) -> Declared:
    name = lx.pick(rng, concept.names)
    if lx.chance(rng, 0.25):
        name += "_" + lx.invented(rng, split)
    parameter_of = {slot: lx.pick(rng, names) for slot, names in concept.slots}
    kinds = {p: "integer" if s in _INTEGERS else "string" for s, p in parameter_of.items()}
    return Declared(concept, Tool(name, lx.pick(rng, concept.description), kinds), parameter_of)


def _use(rng: Rng, split: Split, declared: Declared) -> tuple[Turn, ...]:
    concept = declared.concept
    values = {slot: _value(rng, split, slot) for slot, _ in concept.slots}
    asked = lx.pick(rng, concept.asks).format(**values)
    if not any(slot == "words" for slot, _ in concept.slots):
        asked = lx.casual(rng, asked)
    arguments = {declared.parameter_of[slot]: value for slot, value in values.items()}
    result = {key: _outcome(rng, kind) for key, kind in concept.result}
    call = Turn("assistant", call=Call(declared.tool.name, arguments))
    said = concept.said.format(**values, **result)
    answer = Turn("tool", json.dumps(result, ensure_ascii=False))
    return user(asked), call, answer, reply(said)


def _setting(rng: Rng, split: Split) -> tuple[list[Declared], tuple[Tool, ...], tuple[Turn, ...]]:
    declared = [_declare(rng, split, c) for c in lx.sample(rng, CONCEPTS, lx.between(rng, 1, 3))]
    system = lx.pick(rng, ("", "", "You are a helpful assistant.", "Use the tools if needed."))
    start = (Turn("system", system),) if system else ()
    return declared, tuple(d.tool for d in declared), start


def generate(rng: Rng, split: Split) -> Chat:
    """Half of the chats end with the call, half with the answer from the tool's result."""
    declared, tools, start = _setting(rng, split)
    turns = _use(rng, split, lx.pick(rng, declared))
    if lx.chance(rng, 0.4):
        start += turns
        turns = _use(rng, split, lx.pick(rng, declared))
    if lx.chance(rng, 0.5):
        return Chat("tool_call", start + turns[:2], tools, thinking=lx.chance(rng, 0.6))
    return Chat("tool_answer", start + turns, tools, thinking=lx.chance(rng, 0.6))


def generate_unneeded(rng: Rng, split: Split) -> Chat:
    """Tools are declared but the user wants none of them, or one that is not there."""
    declared, tools, start = _setting(rng, split)
    absent = [c for c in CONCEPTS if all(c is not d.concept for d in declared)]
    if lx.chance(rng, 0.5):
        asked, *_ = _use(rng, split, _declare(rng, split, lx.pick(rng, absent)))
        turns: tuple[Turn, ...] = (asked, reply(NO_TOOL))
    else:
        turns = dialogue.small_talk(rng, split)
    return Chat("tool_unneeded", start + turns, tools, thinking=lx.chance(rng, 0.6))
