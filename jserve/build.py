"""The composition root: builds a wired engine and its text side from an ``EngineConfig``.

The only file that may import everything. It imports rooms inside its functions, so that the HTTP process never
loads jax. It owns no policy: what is chosen here is named in ``jserve.config``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jserve.config import EngineConfig
from jserve.errors import ConfigError

if TYPE_CHECKING:
    from jserve.engine.driven import DrivenEngine
    from jserve.engine.engine import Engine
    from jserve.engine.face import EngineFace
    from jserve.text.chat.template import ChatTemplate
    from jserve.text.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

SHIPPED = "jserve-mini"
Progress = Callable[[str, int, int], None]
"""(stage, done, total)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSide:
    """The parts of a model that the side without jax needs."""

    name: str
    """The name in answers."""
    aliases: tuple[str, ...]
    """More names that requests may use."""
    directory: Path
    tokenizer: TextTokenizer
    chat: ChatTemplate | None
    eos_ids: tuple[int, ...]
    defaults: dict[str, Any]
    """Sampling defaults of generation_config.json, by SamplingParams field."""


def shipped(name: str = SHIPPED) -> Path:
    """Directory of a model that comes with jserve: package data of a wheel, or the clone's checkpoints/.

    Raises:
        ConfigError: this installation has none.
    """
    here = Path(__file__).parent
    for directory in (here / "shipped" / name, here.parent / "checkpoints" / name):
        if (directory / "config.json").is_file():
            return directory
    raise ConfigError(f"this installation has no shipped model {name}; name a model", field="model")


def located(config: EngineConfig, *, weights: bool = True) -> Any:
    """The ``Source`` of the model that ``config`` names; without ``weights`` it may lack theirs.

    Raises:
        ConfigError: nothing usable is there.
    """
    from jserve.weights.source import resolve

    options = config.model
    load_format = options.load_format if weights else "dummy"
    return resolve(options.model or str(shipped()), options.revision, load_format)


def text_side(config: EngineConfig, *, weights: bool = True) -> TextSide:
    """Tokenizer, chat template and generation defaults; loads no jax.

    Args:
        weights: whether the model's directory must hold weights, so that their lack is found here.

    Raises:
        ConfigError: the model, its tokenizer or its chat template is missing or broken.
    """
    from jserve.text.chat.files import load_chat_template
    from jserve.text.tokenizer import check_vocab, load_tokenizer

    source = located(config, weights=weights)
    tokenizer = load_tokenizer(config.model.tokenizer or source.directory)
    if isinstance(source.config.get("vocab_size"), int):
        check_vocab(tokenizer, source.config["vocab_size"])
    control = [tokenizer.token_text(i) for i in sorted(tokenizer.special_ids)]
    chat = load_chat_template(
        config.model.tokenizer or source.directory,
        file=config.model.chat_template,
        control=control,
    )
    name, *aliases = served_names(config, source)
    return TextSide(
        name=name,
        aliases=tuple(aliases),
        directory=source.directory,
        tokenizer=tokenizer,
        chat=chat,
        eos_ids=_eos_ids(source, tokenizer),
        defaults=source.sampling_defaults,
    )


def served_names(config: EngineConfig, source: Any) -> tuple[str, ...]:
    """The names of the model in the API, each once; the first one is that of answers."""
    return tuple(dict.fromkeys(config.model.served_model_name)) or (source.name,)


def _eos_ids(source: Any, tokenizer: Any) -> tuple[int, ...]:
    """generation_config.json, else config.json, else the tokenizer."""
    for given in (source.generation.get("eos_token_id"), source.config.get("eos_token_id")):
        ids = given if isinstance(given, list) else [given]
        if ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            return tuple(ids)
    return () if tokenizer.eos_id is None else (tokenizer.eos_id,)


def engine(
    config: EngineConfig,
    progress: Progress | None = None,
    *,
    params: Any = None,
    mesh: Any = None,
) -> tuple[Engine, dict[str, Any]]:
    """Load, compile and wire everything on the device side.

    Args:
        params: weights as a pytree instead of the model's files; they are copied.
        mesh: a jax Mesh of an axis "tp", of "ep" too for experts on different devices, or of the axes that option
            ``sharding`` names; by default the first devices.

    Returns:
        The engine and facts for the banner and /metrics.

    Raises:
        ConfigError: an option, config.json key, file or tensor cannot be honoured.
    """
    _set_up(config)
    from jserve.runner.layout import groups

    config, meshes = groups(config, mesh)
    if len(meshes) > 1:
        why = f"sharding.mesh.dp: {len(meshes)} engines, where one is asked for"
        raise ConfigError(why, field="sharding.mesh.dp")
    return _engine(config, progress, params, meshes[0])


def engines(
    config: EngineConfig,
    progress: Progress | None = None,
    *,
    params: Any = None,
    mesh: Any = None,
) -> tuple[DrivenEngine, dict[str, Any]]:
    """``engine``, or one for each group of devices along axis "dp" of the sharding or of ``mesh``."""
    _set_up(config)
    from jserve.runner.layout import groups

    config, meshes = groups(config, mesh)
    if len(meshes) == 1:
        return _engine(config, progress, params, meshes[0])
    from jserve.fleet.data_parallel import DataParallelEngine

    made = [_engine(config, progress, params, each) for each in meshes]
    info = dict(made[0][1])
    for name in ("load_s", "compile_s", "startup_s", "programs", "programs_loaded"):
        info[name] = round(sum(each[name] for _, each in made), 2)
    info |= {"data_parallel_size": len(made), "device": f"{len(made)} x ({info['device']})"}
    return DataParallelEngine([engine for engine, _ in made]), info


def _set_up(config: EngineConfig) -> None:
    """Prepare this process for engines, before it imports jax."""
    from jserve.plugins import load_plugins
    from jserve.xla import claim_memory

    claim_memory()
    load_plugins(config.model.plugins)


def _engine(
    config: EngineConfig, progress: Progress | None, params: Any, mesh: Any
) -> tuple[Engine, dict[str, Any]]:
    """One engine on ``mesh``, in a process that is set up."""
    from jserve.engine.engine import Engine
    from jserve.model.features import registered
    from jserve.runner.programs import starting  # imports jax
    from jserve.sched.scheduler import Scheduler

    began = time.monotonic()
    with starting():
        runner, facts = _runner(config, progress or (lambda *_: None), params, mesh)
    facts |= runner.report()
    config = runner.sizes.config
    limits = _limits(config, runner, facts)
    scheduler = Scheduler(
        limits,
        config,
        proposer=_proposer(config, runner.limits.vocab_size),
        journal=_journal(config, limits, facts),
        guides=guides_of(config, runner.limits.vocab_size),
    )
    made = Engine(
        scheduler,
        runner,
        overlap=config.scheduler.overlap,
        profiler=_profiler(config.device.profile_dir),
        weights=facts["weights"],
    )
    _publish_kv_events(config, made)
    info = {**facts, "startup_s": round(time.monotonic() - began, 2)}
    info["taps"] = [feature.name for feature in registered() if feature.is_tap]
    info["max_model_len"] = runner.limits.max_model_len
    info["vocab_size"] = runner.limits.vocab_size
    info["max_num_seqs"] = runner.limits.n_slots
    return made, info


def _publish_kv_events(config: EngineConfig, engine: Engine) -> None:
    """Raises ConfigError, as ``KvEvents``."""
    from jserve.engine.kv_events import KvEvents, check_named

    options, cache = config.cache, engine.scheduler.resources.cache
    check_named(options)
    if options.kv_events:
        cache.listener = KvEvents(
            options.kv_events, options.kv_events_replay, options.kv_events_topic, cache.page_size
        )


def _proposer(config: EngineConfig, n_vocab: int) -> Any:
    """Build the host proposer, with its corpus as ids."""
    from jserve.speculation.host.methods import proposer_of
    from jserve.text.tokenizer import load_tokenizer

    options, ids = config.speculative, []
    if options.corpus:
        try:
            text = Path(options.corpus).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            reason = getattr(e, "strerror", None) or "not UTF-8"
            raise ConfigError(
                f"speculative.corpus {options.corpus}: {reason}", field="speculative.corpus"
            ) from None
        tokenizer = load_tokenizer(
            config.model.tokenizer or located(config, weights=False).directory
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
    return proposer_of(options, n_vocab, ids)


def _limits(config: EngineConfig, runner: Any, facts: dict[str, Any]) -> Any:
    """The runner's limits, with the step times of a measured table if there is one."""
    import dataclasses

    from jserve.sim.known import step_times

    path = config.scheduler.step_times
    if not path:
        return runner.limits
    programs = [(b.D, b.P) for b in runner.plain_buckets]
    known = step_times(Path(path), facts, programs)
    verify = tuple(t for t in runner.limits.step_times if t.width > 1)
    return dataclasses.replace(runner.limits, step_times=(*known, *verify))


def guides_of(config: EngineConfig, n_vocab: int) -> Any:
    """Structured output; the tokenizer is loaded when the first grammar comes."""
    from jserve.grammar.guides import TokenGuides
    from jserve.grammar.vocab import vocabulary
    from jserve.text.tokenizer import load_tokenizer

    if not config.device.structured_outputs:
        return None

    def table() -> Any:
        source = located(config, weights=False)
        tokenizer = load_tokenizer(config.model.tokenizer or source.directory)
        return vocabulary(tokenizer, n_vocab, _eos_ids(source, tokenizer))

    return TokenGuides(table)


def _profiler(directory: str) -> Any:
    from jserve.runner.profile import JaxProfiler

    return JaxProfiler(directory) if directory else None


def _journal(config: EngineConfig, limits: Any, facts: dict[str, Any]) -> Any:
    from jserve.sched.record.journal import JournalFile
    from jserve.sched.record.start import write_start

    path = config.scheduler.journal
    if not path:
        return None
    try:
        file = open(path, "wb", buffering=0)  # noqa: SIM115  # the engine's as long as it lives
        made = JournalFile(file)
        write_start(made, config, limits, facts["weights"], facts["sharding"])
        return made
    except OSError as e:
        raise ConfigError(f"journal {path}: {e.strerror}", field="journal") from None


def _runner(config: EngineConfig, progress: Progress, params: Any, mesh: Any) -> Any:
    """(the runner, its facts for the start banner and /metrics)."""
    import dataclasses

    from jserve.build_runner import runner_of

    source = located(config, weights=params is None)
    if directory := config.device.compile_cache:
        device = dataclasses.replace(config.device, compile_cache=str(cache_directory(directory)))
        config = dataclasses.replace(config, device=device)
    runner, facts = runner_of(config, source, progress, params, mesh)
    return runner, {"model": served_names(config, source)[0], **facts}


def native_kernels() -> str:
    """The native kernels that serve bfloat16 on this machine's CPU, or why there are none."""
    from jserve.model.native import available

    level, reason = available("cpu", "bfloat16")
    return f"native, level {level}" if level else f"none: {reason}"


def cache_directory(given: str) -> Path:
    """The directory of compiled programs: "auto" is the user's cache."""
    return Path.home() / ".cache" / "jserve" / "programs" if given == "auto" else Path(given)


def serving_engine(
    config: EngineConfig,
    *,
    in_process: bool = False,
    params: Any = None,
    mesh: Any = None,
    **options: Any,
) -> EngineFace:
    """The asyncio interface of what ``config`` asks for: one engine, in a thread (``in_process``) or in a process
    of its own, or ``replicas`` on Ray Serve. ``options`` are those of ``AsyncEngine``.

    Args:
        params: as of ``engine``, with ``in_process``; the first start has them, and there is no second one.
        mesh: likewise.

    Raises:
        ConfigError: replicas are asked for and Ray Serve is not installed, or cannot have ``params`` or ``mesh``.
    """
    from jserve.engine.health import HealthLimits

    server = config.server
    limits = HealthLimits(
        failed_steps=server.ready_failed_steps,
        nonfinite_share=server.ready_nonfinite_share,
        slowness=server.ready_slowness,
        step_s=server.ready_step_s,
    )
    given: dict[str, Any] = {"stall_timeout_s": server.stall_timeout_s, "health": limits}
    if config.fleet.replicas:
        for name, one in (("params", params), ("mesh", mesh)):
            if one is not None:
                why = "replicas are other processes, which load the model's files on their devices"
                raise ConfigError(f"{name}: {why}", field=name)
        from jserve.fleet.start import fleet_engine

        model = config.model.model or str(shipped())

        def write(source: Any) -> str:
            from jserve.weights.for_replicas import write_for_replicas  # imports jax

            return write_for_replicas(source, located(config, weights=False))

        return fleet_engine(config, "jserve.build:engine", model=model, write=write, **given)
    check_one_engine(config)
    from jserve.engine.async_engine import AsyncEngine
    from jserve.engine.client import InprocClient, ProcClient

    left = [] if params is None else [params]
    has_params = bool(left)

    def made(config: EngineConfig, progress: Progress) -> tuple[DrivenEngine, dict[str, Any]]:
        if has_params and not left:
            raise ConfigError("params: another start has taken them", field="params")
        # Not kept here: once they are copied, the caller alone has them.
        return engines(config, progress, params=left.pop() if left else None, mesh=mesh)

    def client() -> Any:
        if in_process or server.in_process:
            return InprocClient(config, made)
        return ProcClient(config)

    return AsyncEngine(client, **{"max_restarts": server.max_restarts, **given, **options})


def check_one_engine(config: EngineConfig) -> None:
    """Raises ConfigError for options of replicas where there are none."""
    for name in ("roles", "max_replicas", "ray_application", "hedge_share", "audit_share"):
        if getattr(config.fleet, name):
            raise ConfigError(f"{name}: there are no replicas", field=name)


def close(engine: DrivenEngine) -> None:
    """Give the KV pool and the slots back to the device."""
    for one in each_of(engine):
        _close(one)


def each_of(engine: Any) -> tuple[Engine, ...]:
    """The engines that ``engine`` of ``engines`` is made of."""
    return getattr(engine, "engines", (engine,))


def _close(engine: Engine) -> None:
    import jax

    guides: Any = engine.scheduler.guides
    if guides is not None:
        guides.close()
    engine.close()
    runner: Any = engine.runner
    for leaf in jax.tree.leaves(runner.state):
        if not leaf.is_deleted():  # asleep
            leaf.delete()
