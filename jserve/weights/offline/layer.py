"""One layer, from its weights and the inputs of its matrices to the tensors that are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jserve.model.arch import Arch
from jserve.model.layer_pass import PRODUCTS
from jserve.model.param_spec import ParamSpec
from jserve.model.quant import Form
from jserve.model.quant_specs import stem
from jserve.weights.offline.export import stored, tensors_of
from jserve.weights.offline.folds import NORMS, Layer, alike, can_divide, divided
from jserve.weights.offline.wish import Wish
from jserve.weights.quant.matrix import Matrix
from jserve.weights.quant.methods.gptq import gptq_numbers
from jserve.weights.quant.methods.scales import awq_scales, smooth_scales
from jserve.weights.quant.methods.stats import InputStats
from jserve.weights.quant.on_load import OnLoad
from jserve.weights.quant.rounding import numbers_of, scales_of


class LayerQuantiser:
    """Quantises layers of one model, all by one wish.

    Args:
        dtype: of norms, biases and scales in the files.
    """

    def __init__(self, arch: Arch, wish: Wish, modules: OnLoad, dtype: Any) -> None:
        self._arch, self._wish, self._modules = arch, wish, modules
        self._dtype = np.dtype(dtype)

    def tensors(
        self, layer: int, specs: Mapping[str, ParamSpec], p: Layer, stats: Mapping[str, InputStats]
    ) -> dict[str, np.ndarray]:
        """The tensors of a layer.

        Args:
            specs: of its parameters, for one device.
            p: float32, in that layout.
            stats: of the inputs of its matrices; empty where the wish needs none.
        """
        p, stats = self._scaled(layer, specs, p, stats)
        found: dict[str, np.ndarray] = {}
        for name, spec in specs.items():
            for tensor, x in tensors_of(spec, p[name]).items():
                if name in PRODUCTS:
                    found |= self.matrix(tensor, x, stats.get(name))
                else:
                    found[tensor] = x.astype(spec.dtype or self._dtype)
        return found

    def matrix(
        self, tensor: str, w_ND: np.ndarray, stats: InputStats | None = None
    ) -> dict[str, np.ndarray]:
        """The tensors of a matrix, which stays as it is where the wish leaves it out.

        Args:
            tensor: its name in the checkpoint.
            w_ND: any floats.
            stats: of its inputs; None: it is rounded without them, whichever method the wish has.
        """
        form = self._form(tensor, w_ND)
        if form is None:
            return {tensor: w_ND.astype(self._dtype)}
        wide = w_ND.astype(np.float32, copy=False)
        return stored(stem(tensor), self._matrix(wide, form, stats), form, self._dtype)

    def _form(self, tensor: str, x: np.ndarray) -> Form | None:
        return self._modules.form_of(stem(tensor), x.shape[-1])

    def _scaled(
        self, layer: int, specs: Mapping[str, ParamSpec], p: Layer, stats: Mapping[str, InputStats]
    ) -> tuple[Layer, Mapping[str, InputStats]]:
        """``p`` with inputs scaled as the wish says, and the inputs that it has then."""
        if not (self._wish.smooth or self._wish.method == "awq"):
            return p, stats
        spec, stats = self._arch.layers[layer], dict(stats)
        for name in NORMS if self._wish.smooth else PRODUCTS:
            whole = tensors_of(specs[name], p[name])
            parts = [(x, self._form(t, x)) for t, x in whole.items()]
            parts = [(x, form) for x, form in parts if form is not None]
            if parts and can_divide(spec, p, name):
                s_D = alike(spec, name, self._scales(spec, name, parts, stats[name]))
                p, s_D = divided(self._arch, spec, p, name, s_D, self._dtype)
                stats[name] = stats[name].divided(s_D)
        return p, stats

    def _scales(self, spec: Any, name: str, parts: list[Any], stats: InputStats) -> np.ndarray:
        matrices = [x for x, _ in parts]
        if self._wish.smooth:
            return smooth_scales(stats.most_D, matrices, self._wish.smooth)

        def rounded(form: Form) -> Any:
            return lambda x: self._matrix(x, form, None).widened()

        size_D = alike(spec, name, stats.mean_D)
        return awq_scales(stats, size_D, matrices, [rounded(form) for _, form in parts])

    def _matrix(self, w_ND: np.ndarray, form: Form, stats: InputStats | None) -> Matrix:
        """``w_ND`` in this form, with scales that the files hold exactly."""
        wide = jnp.asarray(w_ND)
        scale = np.asarray(scales_of(wide, form)).astype(self._dtype).astype(np.float32)
        scale = np.maximum(scale, float(jnp.finfo(self._dtype).tiny))
        if self._wish.method == "gptq" and stats is not None:
            q = gptq_numbers(w_ND, scale, form, stats.hessian_DD)
        else:
            q = np.asarray(numbers_of(wide, jnp.asarray(scale), form))
        return Matrix(q=q, scale=scale)
