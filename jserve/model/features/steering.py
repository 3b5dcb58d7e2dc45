"""Steering: a step feature that changes the residual stream of the rows that ask, by vectors that are data.

The vectors lie in the packed buffer of steps that hold such a row, so that new ones compile nothing. A row that has not
asked has strength 0, which leaves its stream as it is. What is asked names the KV, so that pages are shared by requests
of one steering only::

    extra_args={"mood": ["calm", 4.0]}  --check, kv_name, pack-->  strength_RK, vector_RKD  --edit-->  x_TD + 4 calm_D
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.errors import ConfigError
from jserve.model.feature import StepFeature
from jserve.model.view import Bucket, Field, StepDims, StepView
from jserve.types import RowPlan

MOST = float(np.finfo(np.float32).max)


def _add(x_TD: jax.Array, s_T1: jax.Array, v_TD: jax.Array) -> jax.Array:
    return x_TD + s_T1 * v_TD


def _replace(x_TD: jax.Array, s_T1: jax.Array, v_TD: jax.Array) -> jax.Array:
    return jnp.where(s_T1 != 0, s_T1 * v_TD, x_TD)


def _project(x_TD: jax.Array, s_T1: jax.Array, v_TD: jax.Array) -> jax.Array:
    """``v_TD`` has length 1."""
    along_T1 = jnp.sum(x_TD * v_TD, axis=1, keepdims=True)
    return x_TD - s_T1 * along_T1 * v_TD


MODES: Mapping[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = MappingProxyType(
    {"add": _add, "replace": _replace, "project": _project}
)
"""The stream plus strength times vector; that product in its place; less its part along the vector, times strength."""


def steering(
    name: str,
    *points: str,
    vectors: Mapping[str, Any] | None = None,
    width: int = 0,
    mode: str = "add",
    most: int = 1,
) -> StepFeature:
    """A feature for ``register_feature``: requests ask for it by ``extra_args={name: [vector, strength]}``, all their
    tokens are computed so, those of the prompt too, and their KV is shared with requests that ask for the same only.
    A vector is the name of one of ``vectors`` or, from Python, a list of numbers; several pairs may follow one another.

    Args:
        points: of the residual stream, before or after a layer, as ``jserve.model.points`` names them.
        vectors: by name, [D] each.
        width: D, of the model; needed only without ``vectors``.
        mode: add, replace or project, as ``MODES`` says.
        most: pairs that a request may ask for.

    Raises:
        ConfigError: vectors of several widths or with values that are not finite, an unknown mode, no width.
    """
    table = {key: np.asarray(value, np.float32) for key, value in (vectors or {}).items()}
    widths = {value.shape for value in table.values()} | ({(width,)} if width else set())
    if len(widths) != 1 or len(next(iter(widths))) != 1:
        raise ConfigError(f"{name}: vectors or width must give one width", field=name)
    if not all(np.isfinite(value).all() for value in table.values()):
        raise ConfigError(f"{name}: a vector has values that are not finite", field=name)
    if mode not in MODES:
        raise ConfigError(
            f"{name}: mode must be one of {', '.join(MODES)}, not {mode!r}", field=name
        )
    of = _Steering(name, points, table, next(iter(widths))[0], mode, most)
    return StepFeature(
        name=name,
        writes=points,
        fields=of.fields,
        check=of.check,
        kv_name=of.kv_name,
        pack=of.pack,
        edit=of.edit,
    )


@dataclass(frozen=True, slots=True)
class _Steering:
    """The arguments of ``steering``, and the functions of its feature."""

    name: str
    points: tuple[str, ...]
    table: Mapping[str, np.ndarray]
    D: int
    mode: str
    most: int

    def fields(self, bucket: Bucket, dims: StepDims) -> tuple[Field, ...]:
        strength, vector = self._names
        return (
            Field(strength, (bucket.R, self.most), is_float=True),
            Field(vector, (bucket.R, self.most, self.D), is_float=True),
        )

    def check(self, asked: Any) -> None:
        for _ in self._pairs(asked):
            pass

    def kv_name(self, asked: Any) -> str:
        found = hashlib.blake2b(repr((self.mode, self.points)).encode(), digest_size=16)
        for vector_D, strength in self._pairs(asked):
            found.update(np.float32(strength).tobytes() + vector_D.tobytes())
        return found.hexdigest()

    def pack(
        self,
        views: Mapping[str, np.ndarray],
        rows: Sequence[RowPlan],
        at: Sequence[int],
        dims: StepDims,
    ) -> None:
        strength_RK, vector_RKD = (views[name] for name in self._names)
        strength_RK[...] = 0.0
        vector_RKD[...] = 0.0
        for r, row in zip(at, rows, strict=True):
            asked = row.choice.request.params.extra_args.get(self.name)
            for k, (vector_D, strength) in enumerate(
                self._pairs(asked) if asked is not None else ()
            ):
                strength_RK[r, k], vector_RKD[r, k] = strength, vector_D

    def edit(self, view: StepView, x_TD: jax.Array) -> jax.Array:
        """Raises ConfigError for a model of another width."""
        if x_TD.shape[1] != self.D:
            why = f"vectors have {self.D} values, the model's residual stream {x_TD.shape[1]}"
            raise ConfigError(f"{self.name}: {why}", field=self.name)
        strength_RK, vector_RKD = (view.extra[name] for name in self._names)
        row_T = jnp.minimum(view.row_T, strength_RK.shape[0] - 1)
        for k in range(self.most):
            x_TD = MODES[self.mode](x_TD, strength_RK[row_T, k, None], vector_RKD[row_T, k])
        return x_TD

    @property
    def _names(self) -> tuple[str, str]:
        return f"{self.name}.strength_RK", f"{self.name}.vector_RKD"

    def _pairs(self, asked: Any) -> Iterator[tuple[np.ndarray, float]]:
        """(float32[D], strength) as asked; of mode project the vectors have length 1. Raises ValueError."""
        items = asked if isinstance(asked, Sequence) and not isinstance(asked, str) else None
        if items is None or len(items) % 2 or not 2 <= len(items) <= 2 * self.most:
            raise ValueError(
                f"must be a list of a vector and its strength, {self.most} such at most"
            )
        for vector, strength in zip(items[::2], items[1::2], strict=True):
            number = isinstance(strength, int | float) and not isinstance(strength, bool)
            if not number or not abs(strength) <= MOST:
                raise ValueError(f"strength must be a finite number, not {strength!r}"[:200])
            vector_D = self._vector(vector)
            if self.mode == "project":
                vector_D = vector_D / max(float(np.linalg.norm(vector_D)), 1e-12)
            yield vector_D.astype(np.float32), float(strength)

    def _vector(self, given: Any) -> np.ndarray:
        if isinstance(given, str):
            if given not in self.table:
                known = ", ".join(self.table) or "none"
                raise ValueError(f"there is no vector {given[:64]!r}, only {known}")
            return self.table[given]
        try:
            found = np.asarray(given, np.float32)
        except (TypeError, ValueError, OverflowError):
            found = np.empty(0, np.float32)
        if found.shape != (self.D,) or not np.isfinite(found).all():
            raise ValueError(f"a vector must be a name or {self.D} finite numbers")
        return found
