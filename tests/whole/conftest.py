"""A tiny model directory with a byte-level tokenizer and a chat template, weights drawn at load."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.whole import equal
from tests.whole.equal import TINY

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL_OPTIONS = {  # of all doors, so that engines share programs, and there are few of them
    "load_format": "dummy",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_model_len": 160,
    "compile_cache": os.environ.get("JAX_COMPILATION_CACHE_DIR", ""),
    "prompt_logprobs": False,
}


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model") / "tiny-llama"
    root.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 3], trainer)
    tokenizer.save(str(root / "tokenizer.json"))
    words = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (root / "tokenizer_config.json").write_text(json.dumps(words))
    config = {**TINY, "vocab_size": 320, "eos_token_id": 2}
    (root / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="session")
def runner():
    """One compiled runner for all whole-engine workloads."""
    return equal.make_runner()
