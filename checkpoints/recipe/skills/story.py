"""Short stories and descriptions: a few coherent sentences from a story grammar.

Owns plots and descriptions. A story keeps its hero, place, thing and helper straight from the first
sentence to the last, which is the coherence the model is to pick up.
"""

from checkpoints.recipe import lexicon as lx
from checkpoints.recipe.chat import Chat, ask
from checkpoints.recipe.lexicon import Rng, Split

_PLOTS = (
    (
        ("One {w} morning {h} could not find the {o}.", "One day the {o} of {h} was gone."),
        ("{h} looked in the {p}, but it was not there.", "First {h} searched the whole {p}."),
        ("Then {f} came by and offered to help.", "Luckily {f} knew how to help."),
        ("Together they found the {o} in the {q}.", "At last {f} saw the {o} in the {q}."),
        ("{h} was happy and thanked {f}.", "{h} thanked {f}, and they had {e} together."),
    ),
    (
        ("{h} wanted to make {e} for {f}.", "For the birthday of {f}, {h} wanted to make {e}."),
        ("There was nothing left in the {p}, so {h} walked to the {q}.",),
        ("On the way {h} found a {c} {o}.", "In the {q} there was a {c} {o}."),
        ("{h} gave the {o} to {f} instead.", "So {h} brought the {o} home as a gift."),
        ("{f} laughed and said it was the best gift of all.",),
    ),
    (
        ("{h} was afraid of the dark {p}.", "Every night {h} heard a noise in the {p}."),
        ("One {w} evening {h} took a {o} and went inside.",),
        ("There sat {f}, who had lost the way home.", "It was only {f}, hiding from the rain."),
        ("{h} shared some {e} with {f}.", "They ate {e} and talked until morning."),
        ("From that day on they were friends.", "After that, {h} was never afraid again."),
    ),
    (
        ("{h} found a {c} {o} in the {p}.", "One {w} day {h} saw a {c} {o} in the {p}."),
        ("{h} asked everyone in {t} whose it was.", "Nobody in {t} knew who owned it."),
        ("In the end {f} said that the {o} was lost long ago.",),
        ("{h} gave it back at once.", "Without waiting, {h} returned the {o} to {f}."),
        ("{f} was so glad that they ate {e} together.", "As thanks, {f} gave {h} some {e}."),
    ),
    (
        ("{h} dreamed of seeing the sea.", "{h} had never left {t} before."),
        ("One {w} morning {h} packed a {o} and some {e}.",),
        ("On the road {h} met {f}, and they walked on together.",),
        ("They crossed a river and slept in an old {p}.", "At night they rested in a {p}."),
        ("When they came home to {t}, they had many stories to tell.",),
    ),
)
_ASK = (
    "Write a short story about {x}.",
    "Tell me a story about {x}.",
    "Tell me a short story about {x}.",
    "Write a story about {x}.",
    "Can you write a short story about {x}?",
)
_ASK_ANY = ("Tell me a story.", "Write a short story.", "Can you tell me a short story?")
_DESCRIBE = ("Describe {x}.", "Write a few sentences about {x}.", "Describe {x} to me.")
_PLACE_LINES = (
    ("{t} is a {s} town by a {r}.", "{t} is a {s} place near a {r}."),
    ("In the middle there is an old {b} with a {c} roof.", "People are proud of the {c} {b}."),
    ("Every {d} people meet at the market and sell {e}.", "On {d} you can buy fresh {e} there."),
    ("The weather is often {w}.", "In spring it is mostly {w}."),
    ("Visitors like the {p} best.", "Many people come to see the {p}."),
)


def _hero(rng: Rng, split: Split) -> tuple[str, str]:
    """A name, and how the first sentence introduces it."""
    name = lx.person(rng, split)
    if lx.chance(rng, 0.5):
        return name, f"{lx.a(lx.pick(rng, lx.ANIMALS))} named {name}"
    return name, f"{lx.a(lx.pick(rng, lx.JOBS))} named {name}"


def story(rng: Rng, split: Split) -> tuple[str, str]:
    """What the story is about, and the story."""
    name, intro = _hero(rng, split)
    friend = lx.distinct(rng, lx.person, split, 2)
    p, q = lx.sample(rng, lx.PLACES, 2)
    town = lx.town(rng, split)
    words = {
        "h": name,
        "f": friend[0] if friend[0] != name else friend[1],
        "p": p,
        "q": q,
        "t": town,
        "o": lx.pick(rng, lx.OBJECTS),
        "c": lx.pick(rng, lx.COLOURS),
        "e": lx.pick(rng, lx.FOODS),
        "w": lx.pick(rng, lx.WEATHER),
    }
    first = lx.pick(rng, ("Once there was {i} in {t}.", "In {t} lived {i}.", "There was once {i}."))
    lines = [first.format(i=intro, t=town)]
    lines += [lx.pick(rng, options).format(**words) for options in lx.pick(rng, _PLOTS)]
    return intro, " ".join(lines)


def description(rng: Rng, split: Split) -> tuple[str, str]:
    words = {
        "t": lx.town(rng, split),
        "s": lx.pick(rng, ("small", "quiet", "busy", "pretty", "friendly")),
        "r": lx.pick(rng, ("river", "lake", "forest", "hill", "mountain", "beach")),
        "b": lx.pick(rng, lx.SHOPS),
        "c": lx.pick(rng, lx.COLOURS),
        "d": lx.pick(rng, lx.DAYS),
        "e": lx.pick(rng, lx.FOODS),
        "w": lx.pick(rng, lx.WEATHER),
        "p": lx.pick(rng, lx.PLACES),
    }
    lines = [lx.pick(rng, options).format(**words) for options in _PLACE_LINES]
    return words["t"], " ".join(lines)


def generate(rng: Rng, split: Split) -> Chat:
    if lx.chance(rng, 0.25):
        subject, text = description(rng, split)
        question = lx.pick(rng, _DESCRIBE).format(x=subject)
    else:
        subject, text = story(rng, split)
        short = subject if lx.chance(rng, 0.6) else subject.split(" named ")[0]
        forms = _ASK_ANY if lx.chance(rng, 0.1) else _ASK
        question = lx.pick(rng, forms).format(x=short)
    chat = ask("story", lx.casual(rng, question), text)
    return Chat(chat.skill, chat.turns, thinking=lx.chance(rng, 0.7))
