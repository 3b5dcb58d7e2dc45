"""The words of a reference on the texts, kept in a file for the next comparison.

It owns the file: arrays without pickles, named by a digest of all that they depend on.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jserve.quality.metrics import TokenScores
from jserve.quality.texts import Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """TokenScores of all texts, end to end, and answers to all questions."""

    scores: TokenScores
    answers: tuple[str, ...]


def digest(texts: Texts) -> str:
    """16 hex digits of the texts and questions."""
    found = hashlib.blake2b(digest_size=8)
    for ids in (*texts.scored, *(q.prompt_ids for q in texts.questions)):
        found.update(np.asarray([len(ids), *ids], np.int32).tobytes())
    return found.hexdigest()


def place(directory: Path, identity: Mapping[str, Any], texts: Texts) -> Path:
    """The file of a model of this identity on these texts."""
    about = json.dumps([dict(identity), digest(texts)], sort_keys=True)
    return directory / f"{hashlib.blake2b(about.encode(), digest_size=16).hexdigest()}.npz"


def read(path: Path) -> Reference | None:
    """The reference that ``write`` kept; None: there is no such file, or it is broken."""
    try:
        with np.load(path, allow_pickle=False) as found:
            answers = json.loads(found["answers"].tobytes().decode())
            scores = TokenScores(
                logprob_n=found["logprob_n"], ids_nK=found["ids_nK"], top_nK=found["top_nK"]
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return Reference(scores=scores, answers=tuple(answers))


def write(path: Path, reference: Reference) -> None:
    """Keep ``reference``; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    scores, answers = reference.scores, json.dumps(list(reference.answers)).encode()
    with unfinished.open("wb") as file:
        np.savez(
            file,
            logprob_n=scores.logprob_n,
            ids_nK=scores.ids_nK,
            top_nK=scores.top_nK,
            answers=np.frombuffer(answers, np.uint8),
        )
    unfinished.rename(path)


def joined(parts: Sequence[TokenScores]) -> TokenScores:
    """The scores of all texts, end to end."""
    return TokenScores(
        logprob_n=np.concatenate([p.logprob_n for p in parts]),
        ids_nK=np.concatenate([p.ids_nK for p in parts]),
        top_nK=np.concatenate([p.top_nK for p in parts]),
    )


def part(scores: TokenScores, first: int, n: int) -> TokenScores:
    """``n`` tokens from ``first`` on."""
    cut = slice(first, first + n)
    return TokenScores(
        logprob_n=scores.logprob_n[cut], ids_nK=scores.ids_nK[cut], top_nK=scores.top_nK[cut]
    )
