"""Starts and stops profiles of the device while the engine serves."""

from __future__ import annotations

import jax

from jserve.errors import BadRequest


class JaxProfiler:
    """``jax.profiler`` traces (Perfetto, TensorBoard) below ``directory``, one folder per start."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._recording = False

    def start(self) -> None:
        """Raises BadRequest: a profile is being taken, or the directory cannot be written."""
        if self._recording:
            raise BadRequest("a profile is being taken already", code="profiler_active")
        try:
            jax.profiler.start_trace(self._directory)
        except Exception:
            raise BadRequest("a profile could not be started", field="profile_dir") from None
        self._recording = True

    def stop(self) -> None:
        """Raises BadRequest: no profile is being taken, or it cannot be written."""
        if not self._recording:
            raise BadRequest("no profile is being taken", code="profiler_idle")
        self._recording = False
        try:
            jax.profiler.stop_trace()
        except Exception:
            raise BadRequest("the profile could not be written", field="profile_dir") from None
