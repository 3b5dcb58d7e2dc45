"""Chats to training rows: tokenise, weigh every token, pack documents into rows of fixed length.

Owns the `Batch`. A batch is a pure function of (seed, step), so a resumed run sees exactly the text
an uninterrupted run would have seen.
"""

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from checkpoints.recipe import skills
from checkpoints.recipe.chat import SEAM, Chat, segments


@dataclass(frozen=True)
class Batch:
    """`weights_BT[b, t]` weighs the prediction of token t + 1; documents are numbered from 1."""

    tokens_BT: np.ndarray
    documents_BT: np.ndarray
    weights_BT: np.ndarray


def encode(tokenizer: Tokenizer, chats: list[Chat]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids and loss weights per chat. A token belongs to the piece its first char is in."""
    runs = [_runs(segments(chat)) for chat in chats]
    texts = ["".join(text for text, _ in run) for parts in runs for run in parts]
    encodings = iter(tokenizer.encode_batch(texts))
    return [_weighed(parts, [next(encodings) for _ in parts]) for parts in runs]


def _runs(pieces: list[tuple[str, float]]) -> list[list[tuple[str, float]]]:
    """The pieces cut into runs at each seam."""
    runs: list[list[tuple[str, float]]] = [[]]
    for piece in pieces:
        if piece == SEAM:
            runs.append([])
        else:
            runs[-1].append(piece)
    return runs


def _weighed(runs, encodings) -> tuple[np.ndarray, np.ndarray]:
    ids, weights = [], []
    for parts, encoding in zip(runs, encodings, strict=True):
        ends = np.cumsum([len(text) for text, _ in parts])
        starts = np.array([start for start, _ in encoding.offsets])
        ids.append(np.array(encoding.ids, np.int32))
        owner = np.searchsorted(ends, starts, side="right")
        weights.append(np.array([weight for _, weight in parts], np.float32)[owner])
    return np.concatenate(ids), np.concatenate(weights)


def _place(batch: Batch, row: int, used: int, document: int, ids, weights) -> None:
    span = slice(used, used + len(ids))
    batch.tokens_BT[row, span] = ids
    batch.documents_BT[row, span] = document
    batch.weights_BT[row, used : used + len(ids) - 1] = weights[1:]


def pack(encoded, rows: int, length: int) -> Batch:
    """First fit into `rows` rows; what does not fit is dropped, the remainder is padding."""
    shape = (rows, length)
    batch = Batch(np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32))
    used, documents = [0] * rows, [0] * rows
    for ids, weights in encoded:
        row = next((r for r in range(rows) if used[r] + len(ids) <= length), None)
        if row is None:
            continue
        documents[row] += 1
        _place(batch, row, used[row], documents[row], ids, weights)
        used[row] += len(ids)
    return batch


def _rng(seed: int, step: int) -> np.random.Generator:
    return np.random.default_rng([seed, step])


def short_batch(
    tokenizer: Tokenizer,
    seed: int,
    step: int,
    rows: int,
    length: int,
    curriculum: bool = False,
    mixture: str = "first",
) -> Batch:
    """Ordinary chats, several to a row. Rows are overfilled with candidates to leave few gaps."""
    rng = _rng(seed, step)
    count = rows * length // 64
    chats = [skills.draw(rng, "train", curriculum, mixture) for _ in range(count)]
    return pack(encode(tokenizer, chats), rows, length)


def long_batch(
    tokenizer: Tokenizer, seed: int, step: int, rows: int, length: int, mixture: str = "first"
) -> Batch:
    """One long chat to a row, cut at the row's end."""
    rng = _rng(seed, step)
    chats = [skills.draw_long(rng, "train", length // 13, mixture) for _ in range(rows)]
    cut = [(ids[:length], weights[:length]) for ids, weights in encode(tokenizer, chats)]
    return pack(cut, rows, length)
