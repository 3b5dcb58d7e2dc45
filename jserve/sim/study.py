"""Runs ``jserve simulate``: one report, or one per value of a sweep."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jserve.config import CacheOptions, EngineConfig, SchedulerOptions
from jserve.errors import ConfigError
from jserve.fleet.roles import AUTO, parse_roles
from jserve.fleet.router import POLICIES
from jserve.sched.record.journal import JournalFile
from jserve.sim import costs, plot, recorded, traffic
from jserve.sim.faults import parse_faults
from jserve.sim.fleet import simulated
from jserve.sim.report import Report, Slo, summarise
from jserve.sim.simulate import Run, Setup, limits_of, simulate, with_host_memory
from jserve.sim.trace import TraceItem, read, write

BATCHING = ("continuous", "static")
SETUP = {
    "load": float,
    "batching": str,
    "deadlines": str,
    "retries": int,
    "jitter": float,
    "copy_gb_s": float,
    "replicas": int,
    "max_replicas": int,
    "start_s": float,
    "router": str,
    "transfer_gb_s": float,
    "faults": str,
}
"""Settings that a sweep may change besides options of the scheduler and the cache."""
MAX_REPLICAS = 256
NOT_SIMULATED = {
    **dict.fromkeys(("disk_dir", "disk_gb"), "the disk tier is"),
    **dict.fromkeys(("speculative.method", "max_drafts"), "speculation is"),
}
"""Options that have no price here, and what they ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The arguments of ``jserve simulate``, as given."""

    trace: str
    """A trace, a journal, a ``.traffic`` file, or the text form of traffic sources."""
    costs: Path | None = None
    """A measured table, which the device's prices come from."""
    model: costs.SimulatedModel | None = None
    """Without a table: what the roofline of ``gpu`` prices."""
    gpu: str = "h200"
    copy_gb_s: float = 0.0
    """GB/s between device and host memory; 0: as the device says."""
    max_model_len: int = 0
    seed: int = 0
    load: float = 1.0
    batching: str = "continuous"
    deadlines: bool = True
    retries: int = 0
    jitter: float = 0.0
    replicas: int = 1
    max_replicas: int = 0
    start_s: float = 60.0
    router: str = "seconds"
    roles: str = ""
    """As of ``jserve serve``, of ``replicas``."""
    transfer_gb_s: float = 0.0
    faults: str = ""
    """Of ``faults.parse_faults``."""
    slo_ttft_ms: float = math.inf
    slo_tpot_ms: float = math.inf
    sweep: str = ""
    against: str = ""
    """A second axis: one line of the plot per value."""
    plot: Path | None = None
    save_trace: Path | None = None

    @property
    def slo(self) -> Slo:
        return Slo(ttft_ms=self.slo_ttft_ms, tpot_ms=self.slo_tpot_ms)


def study(
    wish: SimulateOptions, config: EngineConfig, progress: Callable[[str], None]
) -> list[tuple[str, Report]]:
    """(setting, report) of every run, in order; ``progress`` gets a line about each.

    Raises:
        ConfigError: an argument, file or option that makes no sense; ``field`` names it.
    """
    points = settings(wish, config)
    if wish.plot is not None:
        plot.check(wish.plot)
    trace = load_trace(wish.trace, wish.seed)
    if wish.save_trace is not None:
        write(wish.save_trace, trace, about=wish.trace)
    found: list[tuple[str, Report]] = []
    for label, setup in points:
        run = _run(trace, setup)
        setting = dict(pair.split("=", 1) for pair in label.split())
        report = {"setting": setting, "device": setup.device.name, **summarise(run, wish.slo)}
        found.append((label, report))
        n_done = len(run.records.done)
        progress(f"{label or 'done'}: {n_done} requests, {run.seconds:.1f} s simulated")
        if wish.plot is not None and not wish.sweep:
            plot.draw_run(run, report, wish.slo, wish.plot, setup.device.name)
    if wish.plot is not None and wish.sweep:
        plot.draw_sweep(found, wish.plot, points[0][1].device.name)
    return found


def _run(trace: list[TraceItem], setup: Setup) -> Run:
    path = setup.config.scheduler.journal
    if max(setup.replicas, setup.max_replicas) > 1:
        if path:
            raise ConfigError("a journal is of one engine", field="journal")
        return simulated(trace, setup)
    if not path:
        return simulate(trace, setup)
    try:
        with open(path, "wb") as file:
            return simulate(trace, dataclasses.replace(setup, journal=JournalFile(file)))
    except OSError as e:
        raise ConfigError(f"journal {path}: {e.strerror}", field="journal") from None


def verify(wish: SimulateOptions, config: EngineConfig) -> recorded.Verified:
    """Replay the journal ``wish.trace`` through the simulator; see ``recorded.verify``.

    Raises:
        ConfigError: not a journal, or a sweep of it.
        Diverged: a decision differs.
    """
    path = Path(wish.trace)
    if not recorded.is_journal(path):
        raise ConfigError(f"{wish.trace} is not a journal of the scheduler", field="trace")
    if wish.sweep or wish.plot or config.scheduler.journal:
        raise ConfigError("a replay takes no sweep, plot or journal", field="verify")
    if max(wish.replicas, wish.max_replicas) > 1:
        raise ConfigError("a journal is of one engine", field="replicas")
    setup = _setup(wish, config, {})
    return recorded.verify(path, setup, limits_of(setup))


def load_trace(text: str, seed: int) -> list[TraceItem]:
    """The requests that ``text`` names: a file (trace, journal, traffic sources) or the sources.

    Raises:
        ConfigError: nothing of the kind.
    """
    path = Path(text)
    if "=" in text and not os.path.exists(text):  # Path.exists raises where it is too long a name
        trace = traffic.generate(traffic.parse(text), seed)
    elif path.suffix == ".traffic":
        trace = traffic.generate(traffic.parse_file(path), seed)
    elif recorded.is_journal(path):
        trace = recorded.convert(path)
    else:
        trace = read(path)
    if not trace:
        raise ConfigError(f"trace {text[:200]}: no requests", field="trace")
    return trace


def settings(wish: SimulateOptions, config: EngineConfig) -> list[tuple[str, Setup]]:
    """The runs that are wanted: one, or one per value of the sweep.

    Raises:
        ConfigError: an option that cannot be swept, or a bad value.
    """
    if config.scheduler.journal and (wish.sweep or wish.against):
        raise ConfigError("a sweep has no single journal", field="journal")
    axes = [_axis(text) for text in (wish.sweep, wish.against) if text]
    if wish.against and not wish.sweep:
        raise ConfigError("against needs a sweep", field="against")
    found = []
    for changes in itertools.product(*axes):
        label = " ".join(f"{name}={value}" for name, value in changes)
        found.append((label, _setup(wish, config, dict(changes))))
    return found


def _axis(text: str) -> list[tuple[str, str]]:
    """(name, value) of each point of ``name=a,b,c``."""
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    known = {f.name for kind in (SchedulerOptions, CacheOptions) for f in dataclasses.fields(kind)}
    if not equals or name not in (known | set(SETUP)) - {"journal"}:
        raise ConfigError(
            f"sweep {text!r}: must be name=a,b,c of an option of the scheduler or the cache"
            f" or of {', '.join(SETUP)}",
            field="sweep",
        )
    return [(name, value.strip()) for value in values.split(",")]


def _setup(wish: SimulateOptions, config: EngineConfig, changes: dict[str, Any]) -> Setup:
    own = {name: _own(name, changes[name]) for name in changes if name in SETUP}
    flat = config.flat() | {"max_model_len": wish.max_model_len or config.model.max_model_len}
    config = EngineConfig.of(**flat | {k: v for k, v in changes.items() if k not in SETUP})
    config = config.on("cpu")
    for name, what in NOT_SIMULATED.items():
        if config.flat().get(name) != EngineConfig().flat().get(name):
            raise ConfigError(f"{name}: {what} not simulated", field=name)
    given = {name: getattr(wish, name) for name in SETUP} | own
    if given["batching"] not in BATCHING:
        raise ConfigError(f"batching must be one of {', '.join(BATCHING)}", field="batching")
    if not given["load"] > 0:
        raise ConfigError("load must be above 0", field="load")
    if given["router"] not in POLICIES:
        raise ConfigError(f"router must be one of {', '.join(POLICIES)}", field="router")
    if not 1 <= given["replicas"] <= MAX_REPLICAS:
        raise ConfigError(f"replicas must be in [1, {MAX_REPLICAS}]", field="replicas")
    if given["max_replicas"] and not given["replicas"] <= given["max_replicas"] <= MAX_REPLICAS:
        limits = f"[{given['replicas']}, {MAX_REPLICAS}]"
        raise ConfigError(f"max_replicas must be 0 or in {limits}", field="max_replicas")
    if not given["start_s"] >= 0:
        raise ConfigError("start_s must not be negative", field="start_s")
    for name in ("copy_gb_s", "transfer_gb_s"):
        if not given[name] >= 0:
            raise ConfigError(f"{name} must not be negative", field=name)
    roles = parse_roles(wish.roles, given["replicas"])
    config = with_host_memory(config) if roles else config
    device = _device(wish, config, given.pop("copy_gb_s"))
    if given["transfer_gb_s"] and not roles:
        raise ConfigError("transfer_gb_s says nothing without roles", field="transfer_gb_s")
    given["faults"] = parse_faults(given["faults"])
    auto = wish.roles == AUTO
    return Setup(
        config=config, device=device, seed=wish.seed, roles=roles, auto_roles=auto, **given
    )


def _own(name: str, value: str) -> Any:
    try:
        if name == "deadlines":
            return {"kept": True, "hidden": False}[value]
        return SETUP[name](value)
    except (ValueError, KeyError):
        kinds = {"deadlines": "kept or hidden", "batching": " or ".join(BATCHING)}
        wanted = kinds.get(name, "a number")
        raise ConfigError(f"{name} must be {wanted}, not {value!r}", field=name) from None


def _device(wish: SimulateOptions, config: EngineConfig, copy_gb_s: float) -> costs.Device:
    if wish.costs is not None:
        device = costs.from_table(wish.costs, config.cache)
    else:
        assert wish.model is not None, "neither a table nor a model"
        device = costs.from_roofline(wish.model, wish.gpu, config.cache)
    return device.copying(copy_gb_s * 1e9) if copy_gb_s else device
