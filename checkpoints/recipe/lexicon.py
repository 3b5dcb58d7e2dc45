"""Word lists and samplers of invented words; everything the small worlds are made of.

Owns vocabulary only, no sentences. Half of all proper names are invented from syllables, so that a
model cannot know them and has to copy them from its context. Invented words carry their split in a
checksum: held-out text uses names that no training text contains.
"""

import zlib
from typing import Literal

import numpy as np

Split = Literal["train", "test"]
Rng = np.random.Generator


def words(text: str) -> list[str]:
    return text.split()


def split_bars(text: str) -> list[str]:
    return text.split("|")


PEOPLE = words(
    "Anna Ben Clara David Emma Felix Grace Henry Irene Jack Kate Leo Maria Nina Oscar Paula Quinn "
    "Rosa Sam Tina Uma Victor Wendy Xavier Yara Zoe Adam Bella Carlos Diana Eric Fiona George "
    "Hanna Ivan Julia Kevin Laura Martin Nora Oliver Peter Rachel Simon Tom Vera Walter Alice "
    "Bob Lucy Max Mia Noah Lena Omar Aisha Hugo Ines Jonas Ruth Theo Elsa Ravi Priya Kenji Yuki"
)
TOWNS = words(
    "Paris London Berlin Madrid Rome Vienna Oslo Dublin Lisbon Prague Warsaw Athens Helsinki "
    "Boston Chicago Denver Seattle Toronto Sydney Tokyo Delhi Cairo Nairobi Lima Bristol Leeds "
    "Hamburg Munich Lyon Turin Porto Ghent Basel Bergen Malmo Krakow Split York Bath Kyoto"
)
COLOURS = words("red blue green yellow black white brown grey purple pink silver gold")
OBJECTS = words(
    "lamp chair table clock book key cup bottle basket ladder hammer kite drum bell mirror "
    "blanket coat hat bag box vase candle radio camera pen map guitar bicycle boat "
    "kettle pillow ring letter ticket helmet rope bucket painting flute scarf phone laptop"
)
ANIMALS = words(
    "cat dog fox rabbit horse goat owl duck mouse bear parrot turtle hedgehog squirrel pony frog "
    "otter sheep cow hen"
)
JOBS = words(
    "teacher doctor baker farmer pilot nurse painter driver lawyer cook gardener librarian "
    "carpenter singer writer plumber dentist tailor sailor judge waiter chemist "
    "builder journalist photographer"
)
FOODS = words(
    "pizza soup rice pasta bread cheese salad apples pancakes noodles beans curry tomatoes honey "
    "chocolate cherries pears fish potatoes plums cake yogurt grapes nuts dumplings"
)
HOBBIES = words(
    "chess swimming painting running cooking reading dancing fishing cycling singing gardening "
    "climbing tennis football skiing hiking sewing rowing yoga pottery"
)
GOODS = words(
    "apples oranges pens books cups plates chairs lamps candles tickets shirts towels bottles "
    "baskets eggs cookies stamps coins marbles pencils balls stickers cards buttons flowers"
)
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words(
    "January February March April May June July August September October November December"
)
PLACES = words(
    "kitchen garden garage attic cellar library office hall bedroom shed barn tower workshop "
    "school museum station market harbour chapel studio"
)
SHOPS = words(
    "bakery library museum bank pharmacy cinema pool market theatre gallery zoo cafe gym "
    "bookshop school"
)
EVENTS = words("meeting concert party lecture match workshop picnic race wedding show exam trip")
WEATHER = words("sunny cloudy rainy windy snowy foggy stormy clear")

# Everyday words of the second stage; the lists above stay as the first stage drew from them.
FIRST_NAMES = PEOPLE + words(
    "John Sarah Mary James Robert Linda William Susan Michael Karen Thomas Lisa Daniel Nancy Mark "
    "Betty Paul Sandra Steven Ashley Andrew Emily Joshua Donna Brian Amanda Edward Carol Jason "
    "Amy Jeff Anne Gary Helen Eva Ella Lily Sophie Chloe Jane Joe Bill Jim Mike Dan Dave Sue Pam "
    "Ann Kim Lee Ali Fatima Hassan Chen Wei Mei Raj Sara Nick Alex Chris Pat Sandy Billy Tommy "
    "Jenny Sally Molly Harry Charlie Freddie Arthur Stella Ivy Rose Daisy Ruby Frank Fred Greta"
)
THINGS = OBJECTS + words(
    "ball car toy doll apple cake cookie pencil plate knife fork spoon towel shirt jacket shoe "
    "sock ring watch wallet purse suitcase umbrella newspaper magazine present gift flower rose "
    "stone stick balloon sandwich orange banana football drum violin piano television computer "
    "tablet mug pan pot brush comb soap pillow flag coin stamp card photo picture box backpack"
)
BIG_THINGS = words("house door wall roof bus train van tree fence bridge boat bench sofa gate")
ROLES = words(
    "boy girl man woman teacher doctor farmer king queen baker child student nurse driver cook "
    "waiter policeman pilot painter guard"
)
ROOMS = PLACES + words(
    "bathroom park shop bank beach forest zoo cinema hospital hotel restaurant bakery church "
    "stadium airport playground supermarket balcony basement classroom pool lake village gym"
)
WHERE = [f"in the {place}" for place in ROOMS] + split_bars(
    "on the mat|on the sofa|on the bed|on the table|on the chair|on the floor|on the roof|"
    "on the bench|under the table|under the bed|under the tree|behind the house|"
    "behind the door|near the window|near the fire|near the lake|next to the door|in the box|"
    "in the basket|in the car|in the bag|in the drawer|in the fridge|in the tree|at the station|"
    "at home|at school|at work|at the door|on the shelf|on the grass|by the river|on the desk|"
    "in the cupboard|on the wall|outside|upstairs|in bed"
)
MEALS = split_bars(
    "an apple|a banana|a sandwich|a pizza|some bread|some soup|a salad|some rice|some pasta|an egg|"
    "a cake|a cookie|some cheese|fish|chicken|an orange|a pear|ice cream|a burger|noodles"
)
DRINKS = split_bars("water|milk|tea|coffee|juice|lemonade|cocoa|a glass of milk|a cup of tea|cola")
GAMES = split_bars(
    "football|tennis|chess|the piano|the guitar|cards|basketball|the violin|hockey|the drums|golf"
)
READING = split_bars(
    "a book|a letter|the newspaper|a story|a comic|a poem|a map|a menu|a novel|a magazine"
)
SUBJECTS = split_bars(
    "maths|history|music|biology|law|physics|art|French|German|chemistry|medicine"
)
CLOTHES = [
    f"a {colour} {garment}"
    for colour in COLOURS[:9]
    for garment in split_bars("hat|coat|shirt|dress|scarf|jacket|jumper|skirt")
]

_ONSETS = words("b br c ch d dr f fl g gr h j k kl l m n p pr r s sh sk st t th tr v w y z")
_VOWELS = words("a e i o u a e i o ai ea ee oo ou")
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "k", "t", "nd", "rk", "ll", "x", "th", "v"]


def pick(rng: Rng, items):
    return items[int(rng.integers(len(items)))]


def sample(rng: Rng, items, count: int) -> list:
    return [items[int(i)] for i in rng.choice(len(items), count, replace=False)]


def chance(rng: Rng, probability: float) -> bool:
    return bool(rng.random() < probability)


def between(rng: Rng, low: int, high: int) -> int:
    """A whole number from `low` to `high`, both included."""
    return int(rng.integers(low, high + 1))


def held_out(key: object, share: int = 8) -> bool:
    """Whether this item belongs to the held-out split: one in `share`, fixed for ever."""
    return zlib.crc32(str(key).encode()) % share == 0


def invented(rng: Rng, split: Split) -> str:
    """A pronounceable word nobody has seen, from the given split."""
    while True:
        word = "".join(
            pick(rng, _ONSETS) + pick(rng, _VOWELS) + pick(rng, _CODAS)
            for _ in range(2 + chance(rng, 0.2))
        )
        if len(word) < 11 and held_out(word) == (split == "test"):
            return word


def person(rng: Rng, split: Split) -> str:
    return pick(rng, PEOPLE) if chance(rng, 0.5) else invented(rng, split).capitalize()


def town(rng: Rng, split: Split) -> str:
    return pick(rng, TOWNS) if chance(rng, 0.4) else invented(rng, split).capitalize()


def first_name(rng: Rng, split: Split) -> str:
    """Mostly a common first name, else one that no text of the other split contains."""
    return pick(rng, FIRST_NAMES) if chance(rng, 0.8) else invented(rng, split).capitalize()


def distinct(rng: Rng, draw, split: Split, count: int) -> list[str]:
    """`count` different words from `draw(rng, split)`, in the order drawn."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng, split)] = None
    return list(found)


def code(rng: Rng) -> str:
    """A door code, a locker number: high entropy, so it can only be copied."""
    letters = "".join(chr(65 + int(i)) for i in rng.integers(0, 26, between(rng, 0, 2)))
    return letters + str(between(rng, 100, 9999))


def clock(rng: Rng) -> str:
    return f"{between(rng, 6, 22)}:{pick(rng, ('00', '15', '30', '45', '10', '20', '50'))}"


def a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def listing(items: list[str]) -> str:
    """`x`, `x and y`, `x, y and z`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def casual(rng: Rng, question: str) -> str:
    """The same question as a hurried user types it: lower case first letter, no question mark."""
    if chance(rng, 0.25):
        question = question[0].lower() + question[1:]
    if question[-1] in "?." and chance(rng, 0.2):
        question = question[:-1]
    return question
