"""Small arithmetic: sums and differences up to three digits, times tables, exact division.

Owns the problems, their phrasings and the written-out working. With thinking on, every answer is
worked out digit by digit; with thinking off, problems stay small enough to be done at once. A
problem is held out by a checksum of its operation and operands, so test problems were never seen.
"""

from checkpoints.recipe import lexicon as lx
from checkpoints.recipe.chat import Chat, reply, user
from checkpoints.recipe.lexicon import Rng, Split

_SIGN = {"+": "+", "-": "-", "*": "x", "/": "/"}
_WORDS = {
    "+": ("{a} plus {b}", "{a} + {b}", "{a} added to {b}", "the sum of {a} and {b}", "{a}+{b}"),
    "-": ("{a} minus {b}", "{a} - {b}", "{a}-{b}", "{a} take away {b}"),
    "*": ("{a} times {b}", "{a} x {b}", "{a} * {b}", "{a} multiplied by {b}"),
    "/": ("{a} divided by {b}", "{a} / {b}"),
}
_ASK = (
    "What is {x}?",
    "What's {x}?",
    "How much is {x}?",
    "Calculate {x}.",
    "{x} = ?",
    "{x}?",
    "Can you tell me what {x} is?",
    "Please work out {x}.",
    "Compute {x}.",
)
_STORIES = {
    "+": (
        "{p} has {a} {g} and gets {b} more. How many {g} does {p} have now?",
        "{p} has {a} {g}. {q} has {b} {g}. How many {g} do they have together?",
        "There are {a} {g} on the table and {b} in the box. How many {g} are there in total?",
    ),
    "-": (
        "{p} has {a} {g} and gives {b} to {q}. How many {g} does {p} have left?",
        "There are {a} {g}. {p} takes {b} of them. How many {g} are left?",
        "{p} had {a} {g} and lost {b}. How many {g} does {p} still have?",
    ),
    "*": (
        "There are {a} boxes with {b} {g} each. How many {g} are there?",
        "{p} buys {a} bags. Each bag holds {b} {g}. How many {g} does {p} have?",
    ),
    "/": (
        "{p} shares {a} {g} equally among {b} friends. How many {g} does each friend get?",
        "{a} {g} are put in {b} equal rows. How many {g} are in each row?",
    ),
}
_PLACES = ("ones", "tens", "hundreds", "thousands")


def solve(op: str, x: int, y: int) -> int:
    return {"+": x + y, "-": x - y, "*": x * y, "/": x // y if y else 0}[op]


def equation(op: str, x: int, y: int) -> str:
    return f"{x} {_SIGN[op]} {y} = {solve(op, x, y)}"


def working(op: str, x: int, y: int) -> str:
    """The written-out way to the answer. Stating the sum first puts its digits in fixed places."""
    return f"{x} {_SIGN[op]} {y}\n{_steps(op, x, y)}"


def _steps(op: str, x: int, y: int) -> str:
    if op == "+":
        return _add(x, y)
    if op == "-":
        return _subtract(x, y)
    if op == "*" and max(x, y) > 12:
        return _multiply(x, y)
    return equation(op, x, y) if op == "*" else f"{solve(op, x, y)} x {y} = {x}"


def _digits(x: int, width: int) -> list[int]:
    return [x // 10**i % 10 for i in range(width)]


def _add(x: int, y: int) -> str:
    width, carry, lines = len(str(max(x, y))), 0, []
    for place, a, b in zip(_PLACES, _digits(x, width), _digits(y, width), strict=False):
        total = a + b + carry
        lines.append(f"{place}: {a} + {b} + {carry} = {total}, write {total % 10}")
        carry = total // 10
    return "\n".join([*lines, f"carry {carry}", str(x + y)])


def _subtract(x: int, y: int) -> str:
    if x < y:
        return f"{x} is less than {y}\n{y} - {x} = {y - x}\n{x - y}"
    width, borrow, lines = len(str(x)), 0, []
    for place, a, b in zip(_PLACES, _digits(x, width), _digits(y, width), strict=False):
        digit = a - b - borrow
        loan = digit < 0
        top = f"1{a}" if loan else str(a)
        digit += 10 * loan
        lines.append(f"{place}: {top} - {b} - {borrow} = {digit}")
        borrow = int(loan)
    return "\n".join([*lines, str(x - y)])


def _multiply(x: int, y: int) -> str:
    big, small = max(x, y), min(x, y)
    tens, ones = big // 10 * 10, big % 10
    parts = f"{tens} x {small} = {tens * small}\n{ones} x {small} = {ones * small}"
    return f"{parts}\n{tens * small} + {ones * small} = {big * small}"


def _operands(rng: Rng, op: str, thinking: bool) -> tuple[int, int]:
    if op in "*/":
        x, y = lx.between(rng, 2, 12), lx.between(rng, 1, 12)
        if op == "*" and thinking and lx.chance(rng, 0.4):
            x, y = lx.between(rng, 13, 99), lx.between(rng, 2, 9)
        if op == "*" and lx.chance(rng, 0.5):
            x, y = y, x
        return (x, y) if op == "*" else (x * y, x)
    top = 999 if thinking and lx.chance(rng, 0.4) else lx.pick(rng, (10, 20, 99))
    x, y = lx.between(rng, 0, top), lx.between(rng, 0, top)
    if op == "-" and x < y and not (y <= 20 and lx.chance(rng, 0.3)):
        x, y = y, x
    return x, y


def _by_heart(op: str, x: int, y: int) -> bool:
    """Times tables are learnt by heart, like anyone learns them: there is nothing to hold out."""
    return op == "/" or (op == "*" and max(x, y) <= 12)


def problem(rng: Rng, split: Split, thinking: bool) -> tuple[str, int, int]:
    while True:
        op = lx.pick(rng, "++--*/")
        x, y = _operands(rng, op, thinking)
        if _by_heart(op, x, y) or lx.held_out((op, x, y)) == (split == "test"):
            return op, x, y


def phrase(rng: Rng, split: Split, op: str, x: int, y: int) -> str:
    if x >= 2 and y >= 2 and solve(op, x, y) >= 0 and lx.chance(rng, 0.25):
        p, q = lx.distinct(rng, lx.person, split, 2)
        return lx.pick(rng, _STORIES[op]).format(a=x, b=y, p=p, q=q, g=lx.pick(rng, lx.GOODS))
    text = lx.pick(rng, _ASK).format(x=lx.pick(rng, _WORDS[op]).format(a=x, b=y))
    return lx.casual(rng, text[0].upper() + text[1:])


def _one(rng: Rng, split: Split, thinking: bool):
    op, x, y = problem(rng, split, thinking)
    return user(phrase(rng, split, op, x, y)), reply(equation(op, x, y), working(op, x, y))


def _generate(rng: Rng, split: Split, thinking: bool) -> Chat:
    turns = [*_one(rng, split, thinking)]
    if lx.chance(rng, 0.15):
        turns = [*_one(rng, split, thinking), *turns]
    skill = "arithmetic_thinking" if thinking else "arithmetic"
    return Chat(skill, tuple(turns), thinking=thinking)


def generate(rng: Rng, split: Split) -> Chat:
    return _generate(rng, split, thinking=False)


def generate_thinking(rng: Rng, split: Split) -> Chat:
    return _generate(rng, split, thinking=True)
