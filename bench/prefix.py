"""What prefix reuse is worth: time to first token and prompt tokens computed, reuse off and on.

It owns three kinds of traffic, an oracle that says how many tokens each request must find in the cache, and the
account. One request at a time, so that the time to the first token is the work for it::

    system      [ 1500 tokens, always the same ][ 60 of the turn ]
    chat        [ turn 1 ][ answer 1 ][ turn 2 ][ answer 2 ][ turn 3 ] ...
    retrieval   [ one of a fixed set of documents ][ question ]      documents made with /v1/caches

Every request is checked: the tokens its usage calls cached are those of the oracle, and the tokens
the scheduler planned (a counter of /metrics) are the rest, to the token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

from bench import probe, report
from bench.client import StreamError, connections, sse_data
from bench.engines import CONTEXT, EngineError, Paths, Running, build
from bench.models import facts
from bench.serving import ending_unwinds
from bench.stats import percentile
from bench.workloads import Draw

FORMAT = 1
PAGE = 32
SYSTEM, TURN, ANSWER = 1500, 60, 16
DOCUMENT, N_DOCUMENTS, QUESTION = 800, 4, 40
err = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """One request. ``prompt`` is complete; ``head`` of it is what the cache ``cache`` holds."""

    prompt: tuple[int, ...]
    max_tokens: int = ANSWER
    cache: str | None = None
    head: int = 0


@dataclass(slots=True, kw_only=True)
class Seen:
    """What came back for a ``ParsedRequest``."""

    ttft_s: float = 0.0
    n_prompt: int = 0
    n_cached: int = 0
    expected: int = 0
    tokens: list[int] = field(default_factory=list)


class Oracle:
    """Which whole pages of tokens a cache that forgets nothing knows."""

    def __init__(self, page: int) -> None:
        self.page = page
        self._known: set[int] = set()

    def cached(self, prompt: Sequence[int]) -> int:
        """Tokens of ``prompt`` that are known; one at least is left to compute."""
        n = 0
        for key in self._keys(prompt[:-1]):
            if key not in self._known:
                break
            n += self.page
        return n

    def learn(self, tokens: Sequence[int]) -> None:
        """All of ``tokens`` were computed."""
        self._known.update(self._keys(tokens))

    def _keys(self, tokens: Sequence[int]) -> Iterator[int]:
        key = 0
        for at in range(0, len(tokens) // self.page * self.page, self.page):
            key = hash((key, *tokens[at : at + self.page]))
            yield key


class Client:
    """Asks one server and accounts for every token."""

    def __init__(self, http: aiohttp.ClientSession, url: str, *, reuse: bool) -> None:
        self.http, self.url, self.reuse = http, url, reuse
        self.oracle = Oracle(PAGE)

    async def ask(self, ask: ParsedRequest) -> Seen:
        """Raises StreamError: the server refused or broke off."""
        by_name = self.reuse and ask.cache is not None
        body = {
            "model": "bench",
            "prompt": list(ask.prompt[ask.head :] if by_name else ask.prompt),
            "max_tokens": ask.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        } | ({"cache": ask.cache} if by_name else {})
        seen = Seen(expected=self.oracle.cached(ask.prompt) if self.reuse else 0)
        began = time.perf_counter()
        async with self.http.post(f"{self.url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                raise StreamError(f"status {reply.status}: {(await reply.text())[:200]}")
            async for now, event in sse_data(reply.content):
                _take(seen, now - began, json.loads(event))
        # The last token drawn is never computed.
        self.oracle.learn([*ask.prompt, *seen.tokens[:-1]])
        return seen

    async def create(self, name: str, tokens: Sequence[int]) -> None:
        body = {"name": name, "prompt": list(tokens), "ttl_s": 3600}
        async with self.http.post(f"{self.url}/v1/caches", json=body) as reply:
            if reply.status != 200:
                raise StreamError(f"cache {name}: {(await reply.text())[:200]}")
        self.oracle.learn(tokens)

    async def computed(self) -> int:
        """Prompt tokens that the scheduler has planned since the server started."""
        await asyncio.sleep(0.5)  # the engine says so a few times a second
        async with self.http.get(f"{self.url}/metrics") as reply:
            text = await reply.text()
        found = re.search(r"^jserve:prefill_tokens_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
        # Before its first step the engine has said nothing; a counter that never comes shows later,
        # when what was computed does not add up.
        return int(float(found[1])) if found is not None else 0


def _take(seen: Seen, at: float, event: dict[str, Any]) -> None:
    if event.get("error"):
        raise StreamError(str(event["error"])[:200])
    for choice in event.get("choices") or []:
        ids = choice.get("token_ids") or []
        if ids and not seen.tokens:
            seen.ttft_s = at
        seen.tokens += ids
    usage = event.get("usage") or {}
    if usage:
        seen.n_prompt = usage["prompt_tokens"]
        seen.n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def system(client: Client, draw: Draw, n: int) -> list[Seen]:
    """(a) the same 1500 tokens in front of turns of 60; the first request is cold."""
    head = draw.prompt(SYSTEM)
    return [await client.ask(ParsedRequest(prompt=(*head, *draw.prompt(TURN)))) for _ in range(n)]


async def chat(client: Client, draw: Draw, n: int) -> list[Seen]:
    """(b) dialogues of four turns, each with all that was said before in front."""
    seen: list[Seen] = []
    for _ in range(max(1, n // 4)):
        said: tuple[int, ...] = draw.prompt(200)
        for _ in range(4):
            said = (*said, *draw.prompt(TURN))
            seen.append(await client.ask(ParsedRequest(prompt=said, max_tokens=2 * ANSWER)))
            said = (*said, *seen[-1].tokens)
    return seen


async def retrieval(client: Client, draw: Draw, n: int) -> list[Seen]:
    """(c) questions to a fixed set of documents, computed once before under their names."""
    documents = {f"doc-{i}": draw.prompt(DOCUMENT) for i in range(N_DOCUMENTS)}
    if client.reuse:
        for name, tokens in documents.items():
            await client.create(name, tokens)
    seen = []
    for i in range(n):
        name = f"doc-{i * 7 % N_DOCUMENTS}"
        prompt = (*documents[name], *draw.prompt(QUESTION))
        seen.append(await client.ask(ParsedRequest(prompt=prompt, cache=name, head=DOCUMENT)))
    return seen


SCENARIOS = {"system": system, "chat": chat, "retrieval": retrieval}


def account(name: str, seen: Sequence[Seen], computed: int, made: int) -> dict[str, Any]:
    """The figures of one scenario. ``computed`` are the tokens planned, ``made`` those of them
    that went into named caches before."""
    cold = 1 if name == "system" else 0
    n_prompt, n_cached = sum(s.n_prompt for s in seen), sum(s.n_cached for s in seen)
    return {
        "requests": len(seen),
        "ttft_p50_ms": round(1e3 * percentile([s.ttft_s for s in seen[cold:]], 50), 3),
        "ttft_first_ms": round(1e3 * seen[0].ttft_s, 3),
        "prompt_tokens": n_prompt,
        "cached_tokens": n_cached,
        "expected_cached_tokens": sum(s.expected for s in seen),
        "computed_tokens": computed - made,
        "precomputed_tokens": made,
        "exact": all(s.n_cached == s.expected for s in seen)
        and computed - made == n_prompt - n_cached,
    }


async def run_all(url: str, *, reuse: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Every scenario against one server."""
    found: dict[str, Any] = {}
    async with connections() as http:
        client = Client(http, url, reuse=reuse)
        for number, name in enumerate(["warmup", *args.scenario]):
            draw = Draw(np.random.default_rng((args.seed, number)), args.low, args.high)
            before = await client.computed()
            if name == "warmup":
                for n in (SYSTEM + TURN, DOCUMENT + QUESTION, 300, QUESTION, 8):
                    await client.ask(ParsedRequest(prompt=draw.prompt(n)))
                continue
            seen = await SCENARIOS[name](client, draw, args.requests)
            made = N_DOCUMENTS * DOCUMENT if name == "retrieval" and reuse else 0
            found[name] = account(name, seen, await client.computed() - before, made)
            err.print(f"    {name}: {found[name]}", soft_wrap=True)
    return found


def serve(args: argparse.Namespace, cache: Path, *, reuse: bool) -> dict[str, Any]:
    """One server with reuse on or off, all scenarios."""
    flags = f"--page-size {PAGE} --{'' if reuse else 'no-'}prefix-caching"
    flags += f" --max-model-len {args.context}"
    extra = {"jserve": f"{flags} {args.jserve_args}"}
    engine = build("jserve", Paths(model=args.model, compile_cache=cache, extra=extra))
    if isinstance(engine, str):
        raise EngineError(engine)
    with Running(engine, args.log_dir) as server:
        server.wait_ready(args.ready_timeout)
        return asyncio.run(run_all(server.url, reuse=reuse, args=args))


def compared(off: dict[str, Any], on: dict[str, Any]) -> dict[str, Any]:
    """Both sides of each scenario, the share of the time to first token, the tokens saved."""
    return {
        name: {
            "off": off[name],
            "on": on[name],
            "ttft_ratio": round(on[name]["ttft_p50_ms"] / off[name]["ttft_p50_ms"], 4),
            "tokens_saved": off[name]["computed_tokens"] - on[name]["computed_tokens"],
        }
        for name in on
    }


def table(scenarios: dict[str, Any]) -> Table:
    made = Table(title="prefix reuse off and on")
    for column in ("scenario", "TTFT p50 off", "on", "ratio", "computed off", "on", "exact"):
        made.add_column(column, justify="left" if column == "scenario" else "right")
    for name, pair in scenarios.items():
        off, on = pair["off"], pair["on"]
        made.add_row(
            name,
            f"{off['ttft_p50_ms']:.1f} ms",
            f"{on['ttft_p50_ms']:.1f} ms",
            f"{pair['ttft_ratio']:.3f}",
            str(off["computed_tokens"]),
            str(on["computed_tokens"]),
            "yes" if off["exact"] and on["exact"] else "NO",
        )
    return made


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m bench.prefix", description=(__doc__ or "").split("\n")[0]
    )
    add = p.add_argument
    add("model", type=Path, help="model directory")
    add("--scenario", action="append", choices=list(SCENARIOS), help="repeatable; default all")
    add("--requests", type=int, default=12, help="requests of each scenario (12)")
    add("--seed", type=int, default=0, help="seed of the prompts (0)")
    add("--json", type=Path, help="result file to write")
    add("--compile-cache", type=Path, help="compile cache; default a new, empty one")
    add("--jserve-args", default="", help="more arguments for the server, quoted as one")
    add("--ready-timeout", type=float, default=600.0, help="seconds until ready (600)")
    add("--log-dir", type=Path, help="where server logs go; kept there after a failure")
    return p


def read_config(model: Path) -> tuple[int, int, int]:
    """(lowest id of prompts, one above the highest, context): the middle half of the vocabulary,
    away from control tokens.

    Raises:
        ValueError: config.json is missing or lacks a key.
    """
    try:
        config = json.loads((model / "config.json").read_text())
        size, context = int(config["vocab_size"]), int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{model}/config.json: {type(e).__name__} {e}") from e
    return size // 4, size - size // 4, min(context, CONTEXT)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: every token is accounted for; 1: not; 2: bad usage."""
    p = parser()
    args = p.parse_args(argv)
    args.scenario = args.scenario or list(SCENARIOS)
    if args.requests < 2:
        p.error("--requests must be at least 2")
    try:
        args.low, args.high, args.context = read_config(args.model)
        with tempfile.TemporaryDirectory(prefix="bench-cache-") as fresh:
            cache = args.compile_cache or Path(fresh)
            cache.mkdir(parents=True, exist_ok=True)
            with ending_unwinds():
                off = serve(args, cache, reuse=False)
                on = serve(args, cache, reuse=True)
    except (EngineError, StreamError, OSError, ValueError) as e:
        p.error(str(e))
    result = {
        "format": FORMAT,
        "kind": "prefix",
        "machine": probe.machine(),
        "model": facts(args.model),
        "options": {"requests": args.requests, "seed": args.seed, "page_size": PAGE},
        "scenarios": compared(off, on),
    }
    if args.json:
        report.write(result, args.json)
    Console().print(table(result["scenarios"]))
    sides = [pair[side] for pair in result["scenarios"].values() for side in ("off", "on")]
    return 0 if all(side["exact"] for side in sides) else 1


if __name__ == "__main__":
    sys.exit(main())
