"""What speculation is worth: acceptance, tokens per step and speed-up, by text, proposer and drafts per step.

It owns five kinds of text for the shipped model, the paired runs and the arithmetic. Two engines in this process,
one without speculation; every figure is a ratio of runs in alternating turns, so that a machine that slows down
slows both. Outputs of a pair are compared: in float32 they must be equal; in bfloat16 programs of other widths may
round near ties differently, and requests that differ are counted (such a pair compares texts of other lengths).

A dialogue is asked turn by turn, as a chat client does, each turn behind what was said before; both sides keep
prefixes, for the length of a run. The other texts are one request each. A request is sent as soon as the one
before has ended, while the engine still runs the step that it began before it knew; with ``--rest``, at batch 1,
when that is over: nobody answers within a millisecond.

* ``k``: drafts per step fixed, 0 to 8 (Medusa: to its 4 heads), batch 1, and beside them k chosen by the
  engine (``auto``) with its share of the best fixed k's speed. k = 0 is the price of being able to. A step of k
  drafts runs in the program of the next width (``policy.draft_count.widths``).
* ``auto``: k chosen by the engine, at concurrency 1, 4, 16 and 64, over all texts in one queue; also the
  slowest request's share of its speed without (of each request the median of all pairs), the tokens of its
  answer and its share until the first of them.

``speedup`` is of whole requests, prompts included; ``decode`` is of the time from the first token to the last,
which is where drafts act: answers here are short, so prompts are a large part. ``predicted``, to be compared with
``decode``, is the tokens per step over what a step costs more, with the gap before it that the host leaves::

    (1 + drafts that stood per step) * seconds of a plain step / (seconds of a verify step + drafting)

    python -m bench.speculation --methods eagle3 [--texts dialogue,json] [--k 0,3,7] [--concurrency 1,16]
                                [--requests 12] [--rounds 5] [--tree auto] [--rest] [--json F] [--plot F.svg]

With ``--tree`` drafters on the device leave trees of the most drafts in ``--k``, and verify all or nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import checkpoints
from bench import probe
from checkpoints.recipe.chat import Chat, prompt_and_answer
from checkpoints.recipe.skills import dialogue, extract, passage, story, tools
from jserve import build
from jserve.config import EngineConfig
from jserve.sampling import SamplingParams
from jserve.speculation.host.methods import DEVICE
from jserve.types import Finish, Request

FORMAT = 3
TEXTS = ("dialogue", "copy", "json", "tools", "free")
CONCURRENCY = (1, 4, 16, 64)
MOST, FEWEST = 8, 3
HEADS = Path(checkpoints.__file__).parent
"""Where the shipped drafters of the shipped model lie."""
AHEAD = {"medusa": 4}
"""Most drafts of a method, where it is fewer than MOST."""
Conversation = tuple[tuple[int, ...], ...]
"""Prompts as ids, each sent when the one before is answered."""
err = Console(stderr=True, highlight=False)


def conversations(text: str, n: int, tokenizer: Any, seed: int = 0) -> list[Conversation]:
    """``n`` of a kind; held-out text, the same for a seed."""
    rng = np.random.default_rng(seed)
    skills = {"dialogue": dialogue, "json": extract, "tools": tools, "free": story}
    found = []
    for _ in range(n):
        if text == "copy":
            told = passage.plain(rng, "test")
            asked = [f"{told}\n\n{told[: len(told) // 4]}"]
        else:
            chat = skills[text].generate(rng, "test")
            asked = [prompt_and_answer(part)[0] for part in _turns(chat, all=text == "dialogue")]
        found.append(tuple(tuple(tokenizer.encode(part))[-700:] for part in asked))
    return found


def _turns(chat: Chat, *, all: bool) -> list[Chat]:
    """``chat`` up to each of its answers, or to its last."""
    ends = [i for i, turn in enumerate(chat.turns, 1) if turn.role == "assistant"]
    return [replace(chat, turns=chat.turns[:end]) for end in (ends if all else ends[-1:])]


@dataclass(slots=True, kw_only=True)
class Ran:
    """One run of a list of prompts."""

    seconds: float = 0.0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    """Seconds from the start of the request to its first token."""
    ended: dict[str, float] = field(default_factory=dict)
    """And to its last."""
    counters: dict[str, float] = field(default_factory=dict)
    """What they rose by."""

    def total(self, name: str) -> float:
        """A counter's rise, over all labels."""
        return sum(v for k, v in self.counters.items() if k.partition("{")[0] == name)

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def decode_s(self) -> float:
        """Seconds from first to last tokens, of all requests."""
        return sum(self.ended[i] - self.first[i] for i in self.ended)

    @property
    def step_s(self) -> float:
        """Seconds of a step that carries no prompt, the device's wait for the host included."""
        steps = max(1.0, self.total("decode_steps_total"))
        waits = self.total("decode_step_gap_seconds_total")
        return (self.total("decode_step_seconds_total") + waits) / steps

    @property
    def drafting_share(self) -> float:
        """Of the run, what went into making drafts."""
        made = self.total("spec_decode_drafting_seconds_total")
        return (made + self.total("spec_decode_host_seconds_total")) / self.seconds

    def by_position(self, name: str) -> list[float]:
        """A counter's rise at draft 1, 2 ... of a row, over all lanes."""
        found: dict[int, float] = {}
        for key, value in self.counters.items():
            if key.startswith(f"spec_decode_num_{name}_tokens_per_pos_total"):
                place = int(key.rpartition("position=")[2].rstrip("}"))
                found[place] = found.get(place, 0.0) + value
        return [found[place] for place in sorted(found)]


class Side:
    """One engine, which drafts as much as it likes until ``fix``."""

    def __init__(
        self,
        method: str,
        rows: int,
        eos_ids: tuple[int, ...],
        most: int = MOST,
        dtype: str = "auto",
        tree: str = "",
        rest: bool = False,
    ) -> None:
        speculative: dict[str, Any] = {}
        if method != "off":
            speculative = {"method": method, "num_tokens": min(most, AHEAD.get(method, most))}
        if method in DEVICE:
            speculative |= {"model": str(HEADS / f"jserve-mini-{method}"), "tree": tree}
        self.config = EngineConfig.of(
            dtype=dtype,
            max_num_seqs=rows,
            # So that both sides count alike. 3, for no plain step takes a program of rows of 4 tokens.
            max_drafts=3 if method == "off" else 0,
            prompt_logprobs=False,
            structured_outputs=False,
            speculative=speculative,
        )
        self.engine, self.info = build.engine(self.config)
        self.exact = self.info["dtype"] == "float32"
        self.params = SamplingParams(temperature=0.0)
        """Of all requests, but for ``max_tokens``."""
        self._eos_ids, self._n, self._rests = eos_ids, 0, rest

    def fix(self, k: int | None) -> None:
        """From now on up to ``k`` drafts in every step; None: the engine's own choice."""
        self.engine.scheduler.speculation.fix(k)

    def run(self, asked: Seq[Conversation], concurrency: int, max_tokens: int) -> Ran:
        """All of ``asked``, ``concurrency`` at once, as ``params`` say."""
        ran, before = Ran(), dict(self.engine.scheduler.counters())
        waiting, began, rested = list(range(len(asked))), {}, 0.0
        rests = self._rests and concurrency == 1
        self._n += 1

        def send(talk: int, turn: int) -> None:
            began[f"{talk}-{turn}"] = time.perf_counter()
            self.engine.submit(self._request(f"{talk}-{turn}", asked[talk][turn], max_tokens))

        start = time.perf_counter()
        while waiting or began:
            while waiting and len(began) < concurrency:
                send(waiting.pop(0), 0)
            for out in self.engine.step():
                assert out.finish is not Finish.ERROR, out.error
                name = out.request_id.partition(":")[2]
                ran.tokens.setdefault(name, []).extend(out.token_ids)
                if out.token_ids and name not in ran.first:
                    ran.first[name] = time.perf_counter() - began[name]
                if out.finish is not None:
                    ran.ended[name] = time.perf_counter() - began.pop(name)
                    rested += self._rest() if rests else 0.0
                    talk, turn = map(int, name.split("-"))
                    if turn + 1 < len(asked[talk]):
                        send(talk, turn + 1)
        ran.seconds = time.perf_counter() - start - rested
        self._rest()
        after = self.engine.scheduler.counters()
        ran.counters = {k: v - before.get(k, 0.0) for k, v in after.items()}
        return ran

    def _rest(self) -> float:
        """Wait for what is under way, in which no request is left: seconds."""
        start = time.perf_counter()
        while self.engine.scheduler.has_work:
            self.engine.step()
        return time.perf_counter() - start

    def _request(self, name: str, ids: tuple[int, ...], max_tokens: int) -> Request:
        return Request(
            id=f"{self._n}:{name}",
            prompt_ids=ids,
            params=replace(self.params, max_tokens=max_tokens),
            eos_ids=self._eos_ids,
            cache_salt=str(self._n),  # no run finds what another left
        )

    def close(self) -> None:
        build.close(self.engine)


def paired(
    on: Side, off: Side, asked: Seq[Conversation], concurrency: int, rounds: int, most: int
) -> dict[str, Any]:
    """Figures of ``rounds`` pairs of runs, after one that nobody counts.

    Raises:
        SystemExit: outputs of a pair differ, in float32.
    """
    pairs = [
        (off.run(asked, concurrency, most), on.run(asked, concurrency, most))
        for _ in range(rounds + 1)
    ]
    n_other = sum(spec.tokens[i] != plain.tokens[i] for plain, spec in pairs for i in plain.tokens)
    if n_other and on.exact:
        raise SystemExit("speculation changed an output; see tests/whole/test_speculation.py")
    differ = n_other / sum(len(plain.tokens) for plain, _ in pairs)
    return account(pairs[1:]) | {"differ": differ}


def account(pairs: Seq[tuple[Ran, Ran]]) -> dict[str, Any]:
    """Acceptance, tokens per step, predicted and measured speed-up of (without, with) pairs."""
    runs = [spec for _, spec in pairs]
    drafted = sum(r.total("spec_decode_num_draft_tokens_total") for r in runs)
    stood = sum(r.total("spec_decode_num_accepted_tokens_total") for r in runs)
    rows = sum(r.total("decode_rows_total") for r in runs)
    per_step = sum(r.total("decode_tokens_total") for r in runs) / max(1.0, rows)
    tried, right = (
        [sum(at) for at in zip_longest(*(r.by_position(name) for r in runs), fillvalue=0.0)]
        for name in ("draft", "accepted")
    )
    speed = [plain.seconds / spec.seconds for plain, spec in pairs]
    slowest, which = min(
        (statistics.median(plain.ended[i] / spec.ended[i] for plain, spec in pairs), i)
        for i in pairs[0][0].ended
    )
    return {
        "acceptance": stood / drafted if drafted else None,
        "acceptance_by_position": [a / max(1.0, n) for a, n in zip(right, tried, strict=True)],
        "proposed": drafted,
        "accepted": stood,
        "drafting_share": statistics.median(r.drafting_share for r in runs),
        "tokens_per_step": per_step,
        "predicted": statistics.median(per_step * p.step_s / s.step_s for p, s in pairs),
        "speedup": statistics.median(speed),
        "speedup_range": [min(speed), max(speed)],
        "decode": statistics.median(plain.decode_s / spec.decode_s for plain, spec in pairs),
        "slowest_request": slowest,
        "slowest_tokens": len(runs[0].tokens.get(which, ())),
        "slowest_first": statistics.median(p.first[which] / s.first[which] for p, s in pairs),
        "tok_s": statistics.median(spec.n_tokens / spec.seconds for spec in runs),
        "tok_s_off": statistics.median(plain.n_tokens / plain.seconds for plain, _ in pairs),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every pair that was asked for."""
    text = build.text_side(EngineConfig())
    texts = {name: conversations(name, args.requests, text.tokenizer) for name in args.texts}
    mixed = [p for group in zip(*texts.values(), strict=True) for p in group]
    off = Side("off", max(args.concurrency), text.eos_ids, dtype=args.dtype, rest=args.rest)
    rows: list[dict[str, Any]] = []
    programs = {"off": off.info["programs"]}
    for method in args.methods:
        most = max([*args.k, FEWEST])
        options = (most, args.dtype, args.tree, args.rest)
        on = Side(method, max(args.concurrency), text.eos_ids, *options)
        for name, asked in texts.items() if args.k else ():
            for k in (k for k in args.k if k <= AHEAD.get(method, MOST)):
                on.fix(k)
                found = paired(on, off, asked, 1, args.rounds, args.max_tokens)
                rows.append({"kind": "k", "method": method, "text": name, "k": k} | found)
                err.print(f"{method} {name} k={k}: {found['speedup']:.2f}, {found['decode']:.2f}")
            on.fix(None)
            found = paired(on, off, asked, 1, args.rounds, args.max_tokens)
            fixed = [r["speedup"] for r in rows if (r["method"], r.get("text")) == (method, name)]
            found["of_best_k"] = found["speedup"] / max(fixed) if fixed else None
            rows.append({"kind": "k", "method": method, "text": name, "k": "auto"} | found)
            err.print(f"{method} {name} auto: {found['speedup']:.2f}, {found['decode']:.2f}")
        for n in args.concurrency:
            asked = (mixed * (1 + 2 * n // len(mixed)))[: max(len(mixed), 2 * n)]
            found = paired(on, off, asked, n, args.rounds, args.max_tokens)
            rows.append({"kind": "auto", "method": method, "concurrency": n} | found)
            err.print(f"{method} concurrency {n}: {found['speedup']:.2f}")
        programs[method] = on.info["programs"]
        on.close()
    off.close()
    about = {
        "machine": probe.machine(),
        "programs": programs,
        "tree": args.tree,
        "rest": args.rest,
    }
    return {"format": FORMAT, "about": about, "rows": rows}


def shown(result: dict[str, Any], console: Console) -> None:
    """The two tables."""
    columns = (
        "acceptance",
        "tokens_per_step",
        "drafting_share",
        "predicted",
        "decode",
        "speedup",
        "slowest_request",
        "of_best_k",
        "differ",
    )
    for kind, keys in (("k", ("method", "text", "k")), ("auto", ("method", "concurrency"))):
        table = Table(title="batch 1, k drafts" if kind == "k" else "k chosen by the engine")
        for name in (*keys, *columns):
            table.add_column(name.replace("_", " "), justify="right")
        for row in result["rows"]:
            if row["kind"] == kind:
                values = ["" if row.get(c) is None else f"{row[c]:.2f}" for c in columns]
                table.add_row(*(str(row[key]) for key in keys), *values)
        console.print(table)


def draw(result: dict[str, Any], path: Path) -> None:
    """Speed-up over k, a panel per method and a line per text, and over concurrency."""
    from jserve.sim.plot import figure

    rows = result["rows"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    with figure(path, len(methods) + 1, "speculation on the shipped model") as axes:
        for axis, method in zip(axes, methods, strict=False):
            mine = [r for r in rows if r["kind"] == "k" and r["method"] == method]
            for text in dict.fromkeys(r["text"] for r in mine):
                line = [
                    (r["k"], r["speedup"]) for r in mine if r["text"] == text and r["k"] != "auto"
                ]
                axis.plot(*zip(*line, strict=True), "o-", label=text)
            axis.set(xlabel="drafts per step", ylabel="speed-up", title=method)
        for method in methods:
            line = [
                (r["concurrency"], r["speedup"])
                for r in rows
                if r["kind"] == "auto" and r["method"] == method
            ]
            axes[-1].plot(*zip(*line, strict=True), "o-", label=method)
        axes[-1].set_xscale("log", base=2)
        axes[-1].set(xlabel="requests at once", ylabel="speed-up", title="k chosen")
        for axis in axes:
            axis.axhline(1.0, color="grey", linewidth=0.8)
            axis.legend(fontsize=7)


def main(argv: Seq[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.speculation", description=(__doc__ or "").split("\n")[0]
    )
    words = lambda kind: lambda text: tuple(kind(x) for x in text.split(",") if x)  # noqa: E731
    parser.add_argument("--methods", type=words(str), default=("ngram", "suffix"))
    parser.add_argument("--texts", type=words(str), default=TEXTS)
    parser.add_argument(
        "--k",
        type=words(int),
        default=tuple(range(MOST + 1)),
        help="drafts per step; empty: no runs text by text, only those of many requests",
    )
    parser.add_argument("--concurrency", type=words(int), default=CONCURRENCY)
    parser.add_argument("--requests", type=int, default=12, help="conversations of each text")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs per figure")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--tree", default="", choices=("", "auto"))
    parser.add_argument("--rest", action="store_true", help="send to an engine at rest, at batch 1")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--plot", type=Path, help="SVG file to draw")
    args = parser.parse_args(argv)
    if args.plot is not None:
        from jserve.sim.plot import check

        check(args.plot)
    result = measure(args)
    shown(result, Console(width=120))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot is not None:
        draw(result, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
