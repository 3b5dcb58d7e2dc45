"""What structured output costs, and whom: steps of unguided rows beside guided ones, masks, compiles.

It owns the timing. No device is involved: the fake runner sleeps for the time of a step, so what is measured is who
waits for whom. Guided rows are planned every second step under overlap 1; unguided ones must keep one token per
step whatever stands beside them.

    python -m bench.guided MODEL_DIR [--rows 16] [--guided 0,4,16] [--step-ms 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from jserve.config import EngineConfig
from jserve.engine.engine import Engine
from jserve.grammar.compiler import GrammarCompiler
from jserve.grammar.guides import TokenGuides
from jserve.grammar.vocab import ll_tokenizer, vocabulary
from jserve.ports import RunnerLimits
from jserve.sampling import SamplingParams, StructuredOutputs
from jserve.sched.scheduler import Scheduler
from jserve.testing import FakeRunner
from jserve.text.tokenizer import TextTokenizer, load_tokenizer
from jserve.types import Request

TOKENS = 100
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z]{1,20}@[a-z]{1,20}\\.org$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}


def mixed(tokenizer: TextTokenizer, eos: int, rows: int, guided: int, step_s: float) -> Any:
    """ms between tokens of unguided rows (p50, p99) and tokens per step of guided ones."""
    n_vocab = tokenizer.vocab_size
    limits = _limits(rows + guided, n_vocab)
    config = EngineConfig.of(max_num_seqs=rows + guided, max_num_batched_tokens=1024)
    guides = TokenGuides(lambda: vocabulary(tokenizer, n_vocab, (eos,)))
    scheduler = Scheduler(limits, config, guides=guides)
    engine = Engine(scheduler, FakeRunner(limits, step_s=step_s))
    warm = _request("warm", eos, StructuredOutputs(json=RECORD), tokens=2)
    engine.submit(warm)
    engine.drain()
    for i in range(rows):
        engine.submit(_request(f"free{i}", eos, None, tokens=TOKENS))
    for i in range(guided):
        engine.submit(_request(f"guided{i}", eos, StructuredOutputs(json=RECORD), tokens=TOKENS))
    gaps, last, n_guided, began = [], 0.0, 0, engine.n_steps
    while engine.busy:
        outputs = engine.step()
        now = time.monotonic()
        n_guided += sum(len(o.token_ids) for o in outputs if o.request_id.startswith("guided"))
        if any(o.request_id == "free0" for o in outputs):
            gaps.append((now - last) * 1e3)
            last = now
    guides.close()
    gaps = sorted(gaps[1:])
    steps = engine.n_steps - began
    return {
        "unguided": rows,
        "guided": guided,
        "itl_p50_ms": round(statistics.median(gaps), 3) if gaps else None,
        "itl_p99_ms": round(gaps[int(0.99 * (len(gaps) - 1))], 3) if gaps else None,
        "steps": steps,
        "guided_tokens_per_row_and_step": round(n_guided / guided / steps, 2) if guided else None,
    }


def primitives(tokenizer: TextTokenizer, eos: int) -> Any:
    """Microseconds of the parts: compile, mask, take."""
    table = vocabulary(tokenizer, tokenizer.vocab_size, (eos,))
    began = time.perf_counter()
    compiler = GrammarCompiler(ll_tokenizer(table))
    ready = time.perf_counter()
    compiled = compiler.compile(StructuredOutputs(json=RECORD))
    done = time.perf_counter()
    matcher = compiled.matcher.deep_copy()
    masks, takes = [], []
    said = '{"name": "Ada Lovelace", "age": 36, "email": "ada@engine.org", "tags": ["red"]'
    for token in tokenizer.encode(said, add_special_tokens=False):
        start = time.perf_counter()
        matcher.compute_bitmask()
        middle = time.perf_counter()
        matcher.consume_token(token)
        matcher.compute_ff_tokens()
        takes.append((time.perf_counter() - middle) * 1e6)
        masks.append((middle - start) * 1e6)
    return {
        "vocabulary": tokenizer.vocab_size,
        "tokenizer_ms": round((ready - began) * 1e3, 1),
        "compile_ms": round((done - ready) * 1e3, 2),
        "mask_us_p50": round(statistics.median(masks), 1),
        "mask_us_max": round(max(masks), 1),
        "take_us_p50": round(statistics.median(takes), 1),
    }


def _limits(rows: int, n_vocab: int) -> RunnerLimits:
    return RunnerLimits(
        n_slots=rows,
        max_rows=rows,
        max_decode_rows=rows,
        max_prefill_tokens=1024,
        max_prefill_rows=rows,
        max_drafts=0,
        n_pages=1 + rows * 16,
        page_size=16,
        max_model_len=256,
        vocab_size=n_vocab,
    )


def _request(id: str, eos: int, spec: StructuredOutputs | None, tokens: int) -> Request:
    params = SamplingParams(
        max_tokens=tokens, ignore_eos=spec is None, seed=1, structured_outputs=spec
    )
    return Request(id=id, prompt_ids=(5, 6, 7, 8), params=params, eos_ids=(eos,))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--guided", default="0,4,16")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    eos = tokenizer.eos_id or 0
    found = {
        "parts": primitives(tokenizer, eos),
        "mixed": [
            mixed(tokenizer, eos, args.rows, int(n), args.step_ms / 1e3)
            for n in args.guided.split(",")
        ],
    }
    print(json.dumps(found, indent=2))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
