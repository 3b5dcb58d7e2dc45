"""The composition root: builds a wired engine and its text side from an ``EngineConfig``.

The only file that may import everything. It imports rooms inside its functions, so that the HTTP process never
loads jax. It owns no policy: what is chosen here is named in ``jserve.config``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        journal=_journal(config, limits, facts["weights"]),
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


def _journal(config: EngineConfig, limits: Any, weights: str) -> Any:
    from jserve.sched.record.journal import JournalFile
    from jserve.sched.record.start import write_start

    path = config.scheduler.journal
    if not path:
        return None
    try:
        file = open(path, "wb", buffering=0)  # noqa: SIM115  # the engine's as long as it lives
        made = JournalFile(file)
        write_start(made, config, limits, weights)
        return made
    except OSError as e:
        raise ConfigError(f"journal {path}: {e.strerror}", field="journal") from None


def _runner(config: EngineConfig, progress: Progress, params: Any, mesh: Any) -> Any:
    from jserve.model.families import family_for
    from jserve.model.hf_text import is_multimodal, served_as_text
    from jserve.model.moe_specs import check_has_experts
    from jserve.model.quant import bytes_by_form, form_name
    from jserve.model.rope import for_context
    from jserve.runner.layout import partitionable, placement
    from jserve.runner.programs import use_compile_cache
    from jserve.runner.runner import ModelRunner
    from jserve.speculation.host.methods import check
    from jserve.weights.loader import adopted, load
    from jserve.weights.place import tp_size
    from jserve.weights.quant.scheme import quantised

    source = located(config, weights=params is None)
    dtype = _dtype(config, source)
    scheme = _scheme(config, source, dtype)
    family = quantised(family_for(source.config), scheme)
    arch = for_context(family.arch(source.config), config.model.max_model_len)
    if is_multimodal(source.config):
        log.info(served_as_text(source.config))
    mesh, rules = placement(config, mesh)
    check_has_experts(arch, rules, mesh.shape)
    config = partitionable(config, rules, mesh.devices.flat[0].platform)
    check(config.speculative, tp_size(mesh, rules))
    if config.device.compile_cache:
        use_compile_cache(cache_directory(config.device.compile_cache))
    began, given = time.monotonic(), params is not None
    if not given:
        params = load(
            family,
            arch,
            source,
            mesh,
            rules,
            dtype,
            progress=lambda _, done, total: progress("load weights", done, total),
            scan_nan=config.model.scan_nan,
            seed=config.model.seed,
            scheme=scheme,
        )
    else:
        params = adopted(family, arch, params, mesh, rules, dtype)
    if scheme is not None and not scheme.widened:
        _say_forms(scheme.name, params, dtype.name)
    speculation = _speculation(config, (arch, mesh, rules, dtype), progress)
    config = _with_attention(config, arch, dtype, mesh.devices.flat[0], speculation)
    if reason := _loop_over_experts(config, arch, dtype, mesh.devices.flat[0].platform, scheme):
        log.warning("experts: larger steps run a loop over them and no kernel: %s", reason)
    loaded = time.monotonic()
    with _program_files(config, mesh.devices.flat[0].platform) as files:
        runner = ModelRunner(
            family,
            arch,
            params,
            mesh,
            config,
            rules=rules,
            speculation=speculation,
            penalises=source.penalises,
            progress=progress,
            files=files,
        )
    facts = {
        "model": served_names(config, source)[0],
        "source": source.name,
        "weights": "" if given else source.stamp,
        "family": family.name,
        "quantization": scheme.name if scheme is not None and not scheme.widened else "",
        "form": form_name(params),
        "form_bytes": bytes_by_form(params, dtype),
        "load_s": round(loaded - began, 2),
        "compile_s": round(time.monotonic() - loaded, 2),
    }
    return runner, facts


@contextmanager
def _program_files(config: EngineConfig, platform: str) -> Iterator[Any]:
    """The directory of programs in serialised form, beside the compile cache; None: there is none. None where plugins
    may have changed code that no key covers, and only for a CPU, which alone was seen to run them again."""
    from jserve.runner.program_files import ProgramFiles, Unusable

    files, directory = None, config.device.compile_cache
    if directory and not config.model.plugins and platform == "cpu":
        try:
            files = ProgramFiles(cache_directory(directory))
        except Unusable as error:
            log.warning("serialised programs: %s", error)
    try:
        yield files
    finally:
        if files is not None:
            files.close()


def _with_attention(
    config: EngineConfig, arch: Any, dtype: Any, device: Any, speculation: Any
) -> EngineConfig:
    """``config`` with the attention backend that ``auto`` means on ``device``. Kernels that the user has not
    asked for by name are tried first, and left out where they fail."""
    import dataclasses

    from jserve.model.attention import KERNELS, unserved
    from jserve.runner import selftest
    from jserve.runner.sizes import attention_name, kv_dtype

    if config.device.attention_backend != "auto" or device.platform == "cpu":
        return config
    page_size = config.cache.on(device.platform).page_size
    capability = getattr(device, "compute_capability", "")
    name = attention_name(arch, config, dtype, device.platform, capability, speculation)
    reason = unserved(capability) or "it does not serve this model with these options"
    experts = _experts(arch, config)
    if name == "dense_experts" and experts is None:
        name = "dense"
    if name in KERNELS:
        heads = (arch.H, arch.N // arch.K, page_size, str(kv_dtype(config, dtype)))
        fault = selftest.fault(selftest.command(name, *heads, experts))
        name, reason = ("dense", fault) if fault else (name, reason)
    if name != "hopper":
        log.warning("attention is dense on %s; not hopper: %s", device.device_kind, reason)
    options = dataclasses.replace(config.device, attention_backend=name)
    return dataclasses.replace(config, device=options)


def _experts(arch: Any, config: EngineConfig) -> tuple[int, int] | None:
    """The width of the model and a device's share of that of an expert; None: the kernels take none of them."""
    from jserve.model.arch import Moe

    widths = [layer.ffn.F for layer in arch.layers if isinstance(layer.ffn, Moe)]
    if not widths:
        return None
    from pallas_kernels.grouped_matmul import serves

    F = widths[0] // config.device.tensor_parallel_size
    return (arch.D, F) if serves(arch.D, F) else None


def _loop_over_experts(
    config: EngineConfig, arch: Any, dtype: Any, platform: str, scheme: Any = None
) -> str:
    """The reason why a GPU runs a loop over experts where a step has more than a few; empty: it runs the kernel for
    them, or there are none."""
    from jserve.model.arch import Moe
    from jserve.model.attention import KERNELS
    from jserve.model.moe_hopper import unserved

    found = dict.fromkeys(x.ffn for x in arch.layers if isinstance(x.ffn, Moe))
    if platform == "cpu" or not found:
        return ""
    name = config.device.attention_backend
    if name not in KERNELS:
        return f"it is of attention_backend hopper and dense_experts, this is {name}"
    if scheme is not None and not scheme.widened:
        return f"it takes no weights in the form of {scheme.name}"
    tp = config.device.tensor_parallel_size
    reasons = (unserved(moe, arch.D, moe.F // tp, dtype) for moe in found)
    return next(filter(None, reasons), "")


def _speculation(config: EngineConfig, given: tuple[Any, ...], progress: Progress) -> Any:
    """The drafter that ``speculative`` names, for a target of these (arch, mesh, rules, dtype)."""
    from jserve.speculation.drafters.load import copying, load_speculation
    from jserve.speculation.host.methods import DEVICE, shape
    from jserve.weights.source import resolve

    options = config.speculative
    if options.method == "ngram":
        return copying(options, config.n_drafts, given[0])
    if options.method not in DEVICE:
        return None
    return load_speculation(
        options.method,
        resolve(options.model, "", config.model.load_format),
        *given,
        shape=lambda deepest: shape(options, deepest),
        progress=lambda _, done, total: progress("load drafter", done, total),
        scan_nan=config.model.scan_nan,
        seed=config.model.seed + 1,
        tensor_parallel_size=options.tensor_parallel_size,
    )


def _dtype(config: EngineConfig, source: Any) -> Any:
    import jax.numpy as jnp

    from jserve.weights.hf import dtype_name

    name = config.model.dtype if config.model.dtype != "auto" else dtype_name(source.config)
    return jnp.dtype(name)


def _say_forms(scheme: str, params: Any, dtype: str) -> None:
    """The log's line on what is quantised, and one where activations are not what a format was made for."""
    from jserve.model.quant import bytes_by_form, n_bytes

    stored, rest = (n / 1e9 for n in n_bytes(params))
    log.info("quantization %s: %.3f GB; %.3f GB stay in %s", scheme, stored, rest, dtype)
    if "e2m1" in bytes_by_form(params, dtype):
        log.warning(
            "quantization %s: 4-bit floats are of weights alone, activations stay in %s",
            scheme,
            dtype,
        )


def _scheme(config: EngineConfig, source: Any, dtype: Any) -> Any:
    from jserve.weights.quant.scheme import scheme_of

    options = config.model
    return scheme_of(source.config, dtype, options.quantization, options.quantization_config)


def cache_directory(given: str) -> Path:
    """The directory of compiled programs: "auto" is the user's cache."""
    return Path.home() / ".cache" / "jserve" / "programs" if given == "auto" else Path(given)


def serving_engine(config: EngineConfig, *, in_process: bool = False, **options: Any) -> EngineFace:
    """The asyncio interface of what ``config`` asks for: one engine, in a thread (``in_process``) or in a process
    of its own, or ``replicas`` on Ray Serve. ``options`` are those of ``AsyncEngine``.

    Raises:
        ConfigError: replicas are asked for and Ray Serve is not installed.
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
        from jserve.fleet.start import fleet_engine

        model = config.model.model or str(shipped())
        return fleet_engine(config, "jserve.build:engine", model=model, **given)
    check_one_engine(config)
    from jserve.engine.async_engine import AsyncEngine
    from jserve.engine.client import InprocClient, ProcClient

    def client() -> Any:
        if in_process or server.in_process:
            return InprocClient(config, engines)
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
