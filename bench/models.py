"""Dummy models for speed runs: real Hugging Face directories with seeded random weights.

It owns the shapes the project measures (llama-60m, llama-1b, granite-1b-a400m with its experts, and llama-8b for a
GPU, where weights are better drawn by the engine: ``--no-weights``) and a byte-level BPE tokenizer for them. Uses numpy
and safetensors, no framework, so that every peer reads the same bytes.

Vocabulary of 32000 ids::

    0 .. 2        <|begin|> <|end|> <|pad|>
    3 .. 258      the 256 bytes in GPT-2's printable alphabet
    259 .. 31323  " a" .. " z", " aa" .. " zz", " aaa" ...: a space and one to four letters
    31324 .. 31999  "aa" .. "zz"

Ids below ``FIRST_WORD`` get a zero embedding row. The embedding is tied to the output, so their
logit is exactly 0 and greedy decoding never picks them: every generated token is two to five ASCII
characters, no server holds text back for half a code point, and each token can be seen as one piece
of text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

VOCAB = 32000
SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>")
FIRST_WORD = len(SPECIAL) + 256
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPACE = "\u0120"
EXPERTS = "block_sparse_moe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama shape, as a rule with tied embeddings and heads of 64; a GraniteMoe shape where it has experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    rope_theta: float
    max_len: int
    rope_scaling: dict[str, Any] | None = None
    head_dim: int = 64
    vocab: int = VOCAB
    tied: bool = True
    experts: int = 0
    """Of a layer, each as wide as ``ffn``; 0: a dense layer."""
    chosen: int = 0
    """Experts of a token."""


SHAPES = {
    "llama-60m": Shape(
        layers=12, hidden=512, heads=8, kv_heads=4, ffn=1792, rope_theta=10000.0, max_len=8192
    ),
    "llama-1b": Shape(
        layers=16,
        hidden=2048,
        heads=32,
        kv_heads=8,
        ffn=8192,
        rope_theta=500000.0,
        max_len=131072,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "granite-1b-a400m": Shape(
        layers=24,
        hidden=1024,
        heads=16,
        kv_heads=8,
        ffn=512,
        rope_theta=1500000.0,
        max_len=131072,
        experts=32,
        chosen=8,
    ),
    "llama-8b": Shape(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        rope_theta=500000.0,
        max_len=131072,
        head_dim=128,
        vocab=128256,
        tied=False,
    ),
    "llama-tiny": Shape(
        layers=1, hidden=64, heads=2, kv_heads=1, ffn=96, rope_theta=10000.0, max_len=8192
    ),
}


def n_params(shape: Shape) -> int:
    """Parameters of the model, the tied embedding once."""
    return sum(math.prod(size) for _, size in tensors(shape))


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, size) of every tensor in file order, named as ``LlamaForCausalLM`` or ``GraniteMoeForCausalLM`` does."""
    d, f = shape.hidden, shape.ffn
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab, d)
    for i in range(shape.layers):
        at = f"model.layers.{i}"
        yield f"{at}.input_layernorm.weight", (d,)
        yield f"{at}.self_attn.q_proj.weight", (q, d)
        yield f"{at}.self_attn.k_proj.weight", (kv, d)
        yield f"{at}.self_attn.v_proj.weight", (kv, d)
        yield f"{at}.self_attn.o_proj.weight", (d, q)
        yield f"{at}.post_attention_layernorm.weight", (d,)
        if shape.experts:
            yield f"{at}.{EXPERTS}.input_linear.weight", (shape.experts, 2 * f, d)
            yield f"{at}.{EXPERTS}.output_linear.weight", (shape.experts, d, f)
            yield f"{at}.{EXPERTS}.router.layer.weight", (shape.experts, d)
        else:
            yield f"{at}.mlp.gate_proj.weight", (f, d)
            yield f"{at}.mlp.up_proj.weight", (f, d)
            yield f"{at}.mlp.down_proj.weight", (d, f)
    yield "model.norm.weight", (d,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab, d)


def draw(name: str, size: tuple[int, ...], seed: int, index: int) -> np.ndarray:
    """bfloat16: ones for norms, else normal with deviation fan-in^-0.5 (embedding 0.02)."""
    if len(size) == 1:
        return np.ones(size, bfloat16)
    embedding = name == "model.embed_tokens.weight"
    values = np.random.default_rng((seed, index)).standard_normal(size, np.float32)
    values *= 0.02 if embedding else 1 / math.sqrt(size[-1])
    if embedding:
        values[:FIRST_WORD] = 0.0
    return values.astype(bfloat16)


def config_json(shape: Shape) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": shape.tied,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    return config | (_granite_moe(shape) if shape.experts else {})


def _granite_moe(shape: Shape) -> dict[str, Any]:
    """As of granite-3.1-1b-a400m."""
    return {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.chosen,
        "rms_norm_eps": 1e-6,
        "attention_multiplier": 1 / shape.head_dim,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
        "output_router_logits": False,
    }


def byte_alphabet() -> list[str]:
    """Stand-ins of the bytes 0..255 in byte-level BPE: a printable one stands for itself."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = itertools.count(256)
    return [chr(b) if b in kept else chr(next(spare)) for b in range(256)]


def words_and_merges(n: int) -> tuple[list[str], list[list[str]]]:
    """The ``n`` words after the bytes, and the one merge that makes each.

    Merges behind a space come first, so that text of any word is cut into exactly that word again.
    """
    pairs = [[a, b] for a in LETTERS for b in LETTERS]
    merges = [[SPACE, a] for a in LETTERS]
    for start in itertools.count():
        if len(merges) >= n - len(pairs):
            break
        merges += [["".join(merges[start]), a] for a in LETTERS]
    merges = merges[: n - len(pairs)] + pairs
    return ["".join(m) for m in merges], merges


def tokenizer_json(vocab: int) -> dict[str, Any]:
    """A byte-level BPE tokenizer of ``vocab`` ids as the ``tokenizers`` library stores it."""
    words, merges = words_and_merges(vocab - FIRST_WORD)
    names = [*SPECIAL, *byte_alphabet(), *words]
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    added = [
        {"id": i, "content": s, **flags, "normalized": False, "special": True}
        for i, s in enumerate(SPECIAL)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": True},
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": merges,
        },
    }


def tokenizer_config(shape: Shape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_len,
        "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }


def write(folder: Path, shape: Shape, seed: int = 0, *, weights: bool = True) -> Path:
    """Write a complete model directory; the same shape and seed give the same bytes. Without
    ``weights`` for engines that draw their own (jserve's ``--load-format dummy``).

    Raises:
        FileExistsError: ``folder`` holds weights already.
    """
    file = folder / "model.safetensors"
    if file.exists():
        raise FileExistsError(f"{file} exists already; remove it or choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": config_json(shape),
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
        "tokenizer.json": tokenizer_json(shape.vocab),
        "tokenizer_config.json": tokenizer_config(shape),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=None if "merges" in name else 1))
    if not weights:
        return folder
    data = {name: draw(name, size, seed, i) for i, (name, size) in enumerate(tensors(shape))}
    partial = file.with_suffix(".partial")
    save_file(data, partial, {"format": "pt"})
    partial.rename(file)
    return folder


def facts(folder: Path) -> dict[str, Any]:
    """Name, bytes and parameter counts of a model directory, read from its headers, or from its
    config.json if it was written without weights (then in bfloat16).

    ``head_params`` are used once per emitted token, the other ``body_params`` once per token; an untied embedding and
    the experts that a token does not choose are in neither. ``read_bytes`` are of those that are used.

    Raises:
        ValueError: config.json or the safetensors are missing or unreadable.
    """
    files = sorted(folder.glob("*.safetensors"))
    try:
        config = json.loads((folder / "config.json").read_text())
        sizes: dict[str, int] = {}
        for file in files:
            sizes |= _sizes(file)
        sizes = sizes or {name: math.prod(size) for name, size in tensors(_shape(config))}
        table = config["vocab_size"] * config["hidden_size"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{folder}: no readable model ({type(e).__name__}: {e})") from e
    stored = sum(f.stat().st_size for f in files) or 2 * sum(sizes.values())
    tables = sum("embed_tokens" in name or "lm_head" in name for name in sizes)
    of_experts = sum(n for name, n in sizes.items() if EXPERTS in name and "router" not in name)
    experts = config.get("num_local_experts", 1)
    idle = of_experts * (experts - config.get("num_experts_per_tok", 1)) // experts
    return {
        "name": folder.resolve().name,
        "weight_bytes": stored,
        "read_bytes": stored - 2 * idle,
        "body_params": sum(sizes.values()) - tables * table - idle,
        "head_params": table,
    }


def _shape(config: dict[str, Any]) -> Shape:
    """What ``config_json`` was made of."""
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        ffn=config["intermediate_size"],
        rope_theta=config["rope_theta"],
        max_len=config["max_position_embeddings"],
        head_dim=config["head_dim"],
        vocab=config["vocab_size"],
        tied=config["tie_word_embeddings"],
        experts=config.get("num_local_experts", 0),
        chosen=config.get("num_experts_per_tok", 0),
    )


def _sizes(file: Path) -> dict[str, int]:
    """Tensor name -> number of elements, from the header alone."""
    with file.open("rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    header.pop("__metadata__", None)
    return {name: math.prod(entry["shape"]) for name, entry in header.items()}


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.models", description="Write dummy models.")
    p.add_argument("names", nargs="+", choices=SHAPES, help="which models to write")
    p.add_argument("--out", type=Path, required=True, help="folder that gets a directory per model")
    p.add_argument("--seed", type=int, default=0, help="seed of the weights (0)")
    p.add_argument("--no-weights", action="store_true", help="only config and tokenizer")
    args = p.parse_args(argv)
    for name in args.names:
        try:
            shape, weights = SHAPES[name], not args.no_weights
            folder = write(args.out / name, shape, args.seed, weights=weights)
        except OSError as e:
            p.error(str(e))
        print(f"{folder}  {n_params(SHAPES[name]) / 1e6:.1f} M parameters, bf16")
    return 0


if __name__ == "__main__":
    sys.exit(main())
