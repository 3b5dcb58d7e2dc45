"""Builds a proposer from the speculative options and refuses combinations that do not work.

It owns which methods there are, who drafts (the host or the device), which options each reads and how many drafts
in what shape they ask for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq

from jserve.config import DEFAULT_DRAFTS, SpeculativeOptions
from jserve.errors import ConfigError
from jserve.option_names import DOTTED
from jserve.ports import Proposer
from jserve.speculation.host import trees
from jserve.speculation.host.lookup import Lookup
from jserve.speculation.host.ngram import NgramIndex
from jserve.speculation.host.suffix import CorpusCursor, SuffixAutomaton, SuffixIndex
from jserve.speculation.host.synthetic import Synthetic

DEVICE = ("draft", "eagle3", "medusa")
"""Methods whose drafts are made on the device."""
MAX_CORPUS_TOKENS = 1 << 20
_DRAFTERS = ("tree", "tree_chances", "max_rows", "tensor_parallel_size")
_READS = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max", "max_lookup_tokens", "max_rows"),
    "suffix": ("suffix_min_match", "corpus", "max_lookup_tokens"),
    "synthetic": ("synthetic_acceptance_rate",),
    "draft": ("model", *_DRAFTERS),
    "eagle3": ("model", *_DRAFTERS),
    "medusa": ("model", *_DRAFTERS),
    "off": ("num_tokens", "min_speed"),
}
_ALL = ("method", "num_tokens", "min_speed")


def check(options: SpeculativeOptions, tp: int = 1) -> None:
    """Refuse what cannot be done beside a model over ``tp`` devices, before anything is loaded.

    Raises:
        ConfigError: a method without its drafter, or an option that the method does not read.
    """
    method = options.method
    if method in DEVICE and not options.model:
        raise ConfigError(f"{DOTTED}.method {method!r} needs a model", field=f"{DOTTED}.model")
    for f in dataclasses.fields(options):
        read = f.name in (*_ALL, *_READS[method])
        if not read and getattr(options, f.name) != f.default:
            raise ConfigError(
                f"{DOTTED}.{f.name} means nothing to method {method!r}", field=f"{DOTTED}.{f.name}"
            )
    if options.tensor_parallel_size not in (0, 1, tp):
        raise ConfigError(
            f"{DOTTED}.tensor_parallel_size is {options.tensor_parallel_size}, but a drafter runs in the"
            f" model's own program, on its {tp} devices: each holds all of it (1) or its part ({tp})",
            field=f"{DOTTED}.tensor_parallel_size",
        )
    if options.tree_chances and options.tree != trees.AUTO:
        raise ConfigError(
            f"{trees.CHANCES} means nothing without {trees.FIELD} {trees.AUTO!r}",
            field=trees.CHANCES,
        )
    if options.prompt_lookup_min > options.prompt_lookup_max:
        raise ConfigError(
            f"{DOTTED}.prompt_lookup_min {options.prompt_lookup_min} exceeds prompt_lookup_max"
            f" {options.prompt_lookup_max}",
            field=f"{DOTTED}.prompt_lookup_min",
        )
    shape(options, trees.MAX_NODES)


def shape(options: SpeculativeOptions, deepest: int) -> tuple[int, trees.Parents]:
    """(drafts that the device makes per row, their tree; (): a chain).

    Args:
        deepest: most drafts after one another that the drafter makes.

    Raises:
        ConfigError: no tree, or not one of ``num_tokens`` drafts.
    """
    n = options.num_tokens or DEFAULT_DRAFTS
    if not options.tree:
        return options.num_tokens or min(n, deepest), ()
    parents = trees.written(options.tree, n, deepest, trees.chances_of(options.tree_chances))
    if len(parents) != n and options.num_tokens:
        raise ConfigError(
            f"{trees.FIELD} has {len(parents)} drafts, num_tokens is {n}", field=trees.FIELD
        )
    return len(parents), () if trees.is_chain(parents) else parents


def proposer_of(
    options: SpeculativeOptions, vocab_size: int, corpus: Seq[int] = ()
) -> Proposer | None:
    """The proposer of the host; None where there is none. ``corpus``: the ids of ``options.corpus``.

    Raises:
        ConfigError: the corpus is too long.
    """
    window = options.max_lookup_tokens
    match options.method:
        case "ngram":
            least, most = options.prompt_lookup_min, options.prompt_lookup_max
            return Lookup("ngram", lambda: (NgramIndex(least, most, window),))
        case "suffix":
            least, shared = options.suffix_min_match, _automaton(corpus)
            return Lookup(
                "suffix",
                lambda: (
                    SuffixIndex(least, window),
                    *((CorpusCursor(shared, least),) if shared is not None else ()),
                ),
            )
        case "synthetic":
            return Synthetic(options.synthetic_acceptance_rate, vocab_size)
    return None


def _automaton(corpus: Seq[int]) -> SuffixAutomaton | None:
    if not corpus:
        return None
    if len(corpus) > MAX_CORPUS_TOKENS:
        raise ConfigError(
            f"{DOTTED}.corpus has {len(corpus)} tokens, at most {MAX_CORPUS_TOKENS} are taken",
            field=f"{DOTTED}.corpus",
        )
    made = SuffixAutomaton()
    for token in corpus:
        made.append(token)
    return made
