"""A byte-level BPE tokenizer trained on the generated text.

Owns vocabulary size and splitting rules. Digits stand alone, so arithmetic is about digits; any
byte string round-trips, because all 256 bytes are in the alphabet.
"""

import json
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from checkpoints.recipe import skills
from checkpoints.recipe.chat import MARKUP_TOKENS, SPECIAL_TOKENS, segments

VOCAB_SIZE = 2048
SEED = 20_000


# GPT-2's pattern with one change: a run of line breaks is one piece whatever follows it. A prompt
# that ends in line breaks then has the tokens it had in training, when an answer followed them.
_PIECES = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _splitting() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train_tokenizer(chats: int = 20_000, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    rng = np.random.default_rng(SEED)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _splitting()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *MARKUP_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (_text(skills.draw(rng, "train")) for _ in range(chats))
    tokenizer.train_from_iterator(texts, trainer)
    return _keep_markup_visible(tokenizer)


def _text(chat) -> str:
    return "".join(text for text, _ in segments(chat))


def _keep_markup_visible(tokenizer: Tokenizer) -> Tokenizer:
    """Think and tool tags stay in decoded text when special tokens are skipped."""
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["content"] in SPECIAL_TOKENS
    return Tokenizer.from_str(json.dumps(spec))


def load_or_train(path: Path) -> Tokenizer:
    if path.exists():
        return Tokenizer.from_file(str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    tokenizer.save(str(path))
    return tokenizer
