"""Passage questions: small worlds told in a few sentences, and questions to be read off them.

Owns the fact kinds (how a fact is told, asked from either side, and answered). Answers copy names,
codes and times from the passage; a question about something untold gets `NOT_SAID`.
"""

from dataclasses import dataclass

from checkpoints.recipe import lexicon as lx
from checkpoints.recipe.chat import Chat, Turn, reply, user
from checkpoints.recipe.lexicon import Rng, Split

NOT_SAID = "The text does not say."


@dataclass(frozen=True)
class Kind:
    """`{s}` is the subject, `{v}` the value. `back` asks for the subject given the value."""

    subject: str  # person, shop, event, object, door
    draw: object
    tell: tuple[str, ...]
    ask: tuple[str, ...]
    answer: str
    back: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fact:
    kind: Kind
    subject: str
    value: str


def _word(items):
    return lambda rng, split: lx.pick(rng, items)


def _number(low, high):
    return lambda rng, split: str(lx.between(rng, low, high))


def _animal(rng: Rng, split: Split) -> str:
    name = lx.invented(rng, split).capitalize()
    return f"{lx.a(lx.pick(rng, lx.ANIMALS))} called {name}"


def _coloured(rng: Rng, split: Split) -> str:
    return f"{lx.pick(rng, lx.COLOURS)} {lx.pick(rng, lx.OBJECTS)}"


KINDS = (
    Kind(
        "person",
        lx.town,
        ("{s} lives in {v}.", "{s} has a house in {v}.", "The home of {s} is in {v}."),
        ("Where does {s} live?", "Which town does {s} live in?", "In which city does {s} live?"),
        "{s} lives in {v}.",
        ("Who lives in {v}?", "Which person lives in {v}?"),
    ),
    Kind(
        "person",
        _word(lx.JOBS),
        ("{s} works as a {v}.", "{s} is a {v}.", "{s} earns money as a {v}."),
        ("What is {s}'s job?", "What does {s} do for work?", "What is the job of {s}?"),
        "{s} works as a {v}.",
        ("Who works as a {v}?", "Who is a {v}?"),
    ),
    Kind(
        "person",
        _word(lx.FOODS),
        ("{s} likes {v}.", "{s} loves to eat {v}.", "The favourite food of {s} is {v}."),
        ("What does {s} like to eat?", "What food does {s} like?", "What is {s}'s favourite food?"),
        "{s} likes {v}.",
        ("Who likes {v}?", "Who likes to eat {v}?"),
    ),
    Kind(
        "person",
        _number(6, 89),
        ("{s} is {v} years old.", "{s} turned {v} this year.", "The age of {s} is {v}."),
        ("How old is {s}?", "What is the age of {s}?", "What age is {s}?"),
        "{s} is {v} years old.",
        ("Who is {v} years old?",),
    ),
    Kind(
        "person",
        _animal,
        ("{s} has {v}.", "{s} looks after {v}.", "At home {s} keeps {v}."),
        ("What pet does {s} have?", "Which animal does {s} have?", "Does {s} have a pet?"),
        "{s} has {v}.",
    ),
    Kind(
        "person",
        _word(lx.HOBBIES),
        ("{s} enjoys {v}.", "In the evening {s} enjoys {v}.", "{s} spends weekends on {v}."),
        ("What is {s}'s hobby?", "What does {s} enjoy?", "What does {s} do for fun?"),
        "{s} enjoys {v}.",
        ("Who enjoys {v}?",),
    ),
    Kind(
        "person",
        _coloured,
        ("{s} bought a {v}.", "Last week {s} bought a {v}.", "{s} went out and bought a {v}."),
        ("What did {s} buy?", "Which thing did {s} buy?"),
        "{s} bought a {v}.",
        ("Who bought a {v}?", "Who bought the {v}?"),
    ),
    Kind(
        "person",
        lambda rng, split: str(lx.between(rng, 1000, 99999)),
        ("{s} has the phone number {v}.", "To reach {s}, call {v}.", "You can call {s} at {v}."),
        ("What is {s}'s phone number?", "Which number reaches {s}?", "How can I call {s}?"),
        "The phone number of {s} is {v}.",
    ),
    Kind(
        "shop",
        lambda rng, split: lx.clock(rng),
        ("The {s} opens at {v}.", "You can enter the {s} from {v} on."),
        (
            "When does the {s} open?",
            "At what time does the {s} open?",
            "What time does the {s} open?",
        ),
        "The {s} opens at {v}.",
        ("What opens at {v}?",),
    ),
    Kind(
        "shop",
        lambda rng, split: lx.clock(rng),
        ("The {s} closes at {v}.", "The doors of the {s} close at {v}."),
        ("When does the {s} close?", "At what time does the {s} close?"),
        "The {s} closes at {v}.",
        ("What closes at {v}?",),
    ),
    Kind(
        "shop",
        _number(2, 95),
        ("A ticket for the {s} costs {v} euros.", "Entry to the {s} costs {v} euros."),
        ("How much does a ticket for the {s} cost?", "What does the {s} cost?"),
        "The {s} costs {v} euros.",
    ),
    Kind(
        "shop",
        lambda rng, split: lx.invented(rng, split).capitalize() + " Street",
        ("The {s} is in {v}.", "You find the {s} in {v}."),
        ("Where is the {s}?", "In which street is the {s}?", "On what street is the {s}?"),
        "The {s} is in {v}.",
        ("What is in {v}?", "Which place is in {v}?"),
    ),
    Kind(
        "event",
        _word(lx.DAYS),
        ("The {s} is on {v}.", "The {s} takes place on {v}.", "They planned the {s} for {v}."),
        ("When is the {s}?", "On which day is the {s}?", "What day is the {s}?"),
        "The {s} is on {v}.",
        ("What happens on {v}?", "What is on {v}?"),
    ),
    Kind(
        "event",
        lx.person,
        ("{v} leads the {s}.", "The {s} is led by {v}.", "The leader of the {s} is {v}."),
        ("Who leads the {s}?", "Who is the leader of the {s}?"),
        "{v} leads the {s}.",
        ("What does {v} lead?",),
    ),
    Kind(
        "object",
        _word(lx.PLACES),
        (
            "The {s} is in the {v}.",
            "Someone left the {s} in the {v}.",
            "The {s} stands in the {v}.",
        ),
        ("Where is the {s}?", "In which room is the {s}?", "Where can I find the {s}?"),
        "The {s} is in the {v}.",
        ("What is in the {v}?",),
    ),
    Kind(
        "object",
        _word(lx.COLOURS),
        ("The {s} is {v}.", "The colour of the {s} is {v}.", "Somebody painted the {s} {v}."),
        ("What colour is the {s}?", "Which colour does the {s} have?", "What color is the {s}?"),
        "The {s} is {v}.",
        ("What is {v}?", "Which thing is {v}?"),
    ),
    Kind(
        "object",
        lx.person,
        ("The {s} belongs to {v}.", "{v} owns the {s}.", "The owner of the {s} is {v}."),
        ("Who owns the {s}?", "Whose {s} is it?", "Who does the {s} belong to?"),
        "The {s} belongs to {v}.",
        ("What belongs to {v}?", "What does {v} own?"),
    ),
    Kind(
        "door",
        lambda rng, split: lx.code(rng),
        ("The code for the {s} is {v}.", "To open the {s}, type {v}.", "The {s} opens with {v}."),
        ("What is the code for the {s}?", "How do I open the {s}?", "Which code opens the {s}?"),
        "The code for the {s} is {v}.",
    ),
)
_PUT_FIRST = ("Read the text and answer the question.", "Answer from the text.", "Use this text.")
_DOORS = [f"{place} door" for place in lx.PLACES] + ["safe", "locker", "gate", "front door"]


def _subjects(rng: Rng, split: Split, subject: str, count: int) -> list[str]:
    if subject == "person":
        return lx.distinct(rng, lx.person, split, count)
    pool = {"shop": lx.SHOPS, "event": lx.EVENTS, "object": lx.OBJECTS, "door": _DOORS}[subject]
    return lx.sample(rng, pool, count)


def world(rng: Rng, split: Split, size: int) -> list[Fact]:
    """`size` facts; every (kind, subject) and every value appears once, so answers are unique."""
    themes = lx.sample(rng, ("person", "person", "shop", "event", "object", "door"), 2)
    pairs = []
    for subject in dict.fromkeys(themes):
        kinds = [kind for kind in KINDS if kind.subject == subject]
        names = _subjects(rng, split, subject, min(3 + size // 4, 12))
        pairs += [(kind, name) for kind in kinds for name in names]
    facts, used = [], set()
    for index in rng.permutation(len(pairs)):
        kind, name = pairs[index]
        value = kind.draw(rng, split)
        if value not in used and len(facts) < size:
            used.add(value)
            facts.append(Fact(kind, name, value))
    return facts


def tell(rng: Rng, facts: list[Fact]) -> str:
    sentences = [lx.pick(rng, f.kind.tell).format(s=f.subject, v=f.value) for f in facts]
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def question(rng: Rng, split: Split, facts: list[Fact]) -> tuple[str, str]:
    """A question about the facts and its one right answer."""
    fact = facts[lx.between(rng, 0, len(facts) - 1)]
    kind = fact.kind
    untold = _unanswerable(rng, split, facts, fact) if lx.chance(rng, 0.15) else None
    if untold is not None:
        return untold
    forms = kind.back if kind.back and lx.chance(rng, 0.25) else kind.ask
    asked = lx.pick(rng, forms).format(s=fact.subject, v=fact.value)
    said = kind.answer.format(s=fact.subject, v=fact.value)
    return asked, said[0].upper() + said[1:]


def _unanswerable(rng: Rng, split: Split, facts: list[Fact], fact: Fact) -> tuple[str, str] | None:
    """Ask about an untold subject, or about an untold side of a known one; None if all is told."""
    told = {(f.kind, f.subject) for f in facts}
    kinds = [k for k in KINDS if k.subject == fact.kind.subject]
    strangers = _subjects(rng, split, fact.kind.subject, 4)
    names = [fact.subject, *strangers]
    options = [(k, n) for k in kinds for n in names if (k, n) not in told]
    if not options:
        return None
    kind, name = lx.pick(rng, options)
    return lx.pick(rng, kind.ask).format(s=name), NOT_SAID


def frame(rng: Rng, passage: str, asked: str) -> str:
    style = lx.between(rng, 0, 4)
    if style == 0:
        return f"{lx.pick(rng, _PUT_FIRST)}\n\n{passage}\n\nQuestion: {asked}"
    if style == 1:
        return f"{asked}\n\n{passage}"
    if style == 2:
        return f"Text: {passage}\nQuestion: {asked}"
    return f"{passage}\n\n{asked}" if style == 3 else f"{passage} {asked}"


def _turns(rng: Rng, split: Split, facts: list[Fact], count: int) -> tuple[Turn, ...]:
    passage = tell(rng, facts)
    asked, said = question(rng, split, facts)
    turns = [user(frame(rng, passage, lx.casual(rng, asked))), reply(said)]
    for _ in range(count - 1):
        asked, said = question(rng, split, facts)
        turns += [user(lx.casual(rng, asked)), reply(said)]
    return tuple(turns)


def generate(rng: Rng, split: Split) -> Chat:
    facts = world(rng, split, lx.between(rng, 3, 8))
    return Chat("passage", _turns(rng, split, facts, lx.pick(rng, (1, 2, 4, 6))))


def generate_long(rng: Rng, split: Split, sentences: int) -> Chat:
    """A passage that fills a long row, so that copying is practised over real distances."""
    facts: list[Fact] = []
    seen: set[str] = set()
    for _ in range(sentences // 8):
        for fact in world(rng, split, 12):
            if fact.subject not in seen and fact.value not in seen:
                seen |= {fact.value}
                facts.append(fact)
        seen |= {fact.subject for fact in facts}
    facts = facts[:sentences]
    return Chat("passage_long", _turns(rng, split, facts, 8))


def plain(rng: Rng, split: Split) -> str:
    return tell(rng, world(rng, split, lx.between(rng, 3, 8)))
