"""One engine in one process, without HTTP: loads a model, runs workloads, writes what it measured.

It owns how each engine is asked for tokens of token ids. Started by ``bench.offline``, one process per turn, so
that no engine inherits another's threads or memory:

    python -m bench.offline_engines '{"engine": "hf", "model": "DIR", ...}' OUT.json

================  ===============================================================================
jserve            ``jserve.LLM(...).generate``: continuous batching in this process
hf                transformers ``generate``: padded batches, each as long as its longest request
hf-cb             transformers continuous batching (what ``generate_batch`` runs)
================  ===============================================================================
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import probe, workloads
from bench.stats import spread
from bench.workloads import Item, Workload

SEQS = 16
"""Sequences running at once, for every engine."""
CONTEXT = 8192
PAGE, BATCH_TOKENS = 256, 512
Generate = Callable[[Sequence[Item]], list[list[int]]]
"""Items, all at once, to generated ids in the same order."""


@contextlib.contextmanager
def _jserve(spec: dict[str, Any]) -> Iterator[Generate]:
    from jserve import LLM, SamplingParams

    def generate(items: Sequence[Item]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": list(i.prompt)} for i in items]
        params = [
            SamplingParams(temperature=0.0, max_tokens=i.max_tokens, ignore_eos=True) for i in items
        ]
        outs = llm.generate(prompts, params, use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in outs]

    options = {"max_model_len": CONTEXT, "max_num_seqs": SEQS, **spec["options"]}
    with LLM(spec["model"], **options) as llm:
        yield generate


def _hf_model(spec: dict[str, Any]) -> Any:
    """The model in bf16 with end-of-sequence switched off."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@contextlib.contextmanager
def _hf(spec: dict[str, Any]) -> Iterator[Generate]:
    import torch

    model = _hf_model(spec)

    def padded(items: Sequence[Item]) -> list[list[int]]:
        width = max(len(i.prompt) for i in items)
        rows = [[0] * (width - len(i.prompt)) + list(i.prompt) for i in items]
        mask = [[0] * (width - len(i.prompt)) + [1] * len(i.prompt) for i in items]
        longest = max(i.max_tokens for i in items)
        out = model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            max_new_tokens=longest,
            do_sample=False,
        )
        pairs = zip(out, items, strict=True)
        return [row[width : width + i.max_tokens].tolist() for row, i in pairs]

    def generate(items: Sequence[Item]) -> list[list[int]]:
        batches = [items[at : at + SEQS] for at in range(0, len(items), SEQS)]
        return [ids for batch in batches for ids in padded(batch)]

    with torch.inference_mode():
        yield generate


@contextlib.contextmanager
def _hf_cb(spec: dict[str, Any]) -> Iterator[Generate]:
    blocks = SEQS * 2560 // PAGE
    with continuous(
        _hf_model(spec), seqs=SEQS, blocks=blocks, batch_tokens=BATCH_TOKENS
    ) as generate:
        yield generate


@contextlib.contextmanager
def continuous(model: Any, *, seqs: int, blocks: int, batch_tokens: int) -> Iterator[Generate]:
    """transformers' continuous batching of ``model``: ``seqs`` sequences at once over ``blocks``
    pages of PAGE tokens."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    options = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=blocks,
        max_batch_tokens=batch_tokens,
        max_requests_per_batch=seqs,
    )
    # The manager's own loop rather than generate_batch: that one takes a single length for all.
    with model.continuous_batching_context_manager(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
        continuous_batching_config=options,
    ) as manager:

        def generate(items: Sequence[Item]) -> list[list[int]]:
            ids = [
                manager.add_request(list(i.prompt), max_new_tokens=i.max_tokens, eos_token_id=-1)
                for i in items
            ]
            done: dict[str, list[int]] = {}
            while len(done) < len(items):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("transformers' generation thread ended")
            return [done[i] for i in ids]

        yield generate


ENGINES = {"jserve": _jserve, "hf": _hf, "hf-cb": _hf_cb}


def measure(generate: Generate, load: Workload) -> dict[str, Any]:
    """Run one workload: one item at a time when its concurrency is 1, else all items at once."""
    limit = probe.bandwidth()
    groups = [[i] for i in load.items] if load.concurrency == 1 else [list(load.items)]
    before = probe.Clock.read(None)
    took, short = [], 0
    for group in groups:
        begin = time.perf_counter()
        outs = generate(group)
        took.append(time.perf_counter() - begin)
        short += sum(len(ids) != i.max_tokens for ids, i in zip(outs, group, strict=True))
    used = before.until(probe.Clock.read(None))
    result: dict[str, Any] = {
        "requests": len(load.items),
        "errors": short,
        "wall_s": round(sum(took), 4),
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
        "bandwidth": limit,
        "cpu": used,
    }
    if not short:
        result["output_tok_s"] = round(load.output_tokens / sum(took), 3)
    return result | ({"latency_ms": spread(took)} if len(groups) > 1 else {})


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, warm it up, run every workload of ``spec``."""
    begin = time.perf_counter()
    make = {"seed": spec["seed"], "scale": spec["scale"]}
    with ENGINES[spec["engine"]](spec) as generate:
        ready = time.perf_counter() - begin
        warm = workloads.make("warmup", **make)
        generate([Item(prompt=warm.items[0].prompt, max_tokens=1)])
        first = time.perf_counter() - begin
        generate(warm.items)
        results = {name: measure(generate, workloads.make(name, **make)) for name in spec["names"]}
    start = {"cold": False, "ready_s": round(ready, 2), "first_token_s": round(first, 2)}
    return {"start": start, "workloads": results}


def main() -> None:
    spec, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    out.write_text(json.dumps(run(spec)))


if __name__ == "__main__":
    main()
