"""Scenes of people and things: who has what, who gave what to whom, where something is, who did what.

Every name, thing and place of a chat is drawn once from one `Cast`, so scenes can be told together and each
question keeps one right answer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from checkpoints.recipe import lexicon as lx
from checkpoints.recipe.lexicon import Rng, Split

_NUMBERS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]


@dataclass
class Scene:
    """`asks` are (question, answer); `untold` are questions that the sentences leave open."""

    sentences: list[str]
    asks: list[tuple[str, str]]
    untold: list[str] = field(default_factory=list)


class Cast:
    """Draws that never repeat inside one chat."""

    def __init__(self, rng: Rng, split: Split):
        self.rng = rng
        self.split: Split = split
        self._used: set[str] = set()

    def _fresh(self, draw: Callable[[], str]) -> str:
        for _ in range(10_000):
            if (word := draw()) not in self._used:
                self._used.add(word)
                return word
        raise RuntimeError(f"{word!r} and all its like are used up in this chat")

    def of(self, items) -> str:
        return self._fresh(lambda: lx.pick(self.rng, items))

    def person(self) -> str:
        return self._fresh(lambda: lx.first_name(self.rng, self.split))

    def town(self) -> str:
        return self._fresh(lambda: lx.town(self.rng, self.split))

    def thing(self) -> str:
        return self.of(lx.THINGS)

    def coloured(self, thing: str | None = None) -> str:
        return f"{self.of(lx.COLOURS)} {thing or self.thing()}"

    def somebody(self) -> str:
        """A name or a role, as a sentence starts with it."""
        if lx.chance(self.rng, 0.75):
            return self.person()
        return f"the {self.of(lx.ROLES)}"

    def somewhere(self) -> str:
        return self.of(lx.WHERE)


def _start(text: str) -> str:
    return text[0].upper() + text[1:]


_HAS = (
    ("has", "have"),
    ("has", "have"),
    ("has", "have"),
    ("owns", "own"),
    ("holds", "hold"),
    ("carries", "carry"),
    ("wants", "want"),
    ("likes", "like"),
    ("bought", "buy"),
    ("found", "find"),
    ("brought", "bring"),
    ("lost", "lose"),
    ("is holding", None),
    ("got", "get"),
    ("saw", "see"),
    ("painted", "paint"),
)


_PAST = ("bought", "found", "brought", "lost", "got", "saw", "painted")


def _do(verb: str) -> str:
    return "did" if verb in _PAST else "does"


def possession(cast: Cast, owners: int = 0) -> Scene:
    """Each person has a thing; often, with `owners` people always, the same in different colours."""
    rng, same = cast.rng, cast.thing() if owners or lx.chance(cast.rng, 0.55) else None
    verb, base = lx.pick(rng, _HAS)
    people = [cast.somebody() for _ in range(owners or lx.between(rng, 1, 3))]
    scene = Scene([], [])
    for who in people:
        colour, noun = cast.of(lx.COLOURS), same or cast.thing()
        thing = f"{colour} {noun}" if same or lx.chance(rng, 0.6) else noun
        scene.sentences.append(f"{_start(who)} {verb} {lx.a(thing)}.")
        said = f"{_start(who)} {verb} the {thing}."
        scene.asks += [(f"Who {verb} the {thing}?", said), (f"Who {verb} {lx.a(thing)}?", said)]
        if base:
            scene.asks.append(
                (f"What {_do(verb)} {who} {base}?", f"{_start(who)} {verb} {lx.a(thing)}.")
            )
        if thing != noun and verb in ("has", "owns"):
            asked = (f"What colour is {who}'s {noun}?", f"What color is {who}'s {noun}?")
            said = f"{_start(who)}'s {noun} is {colour}."
            scene.asks.append((lx.pick(rng, asked), said))
            asked = f"Which {noun} does {who} have?"
            scene.asks.append((asked, f"{_start(who)} {verb} the {thing}."))
    if same and verb == "has":
        _yes_or_no(cast, scene, people, same)
    scene.untold = [f"Who {verb} the {cast.coloured(same)}?"]
    if base:
        scene.untold.append(f"What {_do(verb)} {cast.person()} {base}?")
    return scene


def _yes_or_no(cast: Cast, scene: Scene, people: list[str], noun: str) -> None:
    for who, sentence in zip(people, list(scene.sentences), strict=True):
        owned = sentence.split(" has ", 1)[1].rstrip(".")
        scene.asks.append((f"Does {who} have {owned}?", f"Yes, {who} has {owned}."))
        other = lx.a(cast.coloured(noun))
        scene.asks.append((f"Does {who} have {other}?", f"No, {who} has {owned}."))
    if len(people) > 1:
        count = _NUMBERS[len(people)]
        scene.asks.append((f"How many {noun}s are there?", f"There are {count} {noun}s."))


_DEEDS = (
    ("sat", "sit"),
    ("slept", "sleep"),
    ("played", "play"),
    ("hid", "hide"),
    ("waited", "wait"),
    ("rested", "rest"),
    ("stood", "stand"),
    ("lay", "lie"),
    ("ate", "eat"),
    ("worked", "work"),
    ("stayed", "stay"),
    ("is sleeping", None),
    ("is sitting", None),
    ("is waiting", None),
    ("is playing", None),
    ("is", None),
    ("was", None),
)


def _places(cast: Cast) -> Scene:
    """Animals and people do something somewhere; each at a place of its own."""
    rng, scene = cast.rng, Scene([], [])
    verb, base = "", None
    for _ in range(lx.between(rng, 1, 3)):
        animal = lx.chance(rng, 0.6)
        who = f"the {cast.of(lx.ANIMALS)}" if animal else cast.somebody()
        (verb, base), where = lx.pick(rng, _DEEDS), cast.somewhere()
        said = f"{_start(who)} {verb} {where}."
        scene.sentences.append(said)
        if base:
            scene.asks += [(f"Where did {who} {base}?", said)] * 2
        elif verb not in ("is", "was"):
            scene.asks.append((f"Where is {who} {verb[3:]}?", said))
        be = "was" if verb in ("was",) or base else "is"
        scene.asks.append((f"Where {be} {who}?", f"{_start(who)} {be} {where}."))
        scene.asks.append((f"{'What' if animal else 'Who'} {verb} {where}?", said))
        if base and lx.chance(rng, 0.5):
            scene.asks.append((f"What did {who} do?", said))
    stranger = f"the {cast.of(lx.ANIMALS)}"
    scene.untold = [f"Where did {stranger} {base}?" if base else f"Where is {stranger}?"]
    scene.untold.append(f"Who {verb} {cast.somewhere()}?")
    return scene


_GIVE = (
    ("gave", "give"),
    ("gave", "give"),
    ("handed", "hand"),
    ("passed", "pass"),
    ("sold", "sell"),
    ("sent", "send"),
    ("lent", "lend"),
    ("threw", "throw"),
    ("brought", "bring"),
)


def _transfer(cast: Cast) -> Scene:
    """A thing goes from hand to hand; the last hand has it."""
    rng = cast.rng
    thing = cast.thing() if lx.chance(rng, 0.7) else cast.coloured()
    giver, taker = cast.somebody(), cast.somebody()
    verb, base = lx.pick(rng, _GIVE)
    style = lx.between(rng, 0, 3)
    if style == 0:
        told = [f"{_start(giver)} {verb} {taker} the {thing}."]
    elif style == 1:
        pronoun = lx.pick(rng, ("Then", "Later", "Then", "After that"))
        told = [f"{_start(giver)} had {lx.a(thing)}.", f"{pronoun} {giver} {verb} it to {taker}."]
    else:
        told = [f"{_start(giver)} {verb} the {thing} to {taker}."]
    holder = taker
    asks = [
        (
            f"Who did {giver} {base} the {thing} to?",
            f"{_start(giver)} {verb} the {thing} to {taker}.",
        ),
        (f"Who {verb} the {thing} to {taker}?", f"{_start(giver)} {verb} the {thing} to {taker}."),
        (f"What did {giver} {base} to {taker}?", f"{_start(giver)} {verb} the {thing} to {taker}."),
    ]
    if lx.chance(rng, 0.3):
        holder, (verb2, base2) = cast.somebody(), lx.pick(rng, _GIVE)
        it = lx.pick(rng, ("it", f"the {thing}"))
        told.append(f"{lx.pick(rng, ('Then ', 'Later ', ''))}{taker} {verb2} {it} to {holder}.")
        told[-1] = _start(told[-1])
        asked = f"Who did {taker} {base2} the {thing} to?"
        asks.append((asked, f"{_start(taker)} {verb2} the {thing} to {holder}."))
    said = f"{_start(holder)} has the {thing}."
    now = lx.pick(rng, ("", "", " now"))
    asks += [(f"Who has the {thing}{now}?", said)] * 4
    asks += [
        (f"What does {holder} have{now}?", said),
        (f"Where is the {thing}{now}?", said),
        (f"Does {holder} have the {thing}?", f"Yes, {holder} has the {thing}."),
        (f"Does {giver} still have the {thing}?", f"No, {holder} has the {thing}."),
    ]
    return Scene(told, asks, [f"Who has the {cast.thing()}?", f"What does {cast.person()} have?"])


def _taking(cast: Cast) -> Scene:
    rng, thing = cast.rng, cast.thing()
    loser, taker = cast.somebody(), cast.somebody()
    verb, base = lx.pick(
        rng, (("took", "take"), ("borrowed", "borrow"), ("got", "get"), ("bought", "buy"))
    )
    told = f"{_start(taker)} {verb} the {thing} from {loser}."
    said = f"{_start(taker)} has the {thing}."
    asks = [
        (f"Who has the {thing}?", said),
        (f"Who has the {thing} now?", said),
        (f"Who {verb} the {thing}?", told),
        (f"What did {taker} {base} from {loser}?", told),
        (f"Who did {taker} {base} the {thing} from?", told),
        (f"Does {loser} have the {thing}?", f"No, {taker} has the {thing}."),
    ]
    return Scene([told], asks, [f"Who has the {cast.thing()}?"])


_GO = ("went to", "walked to", "ran to", "drove to", "moved to", "is in", "travelled to")


def _moving(cast: Cast) -> Scene:
    """People go to places; where somebody is, is where they went last."""
    rng, scene = cast.rng, Scene([], [])
    people = [cast.person() for _ in range(lx.between(rng, 1, 3))]
    moves = [*people, *([lx.pick(rng, people)] if lx.chance(rng, 0.4) else [])]
    last: dict[str, tuple[str, str]] = {}
    for who in moves:
        verb, place = lx.pick(rng, _GO), cast.of(lx.ROOMS)
        then = "Then " if who in last else ""
        scene.sentences.append(f"{then}{who} {verb} the {place}.")
        last[who] = (verb, place)
    for who, (verb, place) in last.items():
        said = f"{who} is in the {place}."
        scene.asks += [(f"Where is {who}?", said)] * 2 + [(f"Where is {who} now?", said)]
        scene.asks.append((f"Who is in the {place}?", said))
        base = {"went to": "go", "walked to": "walk", "ran to": "run", "drove to": "drive"}.get(
            verb
        )
        if base and moves.count(who) == 1:
            scene.asks.append((f"Where did {who} {base}?", f"{who} {verb} the {place}."))
            scene.asks.append((f"Who {verb} the {place}?", f"{who} {verb} the {place}."))
    scene.untold = [f"Where is {cast.person()}?", f"Who is in the {cast.of(lx.ROOMS)}?"]
    return scene


_ACTS = (
    ("ate", "eat", lx.MEALS),
    ("drank", "drink", lx.DRINKS),
    ("cooked", "cook", lx.MEALS),
    ("likes", "like", lx.FOODS),
    ("loves", "love", lx.HOBBIES),
    ("plays", "play", lx.GAMES),
    ("studies", "study", lx.SUBJECTS),
    ("bought", "buy", lx.FOODS),
    ("is reading", "read", lx.READING),
    ("is eating", "eat", lx.MEALS),
    ("is drinking", "drink", lx.DRINKS),
    ("wears", "wear", lx.CLOTHES),
)


def _doing(cast: Cast) -> Scene:
    rng, scene = cast.rng, Scene([], [])
    verb, base, goods = lx.pick(rng, _ACTS)
    where = cast.somewhere() if lx.chance(rng, 0.25) else ""
    for _ in range(lx.between(rng, 1, 3)):
        who, what = cast.person(), cast.of(goods)
        scene.sentences.append(f"{who} {verb} {what}{' ' + where if where else ''}.")
        said = f"{who} {verb} {what}."
        if verb.startswith("is "):
            scene.asks += [(f"What is {who} {verb[3:]}?", said), (f"What is {who} doing?", said)]
        else:
            do = "did" if verb in ("ate", "drank", "cooked", "bought") else "does"
            scene.asks += [(f"What {do} {who} {base}?", said)] * 2
        scene.asks.append((f"Who {verb} {what}?", said))
        if where:
            be = "is" if verb.startswith("is ") or verb.endswith("s") else "was"
            scene.asks.append((f"Where {be} {who}?", f"{who} {be} {where}."))
    scene.untold = [f"Who {verb} {cast.of(goods)}?"]
    return scene


def _counting(cast: Cast) -> Scene:
    rng, scene = cast.rng, Scene([], [])
    words = lx.chance(rng, 0.5)
    same = cast.of(lx.GOODS) if lx.chance(rng, 0.5) else None
    counts = lx.sample(rng, range(2, 13), lx.between(rng, 1, 3))
    for count in counts:
        shown = _NUMBERS[count] if words else str(count)
        who, what = cast.person(), same or cast.of(lx.GOODS)
        told = f"{who} has {shown} {what}."
        scene.sentences.append(told)
        scene.asks += [(f"How many {what} does {who} have?", told)] * 2
        scene.asks += [(f"Who has {shown} {what}?", told), (f"What does {who} have?", told)]
    if len(scene.sentences) == 2 and lx.chance(rng, 0.5):
        joined = " and ".join(sentence.rstrip(".") for sentence in scene.sentences)
        scene.sentences = [joined + "."]
    scene.untold = [f"How many {cast.of(lx.GOODS)} does {cast.person()} have?"]
    return scene


def _looks(cast: Cast) -> Scene:
    rng, scene = cast.rng, Scene([], [])
    for _ in range(lx.between(rng, 1, 3)):
        noun, colour = cast.of(lx.THINGS + lx.ANIMALS + lx.BIG_THINGS), cast.of(lx.COLOURS)
        where = f" {cast.somewhere()}" if lx.chance(rng, 0.2) else ""
        scene.sentences.append(f"The {noun}{where} is {colour}.")
        said = f"The {noun} is {colour}."
        asked = (f"What colour is the {noun}?", f"What color is the {noun}?")
        scene.asks += [(form, said) for form in asked] + [(f"What is {colour}?", said)]
    scene.untold = [f"What colour is the {cast.of(lx.THINGS)}?"]
    return scene


_KIN = lx.words(
    "sister brother mother father friend teacher neighbour uncle aunt cousin boss doctor"
)


MORE = ["taller", "older", "faster", "younger", "stronger", "smaller", "shorter"]


def _relations(cast: Cast) -> Scene:
    rng, scene = cast.rng, Scene([], [])
    if lx.chance(rng, 0.4):
        a, b, more = cast.person(), cast.person(), lx.pick(rng, MORE)
        told = f"{a} is {more} than {b}."
        asks = [(f"Who is {more}?", told), (f"Who is {more}, {b} or {a}?", told)]
        asks.append((f"Is {a} {more} than {b}?", f"Yes, {a} is {more} than {b}."))
        asks.append((f"Is {b} {more} than {a}?", f"No, {a} is {more} than {b}."))
        return Scene([told], asks, [f"Who is the {lx.pick(rng, _KIN)} of {a}?"])
    for _ in range(lx.between(rng, 1, 2)):
        a, b, kin = cast.person(), cast.person(), cast.of(_KIN)
        told = f"{a} is {b}'s {kin}."
        scene.sentences.append(told)
        scene.asks += [(f"Who is {b}'s {kin}?", told), (f"Who is the {kin} of {b}?", told)]
        scene.asks.append((f"Whose {kin} is {a}?", told))
    scene.untold = [f"Who is {cast.person()}'s {cast.of(_KIN)}?"]
    return scene


def _people(cast: Cast) -> Scene:
    """Age, town and job of a person in one sentence or two."""
    rng, scene = cast.rng, Scene([], [])
    for _ in range(lx.between(rng, 1, 2)):
        who, age, town, job = cast.person(), lx.between(rng, 4, 95), cast.town(), cast.of(lx.JOBS)
        forms = (
            f"{who} is {age} years old and lives in {town}.",
            f"{who}, {age}, lives in {town}.",
            f"{who} lives in {town} and is {age} years old.",
            f"{who} is {age}. {who} lives in {town}.",
        )
        works = f"{who} works as {lx.a(job)}."
        scene.sentences.append(lx.pick(rng, forms))
        home, old = f"{who} lives in {town}.", f"{who} is {age} years old."
        scene.asks += [(f"Where does {who} live?", home), (f"Who lives in {town}?", home)]
        scene.asks += [(f"How old is {who}?", old), (f"Who is {age} years old?", old)]
        if lx.chance(rng, 0.5):
            scene.sentences.append(works)
            scene.asks += [(f"What does {who} do?", f"{who} works as a {job}.")]
        else:
            scene.untold.append(f"What is {who}'s job?")
    return scene


_WHEN = [f"on {day}" for day in lx.DAYS] + [
    f"at {hour} o'clock" for hour in ("two", "three", "five", "seven", "eight", "nine", "ten")
]


def _days(cast: Cast) -> Scene:
    rng, scene = cast.rng, Scene([], [])
    for _ in range(lx.between(rng, 1, 3)):
        who, when, place = cast.person(), cast.of(_WHEN), cast.of(lx.ROOMS)
        past, base = lx.pick(rng, (("went to", "go to"), ("visited", "visit"), ("left", "leave")))
        told = f"{who} {past} the {place} {when}."
        shown = told if lx.chance(rng, 0.6) else f"{_start(when)} {who} {past} the {place}."
        scene.sentences.append(shown)
        scene.asks += [(f"When did {who} {base} the {place}?", told)] * 2
        scene.asks.append((f"Who {past} the {place}?", told))
        if past == "went to":
            scene.asks.append((f"Where did {who} go {when}?", told))
    scene.untold = [f"When did {cast.person()} visit the {cast.of(lx.ROOMS)}?"]
    return scene


def _putting(cast: Cast) -> Scene:
    rng, scene = cast.rng, Scene([], [])
    for _ in range(lx.between(rng, 1, 3)):
        who, thing, where = cast.somebody(), cast.thing(), cast.somewhere()
        verb, base = lx.pick(rng, (("put", "put"), ("left", "leave"), ("hid", "hide")))
        told = f"{_start(who)} {verb} the {thing} {where}."
        scene.sentences.append(told)
        said = f"The {thing} is {where}."
        scene.asks += [(f"Where is the {thing}?", said)] * 2
        scene.asks += [(f"Where did {who} {base} the {thing}?", told)]
        scene.asks += [(f"Who {verb} the {thing} {where}?", told), (f"What is {where}?", said)]
        scene.asks.append((f"What did {who} {base} {where}?", told))
    scene.untold = [f"Where is the {cast.thing()}?", f"What is {cast.somewhere()}?"]
    return scene


SCENES = (
    *(possession, possession, _places, _places, _transfer, _transfer, _taking, _moving),
    *(_doing, _counting, _looks, _relations, _people, _days, _putting),
)
