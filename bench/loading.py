"""Loading a checkpoint of many small tensors: seconds beside a plain read of the same files.

    python -m bench.loading --json FILE

A Qwen3-MoE of random bfloat16 weights with 48 layers of 128 experts, each tensor in the file on its own: 18,867 tensors
of 0.9 GiB in all, some sixtieth of the size that such models have, so that what a tensor costs shows. A plain read
takes the files into memory one after the other, 16 MiB at a time. The two alternate; ``cold`` rounds have the files'
pages dropped from the page cache first, as far as the system does that when asked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from bench import command, probe
from jserve.config import EngineConfig
from jserve.model.families import family_for
from jserve.runner.layout import placement
from jserve.weights.loader import load
from jserve.weights.source import resolve

READ_AT_ONCE = 16 * 2**20
TENSORS_PER_FILE = 1200
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "moe_intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
err = Console(stderr=True, highlight=False)


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of every tensor of the checkpoint, by its name."""
    D, F, H = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    q, kv = (config[f"num_{kind}_heads"] * H for kind in ("attention", "key_value"))
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], D),
        "lm_head.weight": (config["vocab_size"], D),
        "model.norm.weight": (D,),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        found |= {
            f"{layer}.input_layernorm.weight": (D,),
            f"{layer}.post_attention_layernorm.weight": (D,),
            f"{layer}.self_attn.q_norm.weight": (H,),
            f"{layer}.self_attn.k_norm.weight": (H,),
            f"{layer}.self_attn.q_proj.weight": (q, D),
            f"{layer}.self_attn.k_proj.weight": (kv, D),
            f"{layer}.self_attn.v_proj.weight": (kv, D),
            f"{layer}.self_attn.o_proj.weight": (D, q),
            f"{layer}.mlp.gate.weight": (config["num_experts"], D),
        }
        for e in range(config["num_experts"]):
            at = f"{layer}.mlp.experts.{e}"
            found |= {f"{at}.gate_proj.weight": (F, D), f"{at}.up_proj.weight": (F, D)}
            found |= {f"{at}.down_proj.weight": (D, F)}
    return found


def write(out: Path, config: dict[str, Any]) -> list[Path]:
    """The checkpoint of random weights; its files of tensors."""
    rng = np.random.default_rng(0)
    (out / "config.json").write_text(json.dumps(config))
    left, index = list(shapes(config).items()), {}
    n_files = -(-len(left) // TENSORS_PER_FILE)
    for number in range(n_files):
        name = f"model-{number + 1:05}-of-{n_files:05}.safetensors"
        some = left[number * TENSORS_PER_FILE : (number + 1) * TENSORS_PER_FILE]
        draw = {
            key: (rng.standard_normal(shape, np.float32) / 16).astype(ml_dtypes.bfloat16)
            for key, shape in some
        }
        save_file(draw, out / name, metadata={"format": "pt"})
        index |= dict.fromkeys(draw, name)
    meta = {"metadata": {}, "weight_map": index}
    (out / "model.safetensors.index.json").write_text(json.dumps(meta))
    return sorted(out.glob("*.safetensors"))


def plain_read(files: list[Path]) -> float:
    """Seconds to read the files, one after the other, into one buffer."""
    buffer, began = bytearray(READ_AT_ONCE), time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as f:
            while f.readinto(buffer):
                pass
    return time.perf_counter() - began


def loaded(directory: Path) -> float:
    """Seconds to load the checkpoint."""
    import jax

    source = resolve(str(directory))
    family = family_for(source.config)
    mesh, rules = placement(EngineConfig.of(), None)
    began = time.perf_counter()
    tree = load(family, family.arch(source.config), source, mesh, rules, ml_dtypes.bfloat16)
    jax.block_until_ready(tree)
    return time.perf_counter() - began


def forget(files: list[Path]) -> None:
    """Ask the system to drop the files' pages from its cache."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def measure(rounds: int, config: dict[str, Any]) -> dict[str, Any]:
    """Rounds of each kind: seconds of both, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder), config)
        n_bytes = sum(path.stat().st_size for path in files)
        loaded(Path(folder))  # imports and the first use of the device
        lines: list[dict[str, Any]] = []
        for number in range(rounds):
            for cold in (True, False):
                times: dict[str, float] = {}
                for what in ("load", "read") if number % 2 else ("read", "load"):
                    if cold:
                        forget(files)
                    times[what] = loaded(Path(folder)) if what == "load" else plain_read(files)
                line = {"cold": cold, "load_s": times["load"], "read_s": times["read"]}
                lines.append(line)
                err.print(f"round {number + 1} of {rounds}: {line}")
    options = {"rounds": rounds, "n_tensors": len(shapes(config)), "n_bytes": n_bytes}
    return probe.record("loading", options, lines)


def show(result: dict[str, Any], console: Console) -> None:
    GB, tensors = result["options"]["n_bytes"] / 1e9, result["options"]["n_tensors"]
    table = Table(title=f"{tensors} tensors of {GB:.2f} GB: medians of rounds")
    for name in ("page cache", "load s", "read s", "load GB/s", "read GB/s", "load over read"):
        table.add_column(name, justify="right")
    for cold in (True, False):
        of = [line for line in result["lines"] if line["cold"] == cold]
        load_s, read_s = (statistics.median(x[k] for x in of) for k in ("load_s", "read_s"))
        ratio = statistics.median(x["load_s"] / x["read_s"] for x in of)
        row = (load_s, read_s, GB / load_s, GB / read_s, ratio)
        table.add_row("dropped" if cold else "kept", *(f"{x:.2f}" for x in row))
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.loading", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--rounds", type=int, default=5, help="of each kind (5)")
    p.add_argument("--json", type=Path, help="result file to write")
    args = p.parse_args(argv)
    result = measure(args.rounds, CONFIG)
    command.tell(result, args.json, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
