"""Small talk: greetings, who the model is, remembering what the user said, personas, honest limits.

Owns the lines of small talk. Every answer is a function of the dialogue so far, so it can be scored
by exact match; the things to remember (names, towns, favourites) are drawn fresh for each chat.
"""

from dataclasses import dataclass

from checkpoints.recipe import lexicon as lx
from checkpoints.recipe.chat import Chat, Turn, reply, user
from checkpoints.recipe.lexicon import Rng, Split


def _split(text: str) -> list[str]:
    return text.split("|")


NAME = "jserve-mini"
DONT_KNOW = "I am a very small model and I don't know that."
_GREETINGS = ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there", "Hi there")
_TALK = (
    (("How are you?", "How are you doing?", "How is it going?"), "I am well, thank you!"),
    (
        ("What can you do?", "What can you help me with?", "What are you able to do?", "Help"),
        "I can answer questions about a text, do small sums, convert units, extract JSON, call "
        "tools, chat a little and write short stories.",
    ),
    (
        ("Who made you?", "Who trained you?", "Where do you come from?", "Who created you?"),
        "I was trained by the jserve project on text from its own recipe.",
    ),
    (
        ("Are you human?", "Are you a person?", "Are you a robot?", "Are you real?"),
        "No, I am a very small language model.",
    ),
    (
        ("How big are you?", "How many parameters do you have?"),
        "I have about four million parameters.",
    ),
    (
        ("Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much.", "Thx"),
        "You are welcome!",
    ),
    (("Bye!", "Goodbye!", "See you!", "See you later!", "Good night!"), "Goodbye!"),
    (("You are great!", "Well done!", "Good job!", "Nice!", "Great!"), "Thank you, that is kind!"),
    (("Ok", "OK", "I see.", "Alright."), "Is there anything else I can do?"),
)
_WHO = ("Who are you?", "What are you?", "What is your name?", "What's your name?", "Your name?")
_TOPICS = _split(
    "quantum physics|the stock market|the meaning of life|black holes|the French Revolution|"
    "machine learning|the Roman Empire|DNA|electric cars|philosophy|the moon landing|politics|"
    "medicine|jazz|volcanoes|the law|dinosaurs|the internet|bitcoin|climate change"
)
_UNKNOWN = (
    "Who is the president of {x}?",
    "What is the population of {x}?",
    "Explain {topic} to me.",
    "What do you think about {topic}?",
    "Tell me about {topic}.",
    "Who won the {event} in {x}?",
    "What happened in {x} in {year}?",
    "How do I repair my {object}?",
    "Who invented the {object}?",
    "What will happen tomorrow?",
    "What is the best {object} to buy?",
    "How far is it from {x} to {y}?",
    "How does {topic} work?",
    "Why is {topic} important?",
    "When was {person} born?",
    "Who is {person}?",
    "Write me a program in {x}.",
    "What time is it?",
    "What is the news today?",
)


@dataclass(frozen=True)
class Memory:
    tell: tuple[str, ...]
    noted: str
    recall: tuple[str, ...]
    answer: str


_MEMORIES = {
    "name": Memory(
        ("My name is {v}.", "I am {v}.", "I'm {v}.", "You can call me {v}.", "Call me {v}."),
        "Nice to meet you, {v}!",
        ("What is my name?", "What's my name?", "Do you remember my name?", "Who am I?"),
        "Your name is {v}.",
    ),
    "town": Memory(
        ("I live in {v}.", "I am from {v}.", "I come from {v}.", "My home is in {v}."),
        "I hear that {v} is a nice place.",
        ("Where do I live?", "Where am I from?", "Which town do I live in?"),
        "You live in {v}.",
    ),
    "colour": Memory(
        ("My favourite colour is {v}.", "I like the colour {v} best.", "I love {v} things."),
        "I will remember that you like {v}.",
        ("What is my favourite colour?", "Which colour do I like?", "What colour do I like best?"),
        "Your favourite colour is {v}.",
    ),
    "food": Memory(
        ("I love to eat {v}.", "My favourite food is {v}.", "I like {v}."),
        "That sounds tasty! I will remember {v}.",
        ("What do I like to eat?", "What is my favourite food?", "Which food do I like?"),
        "You like to eat {v}.",
    ),
    "pet": Memory(
        ("My pet is called {v}.", "I have a pet called {v}.", "The name of my pet is {v}."),
        "{v} is a lovely name for a pet!",
        ("What is my pet called?", "What is the name of my pet?", "Do you remember my pet?"),
        "Your pet is called {v}.",
    ),
    "job": Memory(
        ("I work as a {v}.", "My job is {v}.", "I earn my money as a {v}."),
        "Being a {v} sounds interesting.",
        ("What is my job?", "What do I work as?", "What do I do for work?"),
        "You work as a {v}.",
    ),
}


def _draw(rng: Rng, split: Split, kind: str) -> str:
    if kind == "town":
        return lx.town(rng, split)
    if kind in ("name", "pet"):
        return lx.person(rng, split)
    return lx.pick(rng, {"colour": lx.COLOURS, "food": lx.FOODS, "job": lx.JOBS}[kind])


def _exchange(rng: Rng, asked: str, said: str) -> tuple[Turn, Turn]:
    return user(lx.casual(rng, asked)), reply(said)


def _greeting(rng: Rng) -> tuple[Turn, Turn]:
    end = lx.pick(rng, ("!", ".", ""))
    return user(lx.casual(rng, lx.pick(rng, _GREETINGS) + end)), reply("Hello! How can I help you?")


def _who(rng: Rng, persona: str) -> tuple[Turn, Turn]:
    said = f"My name is {persona}." if persona else f"I am {NAME}, a very small demo model."
    return _exchange(rng, lx.pick(rng, _WHO), said)


def _unknown(rng: Rng, split: Split) -> tuple[Turn, Turn]:
    asked = lx.pick(rng, _UNKNOWN).format(
        x=lx.town(rng, split),
        y=lx.town(rng, split),
        topic=lx.pick(rng, _TOPICS),
        event=lx.pick(rng, lx.EVENTS),
        year=lx.between(rng, 1000, 2030),
        object=lx.pick(rng, lx.OBJECTS),
        person=lx.person(rng, split),
    )
    return _exchange(rng, asked, DONT_KNOW)


def small_talk(rng: Rng, split: Split, persona: str = "") -> tuple[Turn, ...]:
    """One exchange that needs nothing from earlier turns."""
    style = lx.between(rng, 0, 9)
    if style == 0:
        return _greeting(rng)
    if style <= 2:
        return _who(rng, persona)
    if style <= 4:
        return _unknown(rng, split)
    asks, said = lx.pick(rng, _TALK)
    return _exchange(rng, lx.pick(rng, asks), said)


def _persona(rng: Rng, split: Split) -> tuple[str, tuple[Turn, ...]]:
    if lx.chance(rng, 0.55):
        return "", ()
    if lx.chance(rng, 0.3):
        return "", (Turn("system", "You are a helpful assistant."),)
    name = lx.person(rng, split)
    forms = (
        "You are {n}, a helpful assistant.",
        "You are {n}.",
        "Your name is {n}.",
        "You are {n}, a friendly {j} in {t}.",
        "You are an assistant called {n}. Answer politely.",
    )
    text = lx.pick(rng, forms).format(n=name, j=lx.pick(rng, lx.JOBS), t=lx.town(rng, split))
    return name, (Turn("system", text),)


def generate(rng: Rng, split: Split) -> Chat:
    """Tell some things, talk about others, then be asked what was told."""
    persona, turns = _persona(rng, split)
    if lx.chance(rng, 0.3):
        turns += _greeting(rng)
    told = {}
    for kind in lx.sample(rng, tuple(_MEMORIES), lx.between(rng, 0, 3)):
        memory, told[kind] = _MEMORIES[kind], _draw(rng, split, kind)
        tell = lx.pick(rng, memory.tell).format(v=told[kind])
        turns += (user(tell), reply(memory.noted.format(v=told[kind])))
        if lx.chance(rng, 0.3):
            turns += small_talk(rng, split, persona)
    for kind in lx.sample(rng, tuple(_MEMORIES), 2) if told else ():
        turns += _recall(rng, kind, told)
    if not told or lx.chance(rng, 0.4):
        turns += small_talk(rng, split, persona)
    return Chat("dialogue", turns, thinking=lx.chance(rng, 0.7))


def _recall(rng: Rng, kind: str, told: dict[str, str]) -> tuple[Turn, Turn]:
    if kind not in told and lx.chance(rng, 0.7):
        kind = lx.pick(rng, tuple(told))
    memory = _MEMORIES[kind]
    answer = memory.answer.format(v=told[kind]) if kind in told else "You did not tell me that."
    return _exchange(rng, lx.pick(rng, memory.recall), answer)
