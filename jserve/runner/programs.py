"""Compiles every program before the engine is ready, and counts compilations after that.

It owns compilation ahead of time (each bucket, in parallel threads), the persistent compile cache and the seal. After
``seal()`` nothing may compile: on a GPU a new executable evicts every captured graph, and anywhere it stalls all
requests. Compiles are counted through ``jax.monitoring``, so one by any code of this process is seen; those of an
engine that is ``starting`` are no fault of the engines that are ready.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jserve.cores import n_cores
from jserve.errors import ConfigError
from jserve.model import feature_states, slots as slot_rows
from jserve.model.step import DeviceState, StepModel, make_step
from jserve.model.view import Bucket, StepDims, buffer_size
from jserve.runner.compiler import Compiler
from jserve.runner.program_files import by_others
from jserve.working import working_on
from jserve.xla import user_sets

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""(stage, done, total)."""

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

_GRAPH_FLAG = "xla_gpu_enable_command_buffer"
GRAPH_PARTS = (
    "FUSION",
    "CUBLAS",
    "CUBLASLT",
    "CUDNN",
    "CUSTOM_CALL",
    "CONDITIONAL",
    "DYNAMIC_SLICE_FUSION",
    "WHILE",
    "COLLECTIVES",
)
"""Kinds of work that XLA may record in a CUDA graph, which are all that a step has. By default the
sampler's conditional and loop, and every collective, stay outside: the host then starts the pieces
of a step one by one and waits for the conditional's value between them."""


_LEVEL_FLAG = "xla_backend_optimization_level"
CPU_LEVEL = "1"
"""LLVM's level of optimisation for programs on a CPU: it compiles in three quarters of the time what runs as fast,
with the native kernels and without them."""


def compile_options(platform: str, cuda_graphs: str = "step") -> dict[str, str | bool]:
    """XLA's options for every program of an engine on ``platform``. What ``XLA_FLAGS`` says counts for more.

    Args:
        cuda_graphs: ``step`` makes a step one CUDA graph, ``xla`` leaves it to XLA, ``off`` makes none.
    """
    if platform == "cpu":
        return {} if user_sets(_LEVEL_FLAG) else {_LEVEL_FLAG: CPU_LEVEL}
    if cuda_graphs == "xla" or user_sets(_GRAPH_FLAG):
        return {}
    return {_GRAPH_FLAG: ",".join(GRAPH_PARTS) if cuda_graphs == "step" else ""}


_STARTING = ContextVar("starting", default=False)


@contextmanager
def starting() -> Iterator[None]:
    """Compiles in here, also in threads that run in a copy of this context, belong to an engine's
    start."""
    token = _STARTING.set(True)
    try:
        yield
    finally:
        _STARTING.reset(token)


class _CompileCounter:
    """Compiles of this process outside of every start, since the counter was first asked for."""

    def __init__(self) -> None:
        self.n = 0
        self._lock = threading.Lock()
        self._listening = False

    def listen(self) -> _CompileCounter:
        with self._lock:
            if not self._listening:
                jax.monitoring.register_event_duration_secs_listener(self._heard)
                self._listening = True
        return self

    def _heard(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        # It is called in the thread that compiled.
        if event == _COMPILE_EVENT and not _STARTING.get():
            with self._lock:
                self.n += 1


_COUNTER = _CompileCounter()


def n_compiles() -> int:
    """Compiles (cache hits included) in this process since the first call of this function, but for
    those of engines that were ``starting``."""
    return _COUNTER.listen().n


def use_compile_cache(directory: str | Path) -> None:
    """Keep compiled programs in ``directory`` across processes; every program, however small.

    Raises:
        ConfigError: it cannot be made, or others may put programs there that we would run.
    """
    try:
        Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        status = Path(directory).stat()
    except OSError as error:
        raise ConfigError(
            f"compile_cache {directory}: {error.strerror}", field="compile_cache"
        ) from None
    if by_others(status, group=False):
        raise ConfigError(
            f"compile_cache {directory} holds programs and can be written by other users",
            field="compile_cache",
        )
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class Programs:
    """The compiled steps and the slot loaders of one model.

    Args:
        threads: programs compiled at once; 0 is one per core.
        strict: after ``seal``, ``check`` raises on a late compile instead of warning.
        options: for XLA's compiler, as of ``compile_options``.
        compiler: what makes them; by default one that keeps nothing.
    """

    def __init__(
        self,
        model: StepModel,
        buckets: Iterable[Bucket],
        *,
        threads: int = 0,
        strict: bool = False,
        progress: Progress | None = None,
        options: Mapping[str, str | bool] | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self.model = model
        self.options, self._compiler = options, compiler or Compiler()
        self.buckets = tuple(buckets)
        self.stateful = {
            feature.name: feature
            for bucket in self.buckets
            for feature in bucket.features
            if feature.state is not None
        }
        """By name, the features for which slots hold an array."""
        self.strict = strict
        self._steps: dict[Bucket, Any] = {}
        self._loads: dict[str, Any] = {}
        self._sealed_at: int | None = None
        self._warned = 0
        self._whole = NamedSharding(model.mesh, PartitionSpec())
        n_compiles()
        self._compile_all(threads or n_cores(), progress or (lambda *_: None))

    def step(self, bucket: Bucket) -> Any:
        """The compiled step: ``(params, state, buf) -> (state, out)``, state donated."""
        return self._steps[bucket]

    @property
    def load(self) -> Any:
        """The compiled slot loader: ``(slots, buf) -> slots``, slots donated."""
        return self._loads["slot_load"]

    @property
    def load_text(self) -> Any:
        """The compiled loader of a slot's text: ``(slots, buf) -> slots``, slots donated."""
        return self._loads["text_load"]

    @property
    def load_picks(self) -> Any:
        """The compiled loader of a slot's picked ids: ``(slots, buf) -> slots``, slots donated."""
        return self._loads["picks_load"]

    def load_state(self, feature: str) -> Any:
        """The compiled loader of what slots hold for a feature: ``(array, buf) -> array``, the array donated."""
        return self._loads[_STATE_LOAD + feature]

    def __len__(self) -> int:
        return len(self._steps) + len(self._loads)

    @property
    def n_loaded(self) -> int:
        """Those that an earlier start compiled and kept in serialised form."""
        names = (*map(step_name, self._steps), *self._loads)
        return sum(name in self._compiler.loaded for name in names)

    def seal(self) -> None:
        """From now on a compile is a fault."""
        self._sealed_at = self._warned = n_compiles()

    @property
    def late_compiles(self) -> int:
        """Compiles since the seal: of our own programs, or of code that nobody answers for."""
        return 0 if self._sealed_at is None else n_compiles() - self._sealed_at

    def check(self) -> None:
        """Raises RuntimeError (strict) or warns once each when something compiled after the
        seal."""
        if self._sealed_at is None or n_compiles() == self._warned:
            return
        self._warned = n_compiles()
        n = self.late_compiles
        message = f"{n} programs were compiled in this process after the engine was ready"
        if self.strict:
            raise RuntimeError(message)
        log.warning(message)

    def hlo(self, bucket: Bucket) -> str:
        """The optimised HLO of a step."""
        return self._steps[bucket].as_text()

    def memory(self, bucket: Bucket) -> Any:
        """XLA's memory analysis of a step."""
        return self._steps[bucket].memory_analysis()

    def _compile_all(self, threads: int, progress: Progress) -> None:
        params = self.model.abstract_params()
        state = self.model.abstract_state()
        dims = self.model.dims
        loads = ["slot_load"]
        loads += ["text_load"] if dims.text else []
        loads += ["picks_load"] if dims.picks else []
        loads += [_STATE_LOAD + name for name in self.stateful]
        jobs = [*sorted(self.buckets, key=lambda b: -b.T), *loads]
        progress("compile", 0, len(jobs))
        with ThreadPoolExecutor(min(threads, len(jobs)), "compile") as pool:
            futures = [
                pool.submit(copy_context().run, self._compile, job, params, state) for job in jobs
            ]
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    future.result()
                    progress("compile", done, len(jobs))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _compile(self, job: Bucket | str, params: Any, state: DeviceState) -> None:
        name = job if isinstance(job, str) else step_name(job)
        with working_on(name):
            if isinstance(job, str):
                self._loads[job] = self._make(name, *self._load_of(job, state))
            else:
                args = (params, state, self._ints(buffer_size(self.model.fields(job))))
                self._steps[job] = self._make(name, self._step_of(job), args, job)

    def _make(self, name: str, jitted: Any, args: tuple[Any, ...], about: Any = None) -> Any:
        return self._compiler(name, jitted, *args, options=self.options, about=about)

    def _step_of(self, bucket: Bucket) -> Any:
        step = make_step(self.model, bucket)
        step.__name__ = step_name(bucket)
        return jax.jit(step, donate_argnums=(1,))

    def _load_of(self, name: str, state: DeviceState) -> tuple[Any, tuple[Any, ...], Any]:
        """The program, its arguments, and the feature that it is of, if it is of one."""
        if name in _LOADS:
            (load, size_of), filled = _LOADS[name], state.slots
            size, feature = size_of(self.model.dims), None
        else:
            feature = self.stateful[name.removeprefix(_STATE_LOAD)]
            load, size = feature_states.loader(feature), feature_states.LOAD_SIZE
            filled = state.slots.states[feature.name]
        jitted = jax.jit(load, donate_argnums=(0,), out_shardings=self._whole)
        return jitted, (filled, self._ints(size)), feature

    def _ints(self, n: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((n,), jnp.int32, sharding=self._whole)


_STATE_LOAD = "state_load_"
_LOADS: dict[str, tuple[Callable[..., Any], Callable[[StepDims], int]]] = {
    "slot_load": (slot_rows.load, lambda dims: slot_rows.LOAD_SIZE),
    "text_load": (slot_rows.load_text, lambda dims: slot_rows.TEXT_SIZE),
    "picks_load": (slot_rows.load_picks, lambda dims: 1 + dims.picks),
}
"""The program that fills a slot, and the size of its buffer."""


def step_name(bucket: Bucket) -> str:
    """e.g. ``step_D8_P128_F4_J1_score``."""
    marks = "".join(f"_{feature.name}" for feature in bucket.features)
    drafts = f"_n{bucket.n_draft}" if bucket.n_draft else ""
    tree = "_tree" if bucket.tree else ""
    return f"step_D{bucket.D}_P{bucket.P}_F{bucket.F}_J{bucket.J}{drafts}{tree}{marks}"
