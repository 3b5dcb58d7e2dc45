"""A tiny random GPT-NeoX checkpoint, and what transformers draws from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 192,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.25,
    },
    "eos_token_id": 2,
}


def model_and_config() -> tuple[Any, dict[str, Any]]:
    from tests.model import hf

    return hf.tiny("GPTNeoXForCausalLM", **SHAPE)


def neox_checkpoint(root: Path, tiny_dir: Path) -> Path:
    """A directory as the hub has them, with the tokenizer of ``tiny_dir``."""
    model, config = model_and_config()
    model.save_pretrained(root)
    (root / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_dir / name, root / name)
    return root
