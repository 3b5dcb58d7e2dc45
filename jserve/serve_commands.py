"""Implements the commands that answer requests through the front: ``serve`` and ``run-batch``.

It owns the start banner, the order of a server's life and what is shown meanwhile.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jserve.build import TextSide, cache_directory, engine, located, text_side
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.progress import batch_progress, start_progress

if TYPE_CHECKING:
    from jserve.api.batch.answers import AnswerFile
    from jserve.api.batch.run import Outcome
    from jserve.api.request.parsed import ModelCard
    from jserve.text.chat.template import ChatTemplate
    from jserve.types import Request


def serve(config: EngineConfig, console: Any) -> int:
    """Load, compile, listen, serve until stopped. Returns the exit code.

    The port opens only when the engine is ready.

    Raises:
        ConfigError: an option, the model or the port cannot be used.
    """
    import asyncio
    import logging

    logging.basicConfig(
        level=config.server.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    text = text_side(config)
    if config.server.quality_gate:
        from jserve.quality.gate import check_report
        from jserve.quality.report import identity

        check_report(Path(config.server.quality_gate), identity(config, located(config)))
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config, text, console))


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(config: EngineConfig, text: TextSide, console: Any) -> int:
    import asyncio

    from jserve.build import serving_engine
    from jserve.errors import EngineDead

    began = time.monotonic()
    options = config.server
    async_engine = serving_engine(config)
    try:
        with start_progress(console, start_notes(config)) as shown:
            starting = asyncio.create_task(async_engine.start(shown))
            await asyncio.sleep(0)  # the engine's process begins before this one imports the rest
            from jserve.api.http.server import serve as listen

            info = await starting
        ready_s = time.monotonic() - began
        return await listen(
            config,
            async_engine,
            text.tokenizer,
            _tested(text.chat),
            _card(config, text, info),
            on_listening=lambda url: print(
                banner(
                    url, text, info, ready_s, keyed=bool(options.api_key or options.api_keys_file)
                ),
                flush=True,
            ),
        )
    except EngineDead as e:
        console.print(f"[red]error:[/] {e.message}", soft_wrap=True)
        return 1
    finally:
        await async_engine.close()


def fingerprint(name: str, version: str, info: dict[str, Any]) -> str:
    """Equal for servers whose answers to a seeded request are equal, as far as we can tell."""
    import hashlib

    facts = [
        name,
        version,
        *(
            str(info.get(k))
            for k in ("family", "dtype", "kv_dtype", "sharding", "backend", "kernels")
        ),
    ]
    return "fp_" + hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _card(config: EngineConfig, text: TextSide, info: dict[str, Any]) -> ModelCard:
    """The HTTP side's card of a model whose engine started with ``info``."""
    from jserve import __version__
    from jserve.api.request.parsed import ModelCard

    return ModelCard(
        name=text.name,
        aliases=text.aliases,
        max_model_len=info["max_model_len"],
        vocab_size=info["vocab_size"],
        eos_ids=text.eos_ids,
        defaults=text.defaults,
        version=__version__,
        fingerprint=fingerprint(text.name, __version__, info),
        scores_prompts=config.device.prompt_logprobs,
        taps=() if config.server.allow_taps else tuple(info.get("taps", ())),
        masks=config.device.structured_outputs,
    )


def run_batch(
    config: EngineConfig, source: Path, target: Path, concurrency: int, console: Any
) -> int:
    """Answer the lines of ``source`` that ``target`` does not answer yet. Returns the exit code.

    Raises:
        ConfigError: a file, an option or the model cannot be used.
    """
    import asyncio

    from jserve.api.batch.answers import AnswerFile
    from jserve.api.batch.lines import survey
    from jserve.api.batch.run import tally

    total = survey(source)
    answers = AnswerFile(target)
    try:
        done = tally(source, total, answers.answered)
        if done.answered < total:
            text = text_side(config)
            work = _run_batch(config, text, source, answers, done, concurrency, console)
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(work)
    finally:
        answers.close()
    console.print(
        f"{done.answered} of {total} lines answered, {done.failed} failed", highlight=False
    )
    if done.fault:
        console.print(f"[red]error:[/] {done.fault}", soft_wrap=True)
    if done.answered < total:
        console.print("run the same command again to go on", highlight=False)
    return done.exit_code


def batch_requests(
    config: EngineConfig, path: Path, *, vocab_size: int, max_model_len: int
) -> list[Request]:
    """The requests of a batch file, as an engine of ``config``'s model would get them.

    Raises:
        ConfigError: the file, a line of it, or the model's tokenizer cannot be used; ``field`` is ``trace``.
    """
    import asyncio

    from jserve.api.batch.requests import requests_of
    from jserve.api.request.parsed import ModelCard

    try:
        text = text_side(config, weights=False)
    except ConfigError as error:
        why = f"{path}: a batch file needs a model with a tokenizer: {error.message}"
        raise ConfigError(why, field="trace") from None
    card = ModelCard(
        name=text.name,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_ids=text.eos_ids,
        defaults=text.defaults,
    )
    return asyncio.run(requests_of(path, text.tokenizer, _tested(text.chat), card))


async def _run_batch(
    config: EngineConfig,
    text: TextSide,
    source: Path,
    answers: AnswerFile,
    outcome: Outcome,
    concurrency: int,
    console: Any,
) -> None:
    from jserve.api.batch.run import run_batch as run
    from jserve.api.http.app import make_app
    from jserve.engine.async_engine import AsyncEngine
    from jserve.engine.client import InprocClient

    async_engine = AsyncEngine(lambda: InprocClient(config, engine), max_restarts=0)
    try:
        with start_progress(console, start_notes(config)) as shown:
            info = await async_engine.start(shown)
        card = _card(config, text, info)
        app = make_app(config, async_engine, text.tokenizer, _tested(text.chat), card)
        with batch_progress(console, outcome.total) as told:
            await run(
                app,
                source,
                answers,
                outcome,
                concurrency=concurrency or 2 * info["max_num_seqs"],
                grace_s=config.server.drain_timeout_s,
                on_progress=told,
            )
    finally:
        await async_engine.close()


def _tested(chat: ChatTemplate | None) -> ChatTemplate | None:
    """The chat template if it renders a plain message; without it the chat endpoint says so."""
    import logging

    fault = chat.self_test() if chat is not None else None
    if fault:
        logging.getLogger(__name__).warning("chat is off: the chat template fails: %s", fault)
    return None if fault else chat


def start_notes(config: EngineConfig) -> dict[str, str]:
    """Notes that a start without a terminal shows beside its stages: how long the next one takes."""
    directory = config.device.compile_cache and cache_directory(config.device.compile_cache)
    if not directory:
        return {"compile": "compile_cache is off, so every start compiles them"}
    return {"compile": f"they are kept in {directory}, so the next start is short"}


def local_url(url: str) -> str:
    """``url`` as a client on this machine uses it: a server that listens everywhere has no address."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _named(chosen: str, why: str) -> str:
    return f"{chosen} ({why})" if why else chosen


def banner(
    url: str, text: TextSide, info: dict[str, Any], ready_s: float, *, keyed: bool = False
) -> str:
    """The text that ``jserve serve`` prints when it listens: address, model, device, memory, a curl line.

    With ``keyed`` the line takes the key from a variable: output ends in logs, where no key may be.
    """
    path, ask = "completions", '"prompt": "Once upon a time"'
    if text.chat is not None:
        path = "chat/completions"
        ask = '"messages": [{"role": "user", "content": "Hello! Who are you?"}]'
    body = f'{{"model": "{text.name}", {ask}, "stream": true}}'
    key = "with one of the server's keys in $JSERVE_API_KEY:\n" if keyed else ""
    header = ' -H "Authorization: Bearer $JSERVE_API_KEY"' if keyed else ""
    kv = f"{info['kv_gib']} GiB = {info['kv_tokens']} tokens in {info['kv_pages']} pages"
    dtype = ", ".join(filter(None, (info["dtype"], info.get("quantization"))))
    kernels = _named(info["kernels"], info["no_kernels"])
    attention = _named(info["backend"], info["no_better_backend"])
    laid = "" if info["sharding"] == "tp=1" else f" ({info['sharding']})"
    return f"""\
jserve is listening on {url}
  model     {text.name} ({info["family"]}), context {info["max_model_len"]}
  device    {info["device"]}{laid}, {dtype}
  attention {attention}
  kernels   {kernels}
  memory    weights {info["weights_gib"]} GiB, KV {kv} ({info["kv_dtype"]})
  programs  {info["programs"]} sealed, {info["programs_loaded"]} of them compiled by an earlier start
  start     {ready_s:.1f} s (weights {info["load_s"]} s, programs {info["compile_s"]} s)

{key}curl -N {local_url(url)}/v1/{path}{header} -H 'content-type: application/json' -d '{body}'
"""
