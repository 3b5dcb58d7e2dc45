"""Steering: a step feature that changes the residual stream of the rows that ask, by vectors that are data.

The vectors lie in the packed buffer of steps that hold such a row, so that new ones compile nothing. A row that has not
asked has strength 0, which leaves its stream as it is, and so have positions that are not asked for. What is asked
names the KV, so that pages are shared by requests of one steering only::

    extra_args={"mood": ["calm", 4.0, "2:9"]}  --check, kv_name, pack-->  strength_RK, range_RK2, vector_RKD
                                               --edit--> x_TD + 4 calm_D at positions 2 to 8
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jserve.errors import ConfigError
from jserve.model.feature import StepFeature
from jserve.model.view import Bucket, Field, StepDims, StepView
from jserve.types import RowPlan

MOST = float(np.finfo(np.float32).max)
END = int(np.iinfo(np.int32).max)
"""A position behind every text."""
MOST_DIGITS = 9
"""Of a position."""
PROMPT, DRAWN = "prompt", "drawn"


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

    A text behind a strength says which tokens: "prompt", "drawn" (that is, where those that were drawn are read), or
    positions from the start of the text as Python's slices are written, "2:9", ":9" or "2:".

    Args:
        points: of the residual stream, before or after a layer, as ``jserve.model.points`` names them.
        vectors: by name, [D] each.
        width: D, of the model; needed only without ``vectors``.
        mode: add, replace or project, as ``MODES`` says.
        most: pairs that a request may ask for.

    Raises:
        ConfigError: vectors of several widths or with values that are not finite, or of a name that says which tokens;
            an unknown mode, no width.
    """
    table = {key: np.asarray(value, np.float32) for key, value in (vectors or {}).items()}
    widths = {value.shape for value in table.values()} | ({(width,)} if width else set())
    if len(widths) != 1 or len(next(iter(widths))) != 1:
        raise ConfigError(f"{name}: vectors or width must give one width", field=name)
    if not all(np.isfinite(value).all() for value in table.values()):
        raise ConfigError(f"{name}: a vector has values that are not finite", field=name)
    if unclear := [key for key in table if _is_range(key)]:
        raise ConfigError(f"{name}: {unclear[0]!r} cannot name a vector", field=name)
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


class _Change(NamedTuple):
    """The change that a request asks for at positions ``at[0]`` to before ``at[1]``."""

    vector_D: np.ndarray
    strength: float
    at: tuple[int, int]


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
        strength, at, vector = self._names
        return (
            Field(strength, (bucket.R, self.most), is_float=True),
            Field(at, (bucket.R, self.most, 2)),
            Field(vector, (bucket.R, self.most, self.D), is_float=True),
        )

    def check(self, asked: Any) -> None:
        for _ in self._changes(asked, 0):
            pass

    def kv_name(self, asked: Any, n_prompt: int) -> str:
        found = hashlib.blake2b(repr((self.mode, self.points)).encode(), digest_size=16)
        for change in self._changes(asked, n_prompt):
            numbers = (
                np.float32(change.strength).tobytes() + np.array(change.at, np.int32).tobytes()
            )
            found.update(numbers + change.vector_D.tobytes())
        return found.hexdigest()

    def pack(
        self,
        views: Mapping[str, np.ndarray],
        rows: Sequence[RowPlan],
        at: Sequence[int],
        dims: StepDims,
    ) -> None:
        strength_RK, range_RK2, vector_RKD = (views[name] for name in self._names)
        strength_RK[...] = 0.0
        range_RK2[...] = 0
        vector_RKD[...] = 0.0
        for r, row in zip(at, rows, strict=True):
            asked = row.choice.request.params.extra_args.get(self.name)
            if asked is None:
                continue
            for k, change in enumerate(self._changes(asked, row.choice.n_prompt)):
                strength_RK[r, k], range_RK2[r, k] = change.strength, change.at
                vector_RKD[r, k] = change.vector_D

    def edit(self, view: StepView, x_TD: jax.Array) -> jax.Array:
        """Raises ConfigError for a model of another width."""
        if x_TD.shape[1] != self.D:
            why = f"vectors have {self.D} values, the model's residual stream {x_TD.shape[1]}"
            raise ConfigError(f"{self.name}: {why}", field=self.name)
        strength_RK, range_RK2, vector_RKD = (view.extra[name] for name in self._names)
        row_T = jnp.minimum(view.row_T, strength_RK.shape[0] - 1)
        for k in range(self.most):
            start_T, stop_T = range_RK2[row_T, k, 0], range_RK2[row_T, k, 1]
            inside_T = (view.pos_T >= start_T) & (view.pos_T < stop_T)
            strength_T = jnp.where(inside_T, strength_RK[row_T, k], 0.0)
            x_TD = MODES[self.mode](x_TD, strength_T[:, None], vector_RKD[row_T, k])
        return x_TD

    @property
    def _names(self) -> tuple[str, str, str]:
        return f"{self.name}.strength_RK", f"{self.name}.range_RK2", f"{self.name}.vector_RKD"

    def _changes(self, asked: Any, n_prompt: int) -> Iterator[_Change]:
        """As asked, of a text whose prompt has ``n_prompt`` tokens; of mode project the vectors have length 1. Raises
        ValueError."""
        asked_for = _triples(asked)
        if not 1 <= len(asked_for) <= self.most:
            raise ValueError(
                f"must be a list of a vector and its strength, {self.most} such at most"
            )
        for vector, strength, where in asked_for:
            number = isinstance(strength, int | float) and not isinstance(strength, bool)
            if not number or not abs(strength) <= MOST:
                raise ValueError(f"strength must be a finite number, not {strength!r}"[:200])
            vector_D = self._vector(vector)
            if self.mode == "project":
                vector_D = vector_D / max(float(np.linalg.norm(vector_D)), 1e-12)
            at = _positions(where, n_prompt)
            yield _Change(vector_D.astype(np.float32), float(strength), at)

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


def _triples(asked: Any) -> list[tuple[Any, Any, str]]:
    """(vector, strength, tokens) each, ":" where nothing is said of tokens; [] of what is no list of such."""
    if not isinstance(asked, Sequence) or isinstance(asked, str):
        return []
    found, i = [], 0
    while i < len(asked):
        if i + 1 == len(asked):
            return []
        said = i + 2 < len(asked) and _is_range(asked[i + 2])
        found.append((asked[i], asked[i + 1], asked[i + 2] if said else ":"))
        i += 3 if said else 2
    return found


def _is_range(item: Any) -> bool:
    """True of a text that says which tokens."""
    return isinstance(item, str) and (item in (PROMPT, DRAWN) or ":" in item)


def _positions(where: str, n_prompt: int) -> tuple[int, int]:
    """The first position and that behind the last. Raises ValueError."""
    if where in (PROMPT, DRAWN):
        return (0, n_prompt) if where == PROMPT else (n_prompt, END)
    first, _, last = where.partition(":")
    numbers = [text for text in (first, last) if text]
    if not all(text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS for text in numbers):
        raise ValueError(f'tokens must be "prompt", "drawn" or "START:STOP", not {where[:64]!r}')
    start, stop = int(first or 0), int(last) if last else END
    if start >= stop:
        raise ValueError(f"there are no tokens in {where!r}")
    return start, stop
