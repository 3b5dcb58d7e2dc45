"""A quantised model on disk: tensors and config of compressed-tensors.

It owns the way back from parameters to the tensors of a checkpoint, and the words of ``quantization_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jserve.model.param_spec import ParamSpec
from jserve.model.quant import Form
from jserve.weights.quant.matrix import Matrix

BITS = {"int4": 4, "int8": 8, "e4m3": 8}


def tensors_of(spec: ParamSpec, array: np.ndarray) -> dict[str, np.ndarray]:
    """The checkpoint's tensors that ``array``, a parameter in the layout of one device, consists of."""
    found: dict[str, np.ndarray] = {}
    at = 0
    for part in spec.parts:
        assert not any([part.cut, part.scales]), f"{part.name} has a layout of its own"
        n = part.view[spec.concat] * (part.repeat if spec.concat == 0 else 1)
        piece = np.take(array, range(at, at + n), axis=spec.concat)
        at += n
        rows = piece[:: part.repeat].reshape(part.n_rows, *part.shape[1:])
        whole = found.setdefault(part.name, np.empty(part.shape, array.dtype))
        whole[part.first : part.first + part.n_rows] = rows
    return found


def stored(module: str, matrix: Matrix, form: Form, dtype: Any) -> dict[str, np.ndarray]:
    """The tensors of a quantised matrix, scales as ``dtype``, which they have to be already."""
    scale = {f"{module}.weight_scale": matrix.scale.astype(dtype)}
    if not _packs(form):
        return {f"{module}.weight": matrix.q, **scale}
    shape = np.array(matrix.q.shape, np.int64)
    words = packed_words(matrix.q, BITS[form.kind])
    return {f"{module}.weight_packed": words, f"{module}.weight_shape": shape, **scale}


def packed_words(q: np.ndarray, bits: int) -> np.ndarray:
    """int32[N, ceil(D * bits / 32)] of int8[N, D]: values plus half their range, lowest bits first."""
    per = 32 // bits
    raised = (q.astype(np.int64) + 2 ** (bits - 1)).astype(np.uint32)
    raised = np.pad(raised, ((0, 0), (0, -q.shape[1] % per)))
    raised = raised.reshape(q.shape[0], -1, per) << (np.arange(per, dtype=np.uint32) * bits)
    return np.bitwise_or.reduce(raised, axis=-1).view(np.int32)


def config_of(forms: Mapping[str, Form | None]) -> dict[str, Any]:
    """``quantization_config`` of a model with these modules; None: a module is not quantised."""
    whole = [form for form in forms.values() if form is not None]
    kinds = sorted({*whole}, key=lambda form: (-whole.count(form), form.group))
    groups = {}
    for i, form in enumerate(kinds):
        named = [module for module, f in forms.items() if f == form]
        groups[f"group_{i}"] = _group(form, ["Linear"] if i == 0 else named)
    return {
        "quant_method": "compressed-tensors",
        "format": groups["group_0"]["format"],
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(module for module, form in forms.items() if form is None),
        "kv_cache_scheme": None,
    }


def _packs(form: Form) -> bool:
    return form.kind != "e4m3" and not form.rounded


def _group(form: Form, targets: list[str]) -> dict[str, Any]:
    kind = "float" if form.kind == "e4m3" else "int"
    weights = {
        "num_bits": BITS[form.kind],
        "type": kind,
        "symmetric": True,
        "strategy": "group" if form.group else "channel",
        "group_size": form.group or None,
        "dynamic": False,
    }
    rounded = {
        "num_bits": 8,
        "type": kind,
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    whole = "float-quantized" if form.kind == "e4m3" else "int-quantized"
    return {
        "targets": targets,
        "format": "pack-quantized" if _packs(form) else whole,
        "weights": weights,
        "input_activations": rounded if form.rounded else None,
        "output_activations": None,
    }
