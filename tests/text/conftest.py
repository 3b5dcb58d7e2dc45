"""Small tokenizers of the kinds that models ship, trained here from a few lines of text."""

from __future__ import annotations

import json

import pytest
from hypothesis import settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from jserve.text.tokenizer import TextTokenizer

settings.register_profile("jserve", deadline=None, derandomize=True)
settings.load_profile("jserve")

CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the dog sleeps",
    "naïve café déjà vu: 你好，世界 привет мир 👩‍👩‍👧 🎉🎉 one two three",
    '{"stop": ["\\n\\n", "###"], "value": 12345}',
]
SPECIAL = ["<|bos|>", "<|end|>", "<|user|>"]
CONFIG = {"bos_token": {"content": "<|bos|>", "special": True}, "eos_token": "<|end|>"}


def byte_level_bpe() -> Tokenizer:
    hf = Tokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    hf.train_from_iterator(CORPUS * 4, trainer)
    hf.add_tokens([AddedToken("<think>", special=False), AddedToken("wörd x", special=False)])
    return hf


def sentencepiece_like() -> Tokenizer:
    """Metaspace pieces, a fallback token per byte, the decoder chain of Llama 2."""
    pieces = ["<unk>", *SPECIAL, *(f"<0x{b:02X}>" for b in range(256))]
    pieces += [
        *"\u2581abcdefghijklmnopqrstuvwxyz.,#",
        "\u2581a",
        "\u2581the",
        "th",
        "he",
        "é",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("\u2581", "a"), ("t", "h"), ("h", "e")]
    hf = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    hf.pre_tokenizer = pre_tokenizers.Metaspace()
    hf.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    hf.add_special_tokens(SPECIAL)
    return hf


@pytest.fixture(scope="session")
def byte_tokenizer() -> TextTokenizer:
    return TextTokenizer(byte_level_bpe(), CONFIG)


@pytest.fixture(scope="session")
def piece_tokenizer() -> TextTokenizer:
    return TextTokenizer(sentencepiece_like(), CONFIG)


@pytest.fixture
def model_dir(tmp_path, byte_tokenizer):
    """A directory with the files of the byte-level tokenizer."""
    byte_tokenizer.hf.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return tmp_path
