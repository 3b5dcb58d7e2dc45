"""Everyday questions: one to four plain sentences about people and things, and what follows."""

from checkpoints.recipe import lexicon as lx
from checkpoints.recipe.chat import Chat, reply, user
from checkpoints.recipe.lexicon import Rng, Split
from checkpoints.recipe.skills.passage import NOT_SAID, frame
from checkpoints.recipe.skills.scenes import MORE, SCENES, Cast, Scene, possession


def scene(rng: Rng, split: Split) -> Scene:
    """One scene, sometimes told together with another that shares no name with it."""
    cast = Cast(rng, split)
    told = lx.pick(rng, SCENES)(cast)
    if len(told.sentences) < 3 and lx.chance(rng, 0.3):
        other = lx.pick(rng, SCENES)(cast)
        both = [told, other] if lx.chance(rng, 0.5) else [other, told]
        sentences = both[0].sentences + both[1].sentences
        asks = [ask for ask in told.asks + other.asks if not _shared(ask[0])]
        if asks and len(sentences) < 6:
            return Scene(sentences, asks, told.untold)
    return told


def _shared(question: str) -> bool:
    """Whether the question names nobody, so that another scene could answer it as well."""
    return question in _OPEN or question.endswith("s are there?")


# Comparisons and colours; the counts of things are recognised by their last words.
_OPEN = {f"Who is {more}?" for more in MORE} | {f"What is {colour}?" for colour in lx.COLOURS}


def told(rng: Rng, split: Split) -> str:
    return " ".join(scene(rng, split).sentences)


def _ask(rng: Rng, world: Scene) -> tuple[str, str]:
    if world.untold and lx.chance(rng, 0.12):
        return lx.pick(rng, world.untold), NOT_SAID
    return lx.pick(rng, world.asks)


def generate(rng: Rng, split: Split) -> Chat:
    return _chat("everyday", rng, scene(rng, split))


def generate_owners(rng: Rng, split: Split) -> Chat:
    """Who has which of two or three things that differ in their colour alone."""
    return _chat("owners", rng, possession(Cast(rng, split), lx.between(rng, 2, 3)))


def _chat(skill: str, rng: Rng, world: Scene) -> Chat:
    passage, turns = " ".join(world.sentences), []
    for i in range(lx.pick(rng, (1, 1, 2, 3))):
        asked, said = _ask(rng, world)
        asked = lx.casual(rng, asked)
        plain = lx.chance(rng, 0.6)
        first = f"{passage} {asked}" if plain else frame(rng, passage, asked)
        turns += [user(asked if i else first), reply(said)]
    return Chat(skill, tuple(turns), thinking=lx.chance(rng, 0.6))
