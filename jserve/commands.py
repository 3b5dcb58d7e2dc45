"""Implements the commands about models, plans, programs and this machine; those that serve are in serve_commands."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jserve.build import cache_directory, engine, native_kernels
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.progress import progress_bar, start_progress

if TYPE_CHECKING:
    from jserve.sim.study import SimulateOptions


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
    facts["kernels"] = native_kernels()
    facts["compile cache"] = str(cache_directory("auto"))
    return facts
