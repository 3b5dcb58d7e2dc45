"""How often drafts of the shipped drafters are accepted, by temperature: no times, no engine without drafts.

It owns the runs and their sums. The texts are those of ``bench.speculation``, mixed; every step that may draft
makes three drafts.

    python -m bench.acceptance [--methods draft,eagle3,medusa] [--temperatures 0,0.7,1] [--top-p 1,0.9]
                               [--requests 12] [--json F]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from bench import probe
from bench.speculation import FEWEST, TEXTS, Conversation, Ran, Side, conversations
from jserve import build
from jserve.config import EngineConfig
from jserve.sampling import SamplingParams

AT_ONCE = 2


def figures(ran: Ran) -> dict[str, Any]:
    """What was drafted and accepted in a run."""
    drafted = ran.total("spec_decode_num_draft_tokens_total")
    accepted = ran.total("spec_decode_num_accepted_tokens_total")
    tried, right = ran.by_position("draft"), ran.by_position("accepted")
    return {
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": round(accepted / drafted, 4),
        "by_position": [round(a / n, 4) for a, n in zip(right, tried, strict=True)],
        "tokens_per_step": round(
            ran.total("decode_tokens_total") / ran.total("decode_rows_total"), 3
        ),
    }


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each method, temperature and top_p."""
    text = build.text_side(EngineConfig())
    by_text = [conversations(name, args.requests, text.tokenizer) for name in TEXTS]
    asked: list[Conversation] = [talk for group in zip(*by_text, strict=True) for talk in group]
    lines = []
    for method in args.methods:
        side = Side(method, AT_ONCE, text.eos_ids, FEWEST, args.dtype)
        side.fix(FEWEST)
        for temperature in args.temperatures:
            for top_p in args.top_p if temperature else (1.0,):
                side.params = SamplingParams(
                    temperature=temperature, top_p=top_p, max_tokens=args.max_tokens
                )
                found = figures(side.run(asked, AT_ONCE, args.max_tokens))
                about = {"method": method, "temperature": temperature, "top_p": top_p}
                lines.append(about | {"k": FEWEST} | found)
                print(lines[-1], file=sys.stderr)
        side.close()
    return lines


def main(argv: Seq[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.acceptance", description=(__doc__ or "").split("\n")[0]
    )
    words = lambda kind: lambda text: tuple(kind(part) for part in text.split(","))  # noqa: E731
    parser.add_argument("--methods", type=words(str), default=("draft", "eagle3", "medusa"))
    parser.add_argument("--temperatures", type=words(float), default=(0.0, 0.7, 1.0))
    parser.add_argument("--top-p", type=words(float), default=(1.0, 0.9))
    parser.add_argument("--requests", type=int, default=12, help="conversations of each text")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args(argv)
    lines = measure(args)
    options = {"requests": args.requests, "max_tokens": args.max_tokens, "dtype": args.dtype}
    if args.json is not None:
        found = probe.record("acceptance", options, lines)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
