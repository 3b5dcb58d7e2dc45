"""The control of speculation on a virtual clock: a real scheduler, tokens and step times as functions of the plan.

So nothing is noise, and two controls can be compared to the percent. A closed loop of five kinds of requests runs with
and without drafts. Whether a draft is right is a coin that its place in the answer fixes, or what an n-gram index finds
there. A step takes what its table says: a part for the step and for each token of a row, of a prompt, of a draft.

A request's seconds depend on whose prompts fall into its steps: without any drafts, in another order, the slowest of
120 takes twice as long. So a request is judged by its own decode steps with the prompts of others left out, and the
seconds from end to end are compared by text. Figures are means over loads:

* ``speedup``: of the load; ``best_fixed``: that of the best number of drafts in every step, none among them;
* ``text``: seconds of the requests of a text without drafts over those with, of the text that gains least;
* ``slowest``: the least share of its decoding speed that a request keeps; ``below_0.9``: requests that keep less.

    python -m bench.speculation_control [--machines gpu,cpu] [--methods draft,eagle3] [--concurrency 1,4] [--json F]
    python -m bench.speculation_control --table [--machines gpu] [--methods draft]
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence as Seq
from itertools import product
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import probe
from jserve.config import EngineConfig
from jserve.engine.engine import Engine
from jserve.ports import InFlight, RunnerLimits, StepTime
from jserve.sampling import SamplingParams
from jserve.sched.scheduler import Scheduler
from jserve.sim.device import SimClock
from jserve.speculation.host.lookup import Lookup
from jserve.speculation.host.ngram import NgramIndex
from jserve.speculation.policy.acceptance import Odds
from jserve.speculation.policy.draft_count import best_k, widths
from jserve.timing.step_costs import MeasuredCosts
from jserve.types import Request, StepPlan, StepResult

MOST, ROWS, CONTEXT, VOCAB, HOST_S = 7, 64, 1024, 1 << 20, 2e-4
TEXTS = {
    "dialogue": (40, 5, 40, 0.95, 0.75, 0.3),
    "copy": (250, 30, 90, 0.75, 0.38, 0.95),
    "json": (120, 20, 50, 0.9, 0.8, 0.1),
    "tools": (160, 3, 25, 0.97, 0.82, 0.4),
    "free": (30, 60, 96, 0.85, 0.72, 0.05),
}
"""Kind of request -> tokens of its prompt, fewest and most of its answer; chances that a draft of a draft model and of
EAGLE-3 is right, given those before it; share of the answer that stands in the prompt."""
MACHINES = {"gpu": (32, 5, 5, 0.08), "cpu": (8, 25, 40, 0.15), "old cpu": (8, 120, 60, 0.15)}
"""Rows beside which it drafts at most; microseconds of each token of a row and of a prompt, beside 1 ms of the step;
what a draft takes of a step of one token per row."""
METHODS = ("draft", "eagle3", "ngram")
FIXED, LOADS = (3, MOST), 2
BEHIND = [0] * 4 * (1 + MOST)
"""Tokens of steps that were under way when an answer ended."""


class Asked(NamedTuple):
    request: Request
    text: str
    answer: list[int]
    right: dict[str, list[int]]
    """Method -> place in the answer -> how many of MOST drafts there are right."""


def limits(machine: str, method: str) -> RunnerLimits:
    """As of an engine with 64 sequences; ``method`` off: one that cannot draft."""
    draft_rows, per_token, per_prompt, per_draft = MACHINES[machine]
    on, copies = int(method != "off"), method == "ngram"
    times = []
    for rows, n, width in product((1, 2, 4, 8, 16, 32, 64), (0, 32, 128, 256), widths(MOST * on)):
        k, tokens = width - 1, 1e-6 * (per_token * rows * width + per_prompt * n)
        drafting = k * per_draft * (1e-3 + 1e-6 * per_token * rows) + 0.1 * tokens * (k > 0)
        if not n or width <= 4:
            time: dict[str, Any] = {"n_decode": rows, "n_prefill": n, "width": width, "n_draft": k}
            seconds = 1e-3 + tokens + (0.0 if copies else drafting)
            times.append(StepTime(**time, n_context=CONTEXT, seconds=seconds))
    many = {"n_slots": ROWS, "max_rows": ROWS, "max_decode_rows": ROWS, "draft_rows": draft_rows}
    prefill = {"max_prefill_tokens": 256, "max_prefill_rows": 8, "prefill_width": 4 * on}
    sizes = {"n_pages": 4096, "page_size": 16, "max_model_len": CONTEXT, "vocab_size": VOCAB}
    drafts = {"max_drafts": MOST * on, "device_drafts": MOST * on, "drafts_from_text": copies}
    given: dict[str, Any] = {**many, **prefill, **sizes, **drafts, "step_times": tuple(times)}
    return RunnerLimits(**given, drafts_from_kv=bool(on) and not copies)


def load(n: int, seed: int = 0) -> list[Asked]:
    """``n`` requests of all texts, shuffled."""
    rng, found = np.random.default_rng(seed), []
    for i, name in enumerate(rng.permutation(list(TEXTS) * -(-n // len(TEXTS)))[:n].tolist()):
        n_prompt, fewest, most, *chances, copies = TEXTS[name]
        prompt, long = rng.integers(VOCAB, size=n_prompt).tolist(), int(rng.integers(fewest, most))
        answer: list[int] = []
        while len(answer) < long:
            at, fresh = rng.integers(n_prompt - 8), rng.integers(VOCAB, size=8).tolist()
            answer += prompt[at : at + 16] if rng.random() < copies else fresh
        params = SamplingParams(temperature=0.0, max_tokens=long)
        request = Request(id=f"{i}", prompt_ids=tuple(prompt), params=params)
        right = {"off": [0] * long, "ngram": _copied(prompt, answer[:long])}
        for method, chance in zip(METHODS, chances, strict=False):
            coin_N = (rng.random(long + MOST) < chance).tolist()
            right[method] = [_run(coin_N[at : at + MOST]) for at in range(long)]
        found.append(Asked(request, name, answer[:long], right))
    return found


def _copied(prompt: list[int], answer: list[int]) -> list[int]:
    """Place -> how many tokens that an n-gram index proposes there are right."""
    index, found = NgramIndex(2, 4, CONTEXT), []
    for token in prompt:
        index.append(token)
    for at, token in enumerate(answer):
        found.append(_run([*map(eq, index.after(MOST), answer[at:])]))
        index.append(token)
    return found


def _run(right: list[bool]) -> int:
    return [*right, False].index(False)


class TableRunner:
    """``ports.Runner`` that draws the answers of ``asked`` and takes what the step times of ``limits`` say."""

    def __init__(self, method: str, lim: RunnerLimits, asked: Seq[Asked], clock: SimClock) -> None:
        self.method, self.limits, self.clock = method, lim, clock
        self._asked = {one.request.id: one for one in asked}
        self._costs, self._free_at = MeasuredCosts(lim.step_times), 0.0
        self._drawn: dict[str, int] = {}
        """Request -> tokens that the device has drawn."""
        self.own: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        """Request -> seconds of its decode steps without the prompts of others; those of as many plain steps as it
        drew tokens."""

    def launch(self, plan: StepPlan) -> InFlight:
        decode = [row.count for row in plan.rows if row.from_slot]
        n_prefill = sum(row.count for row in plan.rows) - sum(decode)
        size = (len(decode), n_prefill, 1, max(decode, default=1), plan.n_draft)
        took = self._costs.seconds(*size)
        shown = sum(row.count for row in plan.rows if row.backfill)
        plain = self._costs.seconds(len(decode), 0, 1)
        prompts = self._costs.seconds(len(decode), n_prefill - shown, 1) - plain
        self.clock.now += HOST_S
        self._free_at = max(self.clock.now, self._free_at) + took
        return InFlight(
            plan=plan,
            launched=0.0,
            handle=(self._free_at, self._draw(plan, took, took - prompts, plain)),
        )

    def collect(self, flight: InFlight) -> StepResult:
        ends, result = flight.handle
        self.clock.now = max(self.clock.now, ends)
        return result

    def _draw(self, plan: StepPlan, took: float, own: float, plain: float) -> StepResult:
        """The results of ``plan``, of whose seconds ``own`` are not for prompts; without drafts ``plain``."""
        R, J = len(plan.rows), 1 + max(len(row.drafts) for row in plan.rows)
        tokens_RJ, n_ok_R = np.zeros((R, J), np.int32), np.zeros(R, np.int32)
        for r, row in enumerate(plan.rows):
            one = self._asked[row.choice.request.id]
            at = self._drawn.get(one.request.id, 0)
            if row.emits:
                n = n_ok_R[r] = 1 + min(len(row.drafts), (one.right[self.method] + BEHIND)[at])
                tokens_RJ[r, :n] = (one.answer + BEHIND)[at : at + n]
                self._drawn[one.request.id] = at + n
                if row.from_slot and at < len(one.answer):
                    sums = self.own[one.request.id]
                    sums[0] += own
                    sums[1] += plain * min(int(n), len(one.answer) - at)
        rest = {"finite_R": np.ones(R, bool), "logprob_RJ": np.zeros((R, J), np.float32)}
        return StepResult(tokens_RJ=tokens_RJ, n_ok_R=n_ok_R, device_us=took * 1e6, **rest)


class Ran(NamedTuple):
    seconds: float
    ended: dict[str, float]
    """Request -> seconds from its start to its last token."""
    shares: list[float]
    """Of the decoding speed of each request."""
    per_step: float
    """Tokens per row and step."""


def run(machine: str, method: str, asked: Seq[Asked], n: int, k: int | None = None) -> Ran:
    """All of ``asked``, ``n`` at once; ``k``: drafts in every step, None: left to the control."""
    lim, clock = limits(machine, method), SimClock()
    proposer = Lookup("ngram", lambda: (NgramIndex(2, 4, CONTEXT),)) if method == "ngram" else None
    config = EngineConfig.of(max_num_seqs=ROWS, max_num_batched_tokens=CONTEXT)
    scheduler, runner = (
        Scheduler(lim, config, proposer=proposer),
        TableRunner(method, lim, asked, clock),
    )
    scheduler.speculation.fix(k)
    engine = Engine(scheduler, runner, clock=clock)
    waiting, began, ended, said = list(asked), {}, {}, defaultdict(list)
    while waiting or began:
        while waiting and len(began) < n:
            began[waiting[0].request.id] = clock.now
            engine.submit(waiting.pop(0).request)
        for out in engine.step():
            said[out.request_id] += out.token_ids
            if out.finish is not None:
                ended[out.request_id] = clock.now - began.pop(out.request_id)
    assert said == {one.request.id: one.answer for one in asked}, "drafts changed a token"
    told = scheduler.counters()
    per_step = told.get("decode_tokens_total", 1.0) / told.get("decode_rows_total", 1.0)
    return Ran(clock.now, ended, [plain / own for own, plain in runner.own.values()], per_step)


def cell(machine: str, method: str, n: int, loads: int = LOADS) -> dict[str, Any]:
    """The figures of ``n`` requests at once (module docstring)."""
    found = [_figures(machine, method, n, load(max(120, 2 * n), seed)) for seed in range(loads)]
    means = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
    return {"machine": machine, "method": method, "concurrency": n} | means


def _figures(machine: str, method: str, n: int, asked: Seq[Asked]) -> dict[str, float]:
    plain, ran = run(machine, "off", asked, n), run(machine, method, asked, n)
    fixed = [plain.seconds / run(machine, method, asked, n, k).seconds for k in FIXED]
    texts = defaultdict(lambda: np.zeros(2))
    for one in asked:
        texts[one.text] += (plain.ended[one.request.id], ran.ended[one.request.id])
    return {
        "speedup": plain.seconds / ran.seconds,
        "best_fixed": max([1.0, *fixed]),
        "text": min(float(without / with_) for without, with_ in texts.values()),
        "slowest": min(ran.shares),
        "below_0.9": sum(share < 0.9 for share in ran.shares) / len(ran.shares),
        "tokens_per_step": ran.per_step,
    }


def table(machine: str, method: str) -> dict[int, list[int]]:
    """Rows -> the best k where 0, 0.1 ... 1.0 of the drafts are accepted."""
    costs, k_of = MeasuredCosts(limits(machine, method).step_times), range(1 + MOST)
    ks, copies = [w - 1 for w in widths(MOST)], method == "ngram"
    return {
        rows: [
            best_k(
                [Odds(tenth / 10, 1.0)],
                ks,
                k_of,
                lambda k, rows=rows: costs.seconds(rows, 0, CONTEXT, k + 1, 0 if copies else k),
                0.0,
            )
            for tenth in range(11)
        ]
        for rows in (1, 2, 4, 8, 16, 32)
        if rows <= MACHINES[machine][0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.speculation_control")
    given = {"machines": MACHINES, "methods": METHODS, "concurrency": ("1", "4", "16", "64")}
    for name, values in given.items():
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=[*values])
    parser.add_argument("--table", action="store_true", help="print k by rows and acceptance")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    if args.table:
        for machine, method in product(args.machines, args.methods):
            print(f"{machine}, {method}: rows, k where 0, 0.1 ... 1 of the drafts are accepted")
            for n, ks in table(machine, method).items():
                print(f"{n:4}  ", *ks)
        return
    rows = []
    for machine, method, n in product(args.machines, args.methods, args.concurrency):
        rows.append(cell(machine, method, int(n)))
        if len(rows) == 1:
            print(*(f"{name:>16}" for name in rows[0]), sep="")
        shown = (f"{x:16.2f}" if isinstance(x, float) else f"{x:>16}" for x in rows[-1].values())
        print(*shown, sep="", flush=True)
    if args.json is not None:
        found = probe.record("speculation_control", {"loads": LOADS}, rows)
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
