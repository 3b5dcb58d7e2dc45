"""Implements the CLI commands except ``generate`` and ``chat``.

It owns the start banner, the order of a server's life and what is shown meanwhile.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jserve.build import TextSide, cache_directory, engine, located, text_side
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.progress import batch_progress, progress_bar, start_progress

if TYPE_CHECKING:
    from jserve.api.batch.answers import AnswerFile
    from jserve.api.batch.run import Outcome
    from jserve.api.request.parsed import ModelCard
    from jserve.sim.study import SimulateOptions
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
    kernels = f"{info['kernels']} ({info['no_kernels']})" if info["no_kernels"] else info["kernels"]
    laid = "" if info["sharding"] == "tp=1" else f" ({info['sharding']})"
    return f"""\
jserve is listening on {url}
  model     {text.name} ({info["family"]}), context {info["max_model_len"]}
  device    {info["device"]}{laid}, {dtype}, attention {info["backend"]}
  kernels   {kernels}
  memory    weights {info["weights_gib"]} GiB, KV {kv} ({info["kv_dtype"]})
  programs  {info["programs"]} sealed, {info["programs_loaded"]} of them compiled by an earlier start
  start     {ready_s:.1f} s (weights {info["load_s"]} s, programs {info["compile_s"]} s)

{key}curl -N {local_url(url)}/v1/{path}{header} -H 'content-type: application/json' -d '{body}'
"""


def convert(source: str, target: Path, dtype: str, plugins: Iterable[str], console: Any) -> None:
    """Write ``source`` as an Orbax checkpoint with its config and tokenizer beside it.

    Raises:
        ConfigError: the source cannot be read, a plugin cannot be loaded, or the target exists.
    """
    from jserve.plugins import load_plugins
    from jserve.weights.convert import convert as write

    load_plugins(plugins)
    with progress_bar("converting", 0, shown=True) as bar:
        write(source, target, dtype=dtype, progress=lambda _stage, done, total: bar(done, total))
    console.print(f"wrote {target}", highlight=False)


def simulate(config: EngineConfig, wish: dict[str, Any], as_json: bool, console: Any) -> str:
    """Run a simulation (or a sweep): its tables, or JSON, as text.

    Raises:
        ConfigError: an argument, file or option that makes no sense.
    """
    import json

    from jserve.sim import report
    from jserve.sim.study import study

    options = simulate_options(config, wish)
    found = study(options, config, lambda line: console.print(line, highlight=False))
    if as_json:
        return json.dumps([one for _, one in found], indent=1) + "\n"
    return report.tables(found, found[0][1]["device"])


def verify(config: EngineConfig, wish: dict[str, Any], as_json: bool, console: Any) -> str:
    """Replay a journal through the simulator: one line, or JSON, as text.

    Raises:
        Diverged: a decision differs.
        ConfigError: an argument, file or option that makes no sense.
    """
    import json

    from jserve.sim.study import verify

    done = verify(simulate_options(config, wish), config)
    if as_json:
        return json.dumps(dataclasses.asdict(done)) + "\n"
    return f"{done.n_requests} requests, {done.n_steps} steps: every decision as recorded\n"


ROOFLINE_MODEL = "llama-3.1-8b"
"""The model that is simulated when none is named."""


def simulate_options(config: EngineConfig, wish: dict[str, Any]) -> SimulateOptions:
    """The arguments of a simulation, with the model that ``roofline`` names read.

    Raises:
        ConfigError: a table and a roofline are given, or the model cannot be read.
    """
    from jserve.plugins import load_plugins
    from jserve.sim.study import SimulateOptions

    rest = {**wish}
    name = rest.pop("roofline")
    if rest["costs"] is not None:
        if name:
            raise ConfigError("give a measured table or a roofline, not both", field="costs")
        return SimulateOptions(**rest)
    load_plugins(config.model.plugins)
    from jserve.sizing.models import simulated  # imports jax

    return SimulateOptions(**rest, model=simulated(name or ROOFLINE_MODEL))


def plan(
    config: EngineConfig,
    device: str,
    lengths: str,
    acceptance: float | None,
    *,
    compiled: bool,
    as_json: bool,
    console: Any,
) -> None:
    """Print what ``config``'s model needs and reaches on devices of that kind.

    Raises:
        ConfigError: an argument or option that makes no sense, or a model that does not fit.
    """
    import sys

    from rich.console import Console

    from jserve.build import shipped
    from jserve.plugins import load_plugins
    from jserve.sizing import plan as sizing, show

    load_plugins(config.model.plugins)
    name = config.model.model or str(shipped())
    if config.device.sharding:
        if compiled:
            why = "compile: jserve bench shard --compile has the steps of a sharding"
            raise ConfigError(why, field="compile")
        _explain(name, config, as_json=as_json)
        return
    found, laid = sizing.plan(name, device, sizing.lengths_of(lengths), config, acceptance)
    if compiled:
        from jserve.sizing.compiled import with_compiled

        with start_progress(console) as progress:
            found = with_compiled(found, laid, device, progress)
    if as_json:
        sys.stdout.write(show.as_json(found))
    else:
        show.as_text(found, Console(width=None if sys.stdout.isatty() else show.WIDTH))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The arguments of ``jserve plan --search``, as given."""

    load: str
    """A trace, a journal, a ``.traffic`` file, or the text form of traffic sources."""
    devices: int
    slo_ttft_ms: float
    slo_tpot_ms: float
    out: Path | None


def search(
    config: EngineConfig, device: str, asked: SearchOptions, *, as_json: bool, console: Any
) -> int:
    """Print the layouts of ``config``'s model that were tried, and write the one that won. Returns the exit code: 1
    where none keeps the targets.

    Raises:
        ConfigError: an argument or option that makes no sense; ``field`` names it.
    """
    import sys

    from rich.console import Console

    from jserve.build import shipped
    from jserve.plugins import load_plugins
    from jserve.sim.report import Slo
    from jserve.sim.study import load_trace
    from jserve.sizing import show, show_search
    from jserve.sizing.search import search as searched

    load_plugins(config.model.plugins)
    name, slo = (
        config.model.model or str(shipped()),
        Slo(ttft_ms=asked.slo_ttft_ms, tpot_ms=asked.slo_tpot_ms),
    )
    trace = load_trace(asked.load, config.model.seed)
    with start_progress(console) as progress:
        found = searched(name, device, asked.devices, trace, slo, config, progress)
    if as_json:
        sys.stdout.write(show_search.as_json(found))
    else:
        show_search.as_text(found, Console(width=None if sys.stdout.isatty() else show.WIDTH))
    if asked.out is not None and found.winner is not None:
        asked.out.write_text(show_search.as_spec(found.winner), encoding="utf-8")
    return 0 if found.winner is not None else 1


def compile_all(config: EngineConfig, out: Path, console: Any) -> str:
    """Write the manifest of ``config``'s engine to ``out``; a line that says so.

    Raises:
        ConfigError: as the engine would at start, fewer devices than the sharding asks for included.
    """
    from jserve.build import shipped
    from jserve.plugins import load_plugins
    from jserve.sizing import manifest

    load_plugins(config.model.plugins)
    with start_progress(console) as progress:
        found = manifest.manifest(config.model.model or str(shipped()), config, progress)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return f"{out}: {len(found['programs'])} programs of {found['model']}\n"


def manifest_diff(old: Path, new: Path) -> list[str]:
    """A line for each difference of two manifests.

    Raises:
        ConfigError: one of them is none.
    """
    from jserve.sizing.manifest import differences, read

    return list(differences(read(old), read(new)))


def _explain(name: str, config: EngineConfig, *, as_json: bool) -> None:
    """Print where the weights of a model lie under option ``sharding``, and the collectives of its steps."""
    import sys

    from rich.console import Console

    from jserve.sizing import show, show_sharding
    from jserve.sizing.explain import explain_sharding

    explained = explain_sharding(name, config.device.sharding, dtype=config.model.dtype)
    if as_json:
        sys.stdout.write(show_sharding.as_json(explained))
        return
    console = Console(width=None if sys.stdout.isatty() else show.WIDTH)
    show_sharding.as_text(explained, console)


def bench_steps(config: EngineConfig, out: Path, repeats: int, console: Any) -> str:
    """Start an engine, time all its step programs, write the table; a summary as text.

    Raises:
        ConfigError: an option, the model or the file cannot be used.
    """
    from jserve.build import close
    from jserve.sim.known import KEY
    from jserve.sim.measure import measure, shown, write

    with start_progress(console) as progress:
        made, info = engine(config, progress)
    about = environment() | {key: info[key] for key in ("model", *KEY)}
    runner: Any = made.runner
    buckets = runner.plain_buckets
    with progress_bar("steps", 0, shown=True) as bar:
        page = runner.sizes.kv.host_page_bytes
        table = measure(
            runner, buckets, repeats=repeats, about=about, page_bytes=page, progress=bar
        )
    close(made)
    write(table, out)
    return f"{shown(table)}wrote {out}\n"


def build_native(cc: str) -> str:
    """Compile the native kernels of this installation, in place of those it has; what loads now, as text.

    Args:
        cc: a command that compiles C; empty: one of this machine is looked for.

    Raises:
        ConfigError: there is no compiler, it fails, or what it makes is of no use here; ``field`` is native.
    """
    from jserve.native import compile as compiling, library

    command, path = compiling.find_compiler(cc), compiling.library_path()
    if command is None:
        names = ", ".join(compiling.COMPILERS)
        raise ConfigError(
            f"native: there is no C compiler ({names}); pip install ziglang=={compiling.ZIG} is one",
            field="native",
        )
    try:
        compiling.compile_library(path, command)
        library.forget()
        return f"{path}: level {library.installed().level}"
    except OSError as e:
        raise ConfigError(f"native: {path.parent}: {e.strerror}", field="native") from None
    except (compiling.NativeBuildError, library.NoLibrary) as e:
        raise ConfigError(f"native: {e}", field="native") from None


def _kernels() -> str:
    """The native kernels of this installation, or why there are none."""
    from jserve.native.library import NoLibrary, installed

    try:
        return f"native, level {installed().level}"
    except NoLibrary as e:
        return f"none: {e}"


def environment() -> dict[str, Any]:
    """Versions, devices and directories."""
    import importlib.metadata
    import platform

    import jax

    facts: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("jserve", "jax", "jaxlib", "flax", "orbax-checkpoint", "transformers", "aiohttp"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    facts["backend"] = jax.default_backend()
    facts["devices"] = ", ".join(str(d) for d in jax.devices())
    facts["kernels"] = _kernels()
    facts["compile cache"] = str(cache_directory("auto"))
    return facts
