"""The options of ``jserve quantize``, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jserve.errors import ConfigError
from jserve.weights.quant.on_load import KINDS, OnLoad, on_load

METHODS = ("rtn", "mse", "hqq", "gptq", "awq")
WITH_DATA = ("gptq", "awq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A scheme and how it is reached.

    Raises:
        ConfigError: an unknown name, or a value out of range; ``field`` is the option.
    """

    scheme: str
    method: str = ""
    """Empty: mse for int4, rtn for 8 bits."""
    smooth: float = 0.0
    """Strength of SmoothQuant; 0: none."""
    rotate: bool = False
    config: str = ""
    """JSON object with ignore and group_size, as ``--quantization-config`` has them."""

    def __post_init__(self) -> None:
        if self.scheme not in KINDS:
            raise ConfigError(
                f"scheme {self.scheme!r} is not one of {', '.join(KINDS)}", field="scheme"
            )
        if self.method not in ("", *METHODS):
            raise ConfigError(
                f"method {self.method!r} is not one of {', '.join(METHODS)}", field="method"
            )
        if not 0.0 <= self.smooth <= 1.0:
            raise ConfigError(f"smooth must be in [0, 1], not {self.smooth}", field="smooth")
        if self.smooth and self.method == "awq":
            raise ConfigError("smooth and awq both scale inputs: choose one", field="smooth")
        self._options()

    @property
    def needs_texts(self) -> bool:
        return self.method in WITH_DATA or self.smooth > 0

    @property
    def only_rounds(self) -> bool:
        """True if a matrix is rounded as it is, without a look at what it multiplies."""
        return not (self.needs_texts or self.rotate)

    def modules(self, dtype: str) -> OnLoad:
        """The modules and their forms."""
        how = self._options()
        if self.method:
            how = {**how, "method": "mse" if self.method in WITH_DATA else self.method}
        return on_load(self.scheme, dtype, how)

    def _options(self) -> Mapping[str, Any]:
        try:
            given = json.loads(self.config) if self.config else {}
        except ValueError:
            given = None
        if not isinstance(given, Mapping) or "method" in given:
            why = "must be a JSON object with ignore and group_size"
            raise ConfigError(f"config {why}", field="config")
        return given
