"""Carries out an operator's commands between steps: pause, sleep, other weights, caches, profiles.

It owns what each command does to the scheduler and the runner. ``carry_out`` gives the facts that answer a command,
or None while it waits for running requests to end (``Hold.pending``). For weights::

    recompute   running sequences are computed anew under the new weights, and go on
    mix         they go on with the KV that they have
    finish      they end under the old weights, and so does all that was handed in before; new ones wait
    beside      they end under the old weights, while new ones run under the new weights, in turns
    abort       they end now
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jserve.engine.hold import PARTS, PAUSES
from jserve.engine.wire import Control
from jserve.errors import BadRequest, ConfigError, JserveError, WeightsError, where
from jserve.ports import LiveWeights

if TYPE_CHECKING:
    from jserve.engine.engine import Engine

POLICIES = ("recompute", "mix", "finish", "beside", "abort")
"""The fates of running requests when the weights change."""


def carry_out(engine: Engine, command: Control) -> dict[str, Any] | None:
    """Carry out ``command``.

    Raises:
        BadRequest: it cannot be carried out, or names what there is not.
        WeightsError: the weights do not fit; the old ones stay.
    """
    match command.action:
        case "pause":
            return _pause(engine, command)
        case "resume":
            engine.hold.refuse_pending()
            engine.hold.resume()
            _journal(engine, "resume")
        case "sleep":
            return _sleep(engine, command)
        case "wake":
            _wake(engine, _parts(command))
        case "update_weights":
            return _update(engine, command)
        case "rollback_weights":
            raise BadRequest("rollback_weights is of replicas; there is one engine", field="action")
        case "reset_prefix_cache":
            engine.forget()
        case "start_profile" | "stop_profile":
            _profile(engine, command.action)
    return _info(engine)


def settle(engine: Engine) -> tuple[Control, dict[str, Any]] | None:
    """The command that waited, and its answer, once all that ran has ended.

    Raises:
        JserveError: it failed; it waits no longer.
    """
    command = engine.hold.pending
    if command is None or engine.scheduler.has_work or engine.n_in_flight or engine.n_compiling:
        return None
    engine.hold.pending = None
    match command.action:
        case "pause":
            _paused(engine, "finish")
        case "sleep":
            _fall_asleep(engine, _parts(command))
        case _:
            return command, _replace(engine, command)
    return command, _info(engine)


def _info(engine: Engine) -> dict[str, Any]:
    ending = len(engine.scheduler.versions)
    own = {"version": engine.version, "weights": engine.weights, "ending": ending}
    return own | engine.hold.info()


def _pause(engine: Engine, command: Control) -> dict[str, Any] | None:
    mode = _one_of("running", command.running or "abort", PAUSES)
    if not _begins(engine, command, mode):
        return None
    _paused(engine, mode)
    return _info(engine)


def _begins(engine: Engine, command: Control, mode: str) -> bool:
    """Do to running requests what ``mode`` says. False: ``command`` waits until they have ended (``settle``)."""
    if mode == "finish":
        engine.hold.wait(command)
        return False
    engine.hold.refuse_pending()
    if mode == "abort":
        engine.abort_all()
    return True


def _paused(engine: Engine, mode: str) -> None:
    engine.hold.pause(mode)
    _journal(engine, "pause", running=mode)


def _journal(engine: Engine, action: str, *, running: str = "", parts: Sequence[str] = ()) -> None:
    if engine.scheduler.journal is not None:
        engine.scheduler.journal.operated(engine.clock(), action, running, parts)


def _update(engine: Engine, command: Control) -> dict[str, Any] | None:
    policy = _one_of("running", command.running or "recompute", POLICIES)
    _live(engine)
    for name, given in (("canary", command.canary), ("analysis", command.analysis is not None)):
        if given:
            raise BadRequest(f"{name}: it needs replicas; there is one engine", field=name)
    if "weights" in engine.hold.asleep:
        raise BadRequest("the weights are asleep: wake them first", field="action", code="asleep")
    _refuse_beside(engine)
    if policy == "finish":
        engine.hold.wait(command)
        return None
    engine.hold.refuse_pending()
    return _replace(engine, command)


def _refuse_beside(engine: Engine) -> None:
    """Raises BadRequest while two versions of weights are in use."""
    if engine.beside:
        n, version = len(engine.scheduler.versions), engine.scheduler.versions.old_version
        raise BadRequest(
            f"not now: {n} sequences end under the weights {version!r}",
            code="operation_pending",
            field="action",
        )


def _replace(engine: Engine, command: Control) -> dict[str, Any]:
    """Other weights, now; those who are to be aborted are, once the new weights are in place."""
    began, runner = time.perf_counter(), _live(engine)
    engine.land()
    beside = command.running == "beside" and engine.scheduler.has_work

    def change() -> str:
        try:
            return runner.update_weights(
                command.source,
                partial=command.partial,
                donate=command.donate,
                alias=command.alias,
                beside=beside,
            )
        except WeightsError:
            raise
        except ConfigError as error:  # of a directory that is none, or of another model
            raise WeightsError(error.message, field="source") from None
        except JserveError:
            raise
        except Exception as error:  # of the caller's source, or a device without room
            raise WeightsError(
                f"params: the update failed at {where(error)}", field="params"
            ) from error

    stamp = change()
    engine.weights = stamp or command.id
    of_files = stamp and isinstance(command.source, str | Path)
    directory = str(Path(command.source).expanduser().absolute()) if of_files else ""
    if command.running == "abort":
        engine.abort_all()
    engine.n_updates += 1
    engine.version = command.version or str(engine.n_updates)
    name = "" if engine.weights == engine.first_weights else engine.weights
    keep, engine.beside = command.running == "mix", beside
    engine.scheduler.reweigh(
        engine.version,
        engine.clock(),
        name=name,
        keep=keep,
        beside=beside,
        directory=directory,
    )
    seconds = time.perf_counter() - began
    engine.update_s += seconds
    return _info(engine) | {"seconds": seconds}


def _sleep(engine: Engine, command: Control) -> dict[str, Any] | None:
    mode, parts = _one_of("running", command.running or "keep", PAUSES), _parts(command)
    _live(engine)
    _refuse_beside(engine)
    if not _begins(engine, command, mode):
        return None
    _fall_asleep(engine, parts)
    return _info(engine)


def _fall_asleep(engine: Engine, parts: list[str]) -> None:
    """Running sequences are computed anew after ``wake``."""
    runner = _live(engine)
    fresh = [part for part in parts if part not in engine.hold.asleep]
    if "kv" in fresh:
        engine.swap(lambda: None)
    else:
        engine.land()
    runner.sleep(fresh)
    engine.hold.asleep |= {*fresh}
    _journal(engine, "sleep", parts=fresh)


def _wake(engine: Engine, parts: list[str]) -> None:
    asleep = [part for part in parts if part in engine.hold.asleep]
    _live(engine).wake(asleep)
    engine.hold.asleep -= {*asleep}
    _journal(engine, "wake", parts=asleep)


def _profile(engine: Engine, action: str) -> None:
    if engine.profiler is None:
        raise BadRequest("this server has no profile_dir", field="profile_dir")
    if action == "start_profile":
        engine.profiler.start()
    else:
        engine.profiler.stop()


def _live(engine: Engine) -> LiveWeights:
    if not isinstance(engine.runner, LiveWeights):
        raise BadRequest("this engine's weights cannot be replaced", field="action")
    return engine.runner


def _parts(command: Control) -> list[str]:
    return [_one_of("parts", part, PARTS) for part in command.parts] or [*PARTS]


def _one_of(field: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise BadRequest(f"{field} must be one of {', '.join(known)}, not {value!r}", field=field)
    return value
