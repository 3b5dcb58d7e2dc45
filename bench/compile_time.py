"""Seconds to compile the step programs of an engine: a model of experts beside a dense one of as many layers, in turns.

    python -m bench.compile_time [--layers 48] [--rounds 3] [--json FILE]

The programs are those of a server of 32 sequences on this machine, with its native kernels where it has some. Matrices
are small, since their sizes hardly count; the experts are as many as those of Qwen3-30B-A3B, 8 of 128.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from bench import report
from bench.probe import record
from jserve.model import native
from jserve.model.attention import backend
from jserve.model.hand import step_model
from jserve.model.step import StepModel
from jserve.runner.buckets import Ladder
from jserve.runner.programs import Programs, compile_options

SLOTS, CHUNK, PROMPTS = 32, 512, 8
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
CONFIGS = {"dense": DENSE, "experts": EXPERTS}


def model_of(config: dict[str, Any], layers: int, level: str) -> StepModel:
    model = step_model(
        config | {"num_hidden_layers": layers}, slots=SLOTS, row_pages=64, dtype=jnp.bfloat16
    )
    attention = "native" if native.has_attention(level) else "xla"
    return dataclasses.replace(model, kernels=level, backend=backend(attention))


def seconds(model: StepModel, ladder: Ladder) -> tuple[float, float]:
    """(of the clock, of processors) to compile all programs, as a start does."""
    wall, cpu = time.perf_counter(), time.process_time()
    Programs(model, ladder.buckets, options=compile_options("cpu"))
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(layers: int, rounds: int) -> list[dict[str, Any]]:
    """One line a round."""
    level, _ = native.available("cpu", jnp.bfloat16)
    ladder = Ladder.of(
        max_decode_rows=SLOTS,
        max_prefill_tokens=CHUNK,
        max_prefill_rows=PROMPTS,
        masks=True,
        skips_padding=native.takes_rows(level, CHUNK + SLOTS),
    )
    lines = []
    for turn in range(rounds):
        order = list(CONFIGS.items())[:: 1 if turn % 2 == 0 else -1]
        found = {name: seconds(model_of(config, layers, level), ladder) for name, config in order}
        line: dict[str, Any] = {"layers": layers, "programs": len(ladder.buckets)}
        for name, (wall, cpu) in found.items():
            line |= {f"{name}_s": round(wall, 1), f"{name}_cpu_s": round(cpu, 1)}
        line["ratio"] = round(found["experts"][0] / found["dense"][0], 2)
        lines.append(line)
        print(
            "{layers:6d} {dense_s:9.1f} {experts_s:10.1f} {ratio:6.2f}".format(**line), flush=True
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compile_time", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--layers", type=int, default=48, help="of either model (48)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of either model (3)")
    parser.add_argument("--json", type=Path, default=None, help="result file to write")
    args = parser.parse_args(argv)
    if args.layers < 1 or args.rounds < 1:
        parser.error("--layers and --rounds must be at least 1")
    print("layers   dense s  experts s  ratio", flush=True)
    lines = measure(args.layers, args.rounds)
    print(f"median ratio {statistics.median(line['ratio'] for line in lines):.2f}")
    if args.json is not None:
        report.write(record("compile_time", {"rounds": args.rounds}, lines), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
