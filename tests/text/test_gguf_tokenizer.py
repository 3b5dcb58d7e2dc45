"""Tokenizers of GGUF headers: the ids of the tokenizers that they were made of."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jserve.errors import WeightsError
from jserve.gguf.tokenizer import LLAMA3, QWEN2
from jserve.text.chat.files import load_chat_template
from jserve.text.chat.template import Chat
from jserve.text.tokenizer import load_tokenizer
from tests.weights.gguf_files import gguf

TEXTS = [
    "Hello world, hello there!",
    "  two  spaces\n\nand lines\n",
    "It's 12345 o'clock: caf\u00e9 \u4f60\u597d \U0001f642",
    "the the the theme",
    "",
]
CORPUS = [t for t in TEXTS if t] * 3 + ["the theme of the world is there", "1234 5678 hello hello"]


def trained(pattern: str) -> Tokenizer:
    """A byte-level tokenizer."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    return made


def header_of(made: Tokenizer, pre: str, special: tuple[str, ...], **more: Any) -> dict[str, Any]:
    model = json.loads(made.to_str())["model"]
    tokens = [t for t, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    kinds = [1] * len(tokens) + [3] * len(special)
    found = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, *special],
        "token_type": kinds,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": len(tokens),
        "eos_token_id": len(tokens) + 1,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (found | more).items()}


def written(path: Path, metadata: dict[str, Any]) -> Path:
    made = path / "t.gguf"
    made.write_bytes(gguf(metadata, {}))
    return made


@pytest.mark.parametrize(("pre", "pattern"), [("llama-bpe", LLAMA3), ("qwen2", QWEN2)])
def test_byte_level_tokens(tmp_path: Path, pre: str, pattern: str) -> None:
    made = trained(pattern)
    metadata = header_of(made, pre, ("<s>", "</s>"))
    got = load_tokenizer(written(tmp_path, metadata))
    assert got.byte_level
    n = made.get_vocab_size()
    assert (got.bos_id, got.eos_id, got.vocab_size) == (n, n + 1, n + 2)
    assert got.special_ids == {n, n + 1}
    for text in TEXTS:
        ids = got.encode(text, add_special_tokens=False)
        assert ids == made.encode(text).ids
        assert got.decode(ids) == text
    begins = [n] if pre == "llama-bpe" else []
    assert got.encode("hello</s>") == [*begins, *made.encode("hello").ids, n + 1]


def pieces(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece by its definition: the pair of neighbours with the best score is merged, the leftmost of equals."""
    parts = list(text)
    while True:
        pairs = [
            (scores.get(a + b, -1e9), -i) for i, (a, b) in enumerate(itertools.pairwise(parts))
        ]
        best, at = max(pairs, default=(-1e9, 0))
        if best <= -1e9:
            return parts
        parts[-at : -at + 2] = ["".join(parts[-at : -at + 2])]


SCORED = ["\u2581", "h", "e", "l", "o", "w", "t", "r", "d", "he", "ll", "hell", "hello", "\u2581t"]
SCORED += ["\u2581hello", "\u2581th", "the", "\u2581the", "el", "lo", "or", "th", "wor", "world"]


@pytest.mark.parametrize("prefix", [True, False])
def test_scored_pieces(tmp_path: Path, prefix: bool) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *SCORED]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(SCORED)]
    ranks = [-float((7 * i) % 23) for i in range(len(SCORED))]
    scores = dict(zip(SCORED, ranks, strict=True))
    found = {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": [0.0] * 259 + ranks,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": prefix,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    got = load_tokenizer(written(tmp_path, metadata))
    for text in ("hello world", "the hello", "hehello lol", "hello  the"):
        spaced = ("\u2581" if prefix else "") + text.replace(" ", "\u2581")
        want = [tokens.index(piece) for piece in pieces(spaced, scores)]
        ids = got.encode(text, add_special_tokens=False)
        assert ids == want, text
        assert got.encode(text) == [1, *want]
        assert got.decode(ids) == text
    spelled = got.encode("he\u00e9", add_special_tokens=False)
    assert spelled[-2:] == [3 + 0xC3, 3 + 0xA9]
    assert got.decode(spelled) == "he\u00e9"


def test_the_chat_template_of_a_header(tmp_path: Path) -> None:
    metadata = header_of(trained(QWEN2), "qwen2", ("<s>", "</s>"))
    assert load_chat_template(written(tmp_path, metadata)) is None
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0]['content'] }}"
    template = load_chat_template(written(tmp_path, metadata))
    assert template is not None
    assert template.prompt(Chat(messages=[{"role": "user", "content": "hi"}])) == "<s>hi"


TOKENS = ["a", "b", "ab"]
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"model": None}, "model"),
    "another model": ({"model": "t5"}, "model"),
    "another cut": ({"pre": "tekken-9"}, "pre"),
    "no tokens": ({"tokens": None}, "tokens"),
    "twice": ({"tokens": ["a", "a"]}, "tokens"),
    "kinds": ({"token_type": [1]}, "token_type"),
    "merges": ({"merges": ["a b c"]}, "merges"),
    "bos": ({"bos_token_id": 9}, "bos_token_id"),
    "scores": ({"model": "llama"}, "scores"),
    "flag": ({"add_bos_token": 3}, "add_bos_token"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_broken_tokenizer_is_refused_by_key(tmp_path: Path, case: str) -> None:
    change, key = FAULTS[case]
    found = {"model": "gpt2", "tokens": TOKENS, "merges": ["a b"]} | change
    metadata = {f"tokenizer.ggml.{k}": v for k, v in found.items() if v is not None}
    path = written(tmp_path, metadata)
    with pytest.raises(WeightsError) as caught:
        load_tokenizer(path)
    assert caught.value.field == f"{path}:tokenizer.ggml.{key}"


def test_merges_of_what_is_no_token_are_refused(tmp_path: Path) -> None:
    found = {"model": "gpt2", "tokens": TOKENS, "merges": ["a c"]}
    path = written(tmp_path, {f"tokenizer.ggml.{k}": v for k, v in found.items()})
    with pytest.raises(WeightsError, match="no readable tokenizer"):
        load_tokenizer(path)
